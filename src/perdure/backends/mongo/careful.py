"""A write that did not meet its condition, done step by step.

It may be stale, a lost reply sent again, contradict what is there, need more room, or have a parent to tell. What it needs is
read, and what is left of it is written under the fence and the condition that nothing was moved meanwhile. A child's end and its
parent's news are one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from perdure.backends.mongo.documents import FULL, Document, item_place, signal_of
from perdure.backends.mongo.inbox import NOT_ENDED, Arrival, deliver, for_run
from perdure.backends.mongo.moving import MANY_CONSUMED, filled, make_room, moved_item, put_all, stem_in, step_document
from perdure.backends.mongo.names import below, numbered, streamed
from perdure.backends.mongo.schema import Collections
from perdure.backends.mongo.writes import Write, entry_documents, is_held, item_documents, refusal_of, write_one
from perdure.errors import LeaseLost
from perdure.model.journal import Entry
from perdure.model.records import Item, Lease, Signal

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession


async def carefully(db: Collections, write: Write) -> tuple[Document, list[Signal]]:
    """Do the write step by step: the document after it, and what `suspend` found waiting.

    Raises `LeaseLost`, `PersistenceError`.
    """
    key = db.key(write.lease.run_id)
    while True:
        found = await db.runs.find_one({"_id": key})
        if found is not None and write.status is not None and found["closed_by"] == write.mark:
            return found, []  # it was done before, and the reply was lost
        if found is None or not is_held(found, write.lease):
            raise LeaseLost(write.lease.run_id, write.lease.epoch)
        left = await _left_of(db, found, write)
        if _needs_room(found, left):
            await make_room(db, [key])
            continue
        arrived = await _arrived(db, found, write) if write.awaited else []
        done = await _apply(db, found, left._replace(status=None, awaited=()) if arrived else left)
        if done is not None:
            return done, arrived


def _needs_room(found: Document, left: Write) -> bool:
    is_full = found["weight"] >= FULL and left.weight > 0 and not left.is_oversize
    return is_full or len(found["consumed"]) >= MANY_CONSUMED


async def _left_of(db: Collections, found: Document, write: Write) -> Write:
    """What of the write is not there yet. Raises `PersistenceError` when something else is, or an inbox row is not."""
    entries = await new_entries(db, found, write)
    items = await _new_items(db, found, write)
    inline = {row["seq"] for row in found["inbox"]}
    elsewhere = [seq for seq in write.consume if seq not in inline]
    moved = await _moved_rows(db, found, write.lease, elsewhere) if elsewhere else []
    consume = [seq for seq in write.consume if seq in inline]
    return write._replace(entries=entries, items=items, consume=consume, moved=moved)


async def new_entries(db: Collections, found: Document, write: Write) -> list[Entry]:
    written = {entry["seq"]: entry for entry in found["tail"]}
    names = [numbered(stem_in(found), entry.seq) for entry in write.entries if entry.seq <= found["steps_top"]]
    if names:
        written |= {entry["seq"]: entry async for entry in db.steps.find({"_id": {"$in": names}}, {"_id": 0})}
    for entry in entry_documents(db, write):
        if written.get(entry["seq"], entry) != entry:
            raise refusal_of(write.lease, f"something else is recorded under seq {entry['seq']} already")
    return [entry for entry in write.entries if entry.seq not in written]


async def _new_items(db: Collections, found: Document, write: Write) -> list[Item]:
    written = {item["at"]: item for item in found["items"]}
    names = [streamed(stem_in(found), item.stream, item.n) for item in write.items if item.n <= found["items_top"]]
    if names:
        written |= {item["at"]: item async for item in db.items.find({"_id": {"$in": names}}, {"_id": 0})}
    for item in item_documents(db, write):
        if written.get(item["at"], item) != item:
            raise refusal_of(write.lease, f"stream {item['stream']!r} has another item {item['n']} already")
    return [item for item in write.items if item_place(item) not in written]


async def _moved_rows(db: Collections, found: Document, lease: Lease, seqs: Sequence[int]) -> list[int]:
    """Which of these rows, all of which were moved, are not consumed yet."""
    names = [numbered(stem_in(found), seq) for seq in seqs if seq > 0]
    rows = {row["seq"]: row async for row in db.signals.find({"_id": {"$in": names}}, {"seq": 1, "is_consumed": 1})}
    for seq in seqs:
        if seq not in rows:
            raise refusal_of(lease, f"its inbox has no row {seq} to consume")
    return [seq for seq in seqs if not rows[seq]["is_consumed"] and seq not in found["consumed"]]


async def _arrived(db: Collections, found: Document, write: Write) -> list[Signal]:
    """The awaited inbox rows that are not consumed, also not by this write, in order."""
    rows = [row for row in found["inbox"] if not row["is_consumed"] and row["address"] in write.awaited]
    if found["moved_waiting"]:
        waiting = {"_id": below(stem_in(found)), "is_consumed": False, "address": {"$in": list(write.awaited)}}
        rows += await db.signals.find(waiting).to_list()
    gone = {*write.consume, *found["consumed"]}
    arrived = {row["seq"]: row for row in rows if row["seq"] not in gone}
    return [signal_of(row) for row in await filled(db, [arrived[seq] for seq in sorted(arrived)])]


async def _apply(db: Collections, found: Document, left: Write) -> Document | None:
    """The document after what is left was written, or None when it has to be looked at again."""
    news = await _news(db, found, left) if left.is_end and found["parent_key"] is not None else None
    if news is None and not left.is_oversize:
        return await write_one(db, left, found["moves"])  # type: ignore[no-any-return]  # a document or None
    try:
        return await db.atomically(lambda session: _apply_all(db, found, left, news, session))
    except _NotTakenError as refusal:
        await make_room(db, [refusal.args[0]])
        return None


async def _apply_all(
    db: Collections, found: Document, left: Write, news: _News | None, session: AsyncClientSession
) -> Document | None:
    done: Document | None = await write_one(db, left, found["moves"], session)
    if done is None:
        return None
    if left.is_oversize:
        stem = stem_in(found)
        await put_all(db.steps, [step_document(stem, entry) for entry in entry_documents(db, left)], session)
        await put_all(db.items, [moved_item(stem, item) for item in item_documents(db, left)], session)
    if news is not None:
        await _tell(db, news, session)
    return done


class _News(NamedTuple):
    """A child's outcome on its way to its parent, as that was found."""

    parent: str
    generation: str
    arrival: Arrival


async def _news(db: Collections, found: Document, left: Write) -> _News | None:
    """What there is to be told, or None when the parent has ended or is gone, as it then stays."""
    if found["parent_id"] is None:
        return None
    parent = await db.runs.find_one({"_id": db.key(found["parent_id"]), **NOT_ENDED}, {"generation": 1})
    if parent is None or parent["_id"] == found["_id"]:
        return None
    outcome = Signal(seq=0, kind="child", name=found["parent_key"], payload=left.outcome or b"")
    arrival = await for_run(db, parent, Arrival(outcome, left.mark, left.now))
    return _News(parent["_id"], parent["generation"], arrival)


async def _tell(db: Collections, news: _News, session: AsyncClientSession) -> None:
    """Put the outcome into the parent's inbox, unless it has ended or is gone by now."""
    as_found = {"generation": news.generation, "inbox_weight": {"$lt": FULL}}
    if await deliver(db, news.parent, news.arrival, as_found, session) is None:
        is_there = {"_id": news.parent, **NOT_ENDED}
        if await db.runs.find_one(is_there, {"_id": 1}, session=session) is not None:
            raise _NotTakenError(news.parent)


class _NotTakenError(Exception):
    """The parent's inbox is full, or the parent is another run by now. Nothing was written; look again."""
