"""Queue limits: how many runs of a queue, and of each limit key in it, are leased at once.

Who claims from queues with limits does so in a transaction that begins by writing to the queues' documents: of two at once, one
meets a conflict and begins again when the other is done, so they never count the same free place twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perdure.backends.mongo.documents import Document
from perdure.backends.mongo.names import name_in
from perdure.backends.mongo.schema import Collections
from perdure.model.records import QueueLimits

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession


async def limit_queue(db: Collections, queue: str, limits: QueueLimits) -> None:
    """Set the limits of a queue."""
    values = {"concurrency": limits.concurrency, "key_concurrency": limits.key_concurrency}
    key = db.key(queue)
    await db.queues.update_one({"_id": key}, {"$set": {"namespace": db.namespace, **values}}, upsert=True)


async def queue_limits(db: Collections) -> dict[str, QueueLimits]:
    """The limits that were set, by queue."""
    return {name_in(found["_id"]): _limits(found) async for found in db.queues.find({"namespace": db.namespace})}


def _limits(found: Document) -> QueueLimits:
    return QueueLimits(concurrency=found["concurrency"], key_concurrency=found["key_concurrency"])


async def of_queues(db: Collections, queues: Sequence[str] | None) -> list[Document]:
    """The documents of those queues, or all, that have a limit."""
    has_limit = [{"concurrency": {"$ne": None}}, {"key_concurrency": {"$ne": None}}]
    these = {} if queues is None else {"_id": {"$in": [db.key(queue) for queue in queues]}}
    return await db.queues.find({"namespace": db.namespace, "$or": has_limit, **these}).sort("_id", 1).to_list()


async def reserved(db: Collections, limited: Sequence[Document], now: int, session: AsyncClientSession) -> Room:
    """The room in these queues, which nobody else takes before the transaction ends."""
    for queue in limited:
        await db.queues.update_one({"_id": queue["_id"]}, {"$inc": {"turns": 1}}, session=session)
    limits = {name_in(queue["_id"]): _limits(queue) for queue in limited}
    leased = {"namespace": db.namespace, "queue": {"$in": sorted(limits)}, "lease_until": {"$gt": now}}
    group: Document = {"_id": {"queue": "$queue", "key": "$limit_key"}, "count": {"$sum": 1}}
    cursor = await db.runs.aggregate([{"$match": leased}, {"$group": group}], session=session)
    room = Room(limits)
    async for counted in cursor:
        room.count(counted["_id"]["queue"], counted["_id"].get("key"), counted["count"])
    return room


class Room:
    """How many more runs the queue limits let in."""

    def __init__(self, limits: dict[str, QueueLimits]) -> None:
        self._limits = limits
        self._taken: Counter[tuple[str, str | None]] = Counter()

    def count(self, queue: str, key: str | None, number: int = 1) -> None:
        """So many runs more are leased."""
        self._taken[queue, None] += number
        if key is not None:
            self._taken[queue, key] += number

    def take(self, queue: str, key: str | None) -> bool:
        """Whether one more run is let in; then it counts."""
        limits = self._limits.get(queue, QueueLimits())
        fits = _below(self._taken[queue, None], limits.concurrency) and (
            key is None or _below(self._taken[queue, key], limits.key_concurrency)
        )
        if fits:
            self.count(queue, key)
        return fits

    @property
    def conditions(self) -> dict[str, Any]:
        """What leaves out the runs that would not be let in now, so that they are not even read."""
        full = [queue for queue, limits in self._limits.items() if not _below(self._taken[queue, None], limits.concurrency)]
        by_key = [
            {"queue": queue, "limit_key": key}
            for (queue, key), taken in self._taken.items()
            if key is not None and not _below(taken, self._limits[queue].key_concurrency)
        ]
        nor = [*([{"queue": {"$in": full}}] if full else []), *by_key]
        return {"$nor": nor} if nor else {}


def _below(taken: int, limit: int | None) -> bool:
    return limit is None or taken < limit
