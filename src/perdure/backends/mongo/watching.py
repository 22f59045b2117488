"""Being told that something may be due: a change stream over the collections, and looking now and then where there is none.

Only changes that can make a run due, or end one, are sent by the server; records and renewals are not.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.mongo.connections import MongoConnections
from perdure.backends.mongo.documents import Document

if TYPE_CHECKING:
    from pymongo.asynchronous.change_stream import AsyncDatabaseChangeStream

POLL_EVERY: Final = 1.0
# How long the server waits for a change before it answers without one, and how long closing waits for the stream to end.
_ANSWER_AFTER_MS: Final = 1_000
_END_WITHIN: Final = 5.0

_CHANGED: Final = "updateDescription.updatedFields"
# A claim makes a run running; a renewal changes the end of the lease besides.
_MATTERS: Final[list[Document]] = [
    {"operationType": {"$in": ["insert", "replace"]}},
    {f"{_CHANGED}.status": {"$exists": True, "$ne": "running"}},
    {f"{_CHANGED}.wake_at": {"$exists": True}, f"{_CHANGED}.lease_until": {"$exists": False}},
    {f"{_CHANGED}.held": False},
    {f"{_CHANGED}.concurrency": {"$exists": True}},
    {f"{_CHANGED}.key_concurrency": {"$exists": True}},
]


class Listener:
    """The change stream of a store. Everything but `is_live` happens on the connections loop.

    `is_live` says that a change made from now on wakes the watchers. When the stream breaks they are woken once, since something
    may have been missed, and the next watch opens another.
    """

    def __init__(self, connections: MongoConnections, lifecycle: Lifecycle) -> None:
        self._connections = connections
        self._lifecycle = lifecycle
        self._starting: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._is_closed = False
        self.is_live = False

    async def start(self) -> None:
        """Listen, if that is possible. Many may ask at once."""
        if self.is_live:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())
        with contextlib.suppress(Exception):  # the watcher looks for itself, and meets the error at its next verb
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        db = self._connections.collections("")
        names = [f"{db.stem}_{part}" for part in ("runs", "queues", "schedules")]
        matters: list[Any] = [{"$match": {"ns.coll": {"$in": names}, "$or": _MATTERS}}, {"$project": {"_id": 1}}]
        with self._connections.bounded():
            stream = await db.database.watch(matters, max_await_time_ms=_ANSWER_AFTER_MS)
        self._listening = asyncio.ensure_future(self._listen(stream))
        self.is_live = True

    async def _listen(self, stream: AsyncDatabaseChangeStream[Document]) -> None:
        try:
            with contextlib.suppress(Exception):  # it broke: whoever watches looks for itself
                async with stream:
                    while stream.alive and not self._is_closed:
                        with self._connections.bounded():
                            change = await stream.try_next()
                        if change is not None:
                            self._lifecycle.wake()
        finally:
            self.is_live = False
            self._lifecycle.wake()

    async def close(self) -> None:
        """Stop listening. What does not end soon is left behind: it ends by itself, with its next answer or its connection."""
        self._is_closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=_END_WITHIN)
        if self._listening is not None:
            # Until Python 3.12 `wait_for`, by which the driver sends, loses a cancellation that comes as it ends.
            self._listening.cancel()
            await asyncio.wait([self._listening], timeout=_END_WITHIN)
