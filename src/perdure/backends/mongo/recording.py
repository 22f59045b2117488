"""What the holders of leases write, together: records, and what ends or suspends runs.

A write alone is one round trip. What arrived while another was under way goes as one bulk of updates, and one read tells which
were done, since each leaves its own mark: two round trips for all of them. Records under one lease are one update. A write that
did not meet its condition is done by itself (`careful`), and one that is refused fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from perdure.backends.base.batching import SEND_AGAIN, Reply
from perdure.backends.mongo.careful import carefully, new_entries
from perdure.backends.mongo.documents import FULL, Document, pulse_of
from perdure.backends.mongo.moving import column, make_room, put_payloads, spilling
from perdure.backends.mongo.reading import by_key
from perdure.backends.mongo.schema import Collections
from perdure.backends.mongo.writes import ANSWER, Write, condition_of, fence, pipeline_of, stem_for, write_one
from perdure.errors import LeaseLost, PerdureError, PersistenceError
from perdure.model.records import Lease, Pulse, Signal


async def record_all(db: Collections, writes: Sequence[Write]) -> list[Reply[Pulse]]:
    """Append what each write has; one that is refused is answered with its error, alone."""
    await _put_large(db, writes)
    groups = _grouped(writes)
    found = await _write_all(db, [_together(group) for group in groups.values()])
    answers: dict[str, Reply[Pulse]] = {}
    for group, document in zip(groups.values(), found, strict=True):
        for write in group:
            answer = pulse_of(document) if document is not None else await _recorded(db, write)
            is_unsure = isinstance(answer, LeaseLost) and len(groups) > 1
            answers[write.mark] = await _written_before(db, write) or answer if is_unsure else answer
    await _move_full(db, found)
    return [answers.get(write.mark, SEND_AGAIN) for write in writes]


def _grouped(writes: Sequence[Write]) -> dict[tuple[str, int, str], list[Write]]:
    """The writes under each lease, as many as go into one update; the others have to wait for the next."""
    groups: dict[tuple[str, int, str], list[Write]] = {}
    for write in writes:
        lease = write.lease
        group = groups.setdefault((lease.run_id, lease.epoch, lease.token), [])
        if not group or _fits(group, write):
            group.append(write)
    return groups


def _fits(group: Sequence[Write], write: Write) -> bool:
    taken = {place for one in group for place in one.numbers}
    return sum(one.weight for one in group) + write.weight <= FULL and taken.isdisjoint(write.numbers)


def _together(group: Sequence[Write]) -> Write:
    """One write that does what all of these do."""
    if len(group) == 1:
        return group[0]
    entries = [entry for write in group for entry in write.entries]
    items = [item for write in group for item in write.items]
    consume = list(dict.fromkeys(seq for write in group for seq in write.consume))
    return group[0]._replace(entries=entries, items=items, consume=consume)


async def _recorded(db: Collections, write: Write) -> Reply[Pulse]:
    try:
        document, _ = await carefully(db, write)
    except PerdureError as refusal:
        return refusal
    return pulse_of(document)


async def _written_before(db: Collections, write: Write) -> Pulse | None:
    """The pulse, if a write that was sent with others is in the journal.

    Then it was written, the run was taken over, and the next holder's mark stands over its own, all before one reply.
    """
    found = await db.runs.find_one({"_id": db.key(write.lease.run_id)})
    if found is None or not write.entries:
        return None
    with suppress(PersistenceError):  # something else is there
        return None if await new_entries(db, found, write) else pulse_of(found)
    return None


async def close_all(db: Collections, writes: Sequence[Write]) -> list[Reply[list[Signal]]]:
    """Record, and end or suspend each run. No two writes are for one run."""
    await _put_large(db, writes)
    found = await _write_all(db, writes)
    return [await _closed(db, write) if document is None else [] for write, document in zip(writes, found, strict=True)]


async def _closed(db: Collections, write: Write) -> Reply[list[Signal]]:
    try:
        _, arrived = await carefully(db, write)
    except PerdureError as refusal:
        return refusal
    return arrived


async def _put_large(db: Collections, writes: Sequence[Write]) -> None:
    await put_payloads(db, [(stem_for(db, write.lease), payload) for write in writes for payload in write.payloads])


async def _move_full(db: Collections, found: Sequence[Document | None]) -> None:
    """Move what has become too much. What was recorded stands whatever becomes of this; the next record would see to it."""
    from pymongo.errors import PyMongoError

    full = [document["_id"] for document in found if document is not None and document["weight"] >= FULL]
    if full:
        with suppress(PyMongoError):
            await make_room(db, full)


async def _write_all(db: Collections, writes: Sequence[Write]) -> list[Document | None]:
    """The documents after these writes, None in the place of each that did not meet its condition."""
    usual = [write for write in writes if not write.moved and not write.is_oversize]
    found: dict[str, Document] = {}
    if len(usual) == 1:
        document = await write_one(db, usual[0])
        found = {} if document is None else {usual[0].mark: document}
    elif usual:
        found = await _write_many(db, usual)
    return [found.get(write.mark) for write in writes]


async def _write_many(db: Collections, writes: Sequence[Write]) -> dict[str, Document]:
    from pymongo import UpdateOne

    updates = [UpdateOne(condition_of(db, write, None), pipeline_of(db, write)) for write in writes]
    all_done = (await db.runs.bulk_write(updates, ordered=False)).matched_count == len(writes)
    keys = [db.key(write.lease.run_id) for write in writes]
    found = by_key(await db.runs.find({"_id": {"$in": keys}}, ANSWER).to_list())
    seen = ((write, found.get(key)) for write, key in zip(writes, keys, strict=True))
    return {write.mark: document for write, document in seen if document and (all_done or _has_left(document, write))}


def _has_left(document: Document, write: Write) -> bool:
    """Whether the document has the mark of this write. The lease may be another's by now: it was current then."""
    return bool(document["last_write" if write.status is None else "closed_by"] == write.mark)


async def report(db: Collections, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress. Raises `LeaseLost`."""
    stem = stem_for(db, lease)
    await put_payloads(db, [(stem, progress)])
    changes = {"progress": column(stem, progress), **spilling(progress)}
    done = await db.runs.update_one(fence(db, lease), {"$set": changes})
    if not done.matched_count:
        raise LeaseLost(lease.run_id, lease.epoch)
