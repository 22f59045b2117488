"""The change stream by which a store hears that something may be due.

The server sends only changes that can make a run due, or end one, and records with items; other records and renewals are not
among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.backends.base import retries
from perdure.backends.base.change_listener import ChangeListener
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.mongo.connections import MongoConnections
from perdure.backends.mongo.documents import Document

if TYPE_CHECKING:
    from pymongo.asynchronous.change_stream import AsyncDatabaseChangeStream

# How long the server waits for a change before it replies without one: well within the time after which it counts as silent.
_REPLY_AFTER_MS: Final = round(retries.REPLY_WITHIN / 2 * 1000)

_CHANGED: Final = "updateDescription.updatedFields"
# A claim sets the status to running, and a renewal the end of the lease together with wake_at: both are left out.
_MATTERS: Final[list[Document]] = [
    {"operationType": {"$in": ["insert", "replace"]}},
    {f"{_CHANGED}.status": {"$exists": True, "$ne": "running"}},
    {f"{_CHANGED}.wake_at": {"$exists": True}, f"{_CHANGED}.lease_until": {"$exists": False}},
    {f"{_CHANGED}.held": False},
    {f"{_CHANGED}.items_mark": {"$exists": True}},
    {f"{_CHANGED}.concurrency": {"$exists": True}},
    {f"{_CHANGED}.per_key": {"$exists": True}},
    {f"{_CHANGED}.start_interval": {"$exists": True}},
    {"operationType": "delete", "ns.coll": {"$regex": "_queues$"}},
]


class ChangeStream(ChangeListener):
    """The change stream of one store, over the collections that decide what is due."""

    def __init__(self, connections: MongoConnections, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._connections = connections
        self._stream: AsyncDatabaseChangeStream[Document] | None = None

    async def _open(self) -> None:
        db = self._connections.collections("")
        names = [f"{db.stem}_{part}" for part in ("runs", "queues", "schedules")]
        shown = {"_id": 1, "items_mark": f"${_CHANGED}.items_mark"}
        matters: list[Any] = [{"$match": {"ns.coll": {"$in": names}, "$or": _MATTERS}}, {"$project": shown}]
        with self._connections.time_limit():
            self._stream = await db.database.watch(matters, max_await_time_ms=_REPLY_AFTER_MS)

    async def _listen(self) -> None:
        if self._stream is None:
            return
        async with self._stream as stream:
            while stream.alive and not self._is_closed:
                with self._connections.time_limit():
                    change = await stream.try_next()
                if change is not None:
                    self._lifecycle.wake(only_items="items_mark" in change)
