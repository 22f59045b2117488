"""Queue limits, and the leases that keep to them.

A claim from queues with limits is a transaction that begins by writing to the queues' documents: of two such claims at once, one
meets a write conflict and begins again when the other is done, so they never count the same free place twice.

`create` and `acquire` are one update of the run's document, which cannot look at the queue's document as well. So a process
remembers which queues have limits for `_KNOWN_FOR`, by the server's clock: the update itself compares the server's time with the
end of that, and gives no lease after it. A `limit_queue` that limits a queue returns when that time has passed
(`until_it_is_known`), so from then on no process leases a run there without looking.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from perdure.backends.base.claim_rules import QueueCounter
from perdure.backends.mongo.documents import Document, KnownLimits, name_in
from perdure.backends.mongo.schema import Collections
from perdure.model.records import QueueLimits

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

_KNOWN_FOR: Final = 0.5
_READ_AGAIN_AFTER: Final = 0.4  # seconds: what is known then expires soon
_MARGIN: Final = 0.05
_FIELDS: Final = {"concurrency": "concurrency", "per_key": "per_key", "interval": "start_interval"}


async def known_limits(db: Collections) -> KnownLimits:
    """The queues that have limits, read again if that was some time ago."""
    known = db.known_limits
    if known is None or time.monotonic() - known.read_at > _READ_AGAIN_AFTER:
        known = db.known_limits = await _read_limits(db)
    return known


async def _read_limits(db: Collections) -> KnownLimits:
    read_at = time.monotonic()
    in_namespace = [{"$match": {"namespace": db.namespace}}, {"$project": {"_id": 1}}]
    lookup = {"from": db.queues.name, "pipeline": in_namespace, "as": "queues"}
    found_with_time: list[Document] = [
        {"$match": {"_id": "schema"}},
        {"$lookup": lookup},
        {"$project": {"queues": 1, "now": "$$NOW"}},
    ]
    (found,) = await (await db.meta.aggregate(found_with_time)).to_list()
    queues = frozenset(name_in(queue["_id"]) for queue in found["queues"])
    return KnownLimits(queues, found["now"] + timedelta(seconds=_KNOWN_FOR), read_at)


async def limit_queue(db: Collections, queue: str, limits: QueueLimits, *, is_repeated: bool) -> bool:
    """Replace the limits of a queue; whether it may have had none, so that other processes do not know of them yet."""
    key = {"_id": db.key(queue)}
    if not limits.is_limited:
        await db.queues.delete_one(key)
        return False
    values = {stored: getattr(limits, name) for name, stored in _FIELDS.items()}
    before = await db.queues.find_one_and_update(key, {"$set": {"namespace": db.namespace, **values}}, upsert=True)
    return before is None or is_repeated


async def until_it_is_known() -> None:
    """Wait until no process takes a queue for unlimited that has got its first limits before."""
    await asyncio.sleep(_KNOWN_FOR + _MARGIN)


async def queue_limits(db: Collections) -> dict[str, QueueLimits]:
    """The limits that were set, by queue."""
    return {name_in(found["_id"]): _limits(found) async for found in db.queues.find({"namespace": db.namespace})}


def _limits(found: Document) -> QueueLimits:
    return QueueLimits(**{name: found[stored] for name, stored in _FIELDS.items()})


async def find_limited(db: Collections, queues: Iterable[str] | None) -> list[str]:
    """The queues among these, or among all, that have limits."""
    these = {} if queues is None else {"_id": {"$in": [db.key(queue) for queue in queues]}}
    found = db.queues.find({"namespace": db.namespace, **these}, {"_id": 1}).sort("_id", 1)
    return [name_in(queue["_id"]) async for queue in found]


async def lock_queues(
    db: Collections, queues: Iterable[str], now: int | None, session: AsyncClientSession
) -> tuple[QueueCounter, int]:
    """What the limits of these queues let in, which no other claim changes before the transaction ends, and the time.

    A queue that has no limits, or lost them meanwhile, lets everything in.
    """
    limits: dict[str, QueueLimits] = {}
    last_starts: dict[str, int] = {}
    for queue in queues:
        found = await db.queues.find_one_and_update(
            {"_id": db.key(queue)}, {"$inc": {"turns": 1}}, return_document=True, session=session
        )
        if found is not None:
            limits[queue] = _limits(found)
            if found.get("last_start_at") is not None:
                last_starts[queue] = found["last_start_at"]
    at = await db.clock(now)
    leased = await _count_leased(db, sorted(limits), at, session) if limits else []
    return QueueCounter(limits, leased, last_starts=last_starts, now=at), at


async def _count_leased(
    db: Collections, queues: list[str], now: int, session: AsyncClientSession
) -> list[tuple[str, str | None, int]]:
    leased = {"namespace": db.namespace, "queue": {"$in": queues}, "lease_until": {"$gt": now}}
    group: Document = {"_id": {"queue": "$queue", "key": "$limit_key"}, "count": {"$sum": 1}}
    cursor = await db.runs.aggregate([{"$match": leased}, {"$group": group}], session=session)
    return [(one["_id"]["queue"], one["_id"].get("key"), one["count"]) async for one in cursor]


async def set_last_starts(db: Collections, counter: QueueCounter, at: int, session: AsyncClientSession) -> None:
    """Enter the starts that were counted, in the transaction that leases their runs."""
    for queue in sorted(counter.started):
        await db.queues.update_one({"_id": db.key(queue)}, {"$set": {"last_start_at": at}}, session=session)


def room_condition(counter: QueueCounter, queues: Iterable[str]) -> list[Document]:
    """Conditions of which none may hold: of the runs that the limits keep back now, so that they are not even read."""
    names = list(queues)
    paced = [queue for queue in names if not counter.may_start(queue)]
    keys = [{"queue": queue, "limit_key": key} for queue in names for key in counter.full_keys(queue)]
    return [{"queue": {"$in": counter.full_queues()}}, {"queue": {"$in": paced}, "epoch": 0}, *keys]
