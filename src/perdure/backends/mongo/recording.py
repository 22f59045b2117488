"""What the holders of leases write: records, and the updates that end or suspend runs; many at a time, or step by step.

A write alone is one round trip. The writes that arrived while another was under way go as one bulk of updates, and one read says
which were done, since each leaves its own mark: two round trips for all of them. Records under one lease are one update.

A write that did not meet its condition is done step by step, and one that is refused fails alone. It may be stale, repeated after
a lost reply, contradict what is recorded, need more room, or have a parent to notify. What it depends on is read, and what is
missing of it is written under the fence and the condition that nothing was moved meanwhile. A child's end and the notice to its
parent are one transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from perdure.backends.base.batching import SEND_AGAIN, Reply
from perdure.backends.base.duplicate_records import check_consumed, missing_entries, missing_items
from perdure.backends.mongo.documents import (
    FULL,
    JOURNAL_LENGTH,
    Document,
    entry_as_stored,
    ids_below,
    item_id,
    item_of,
    journal_stem_of,
    literal,
    numbered_id,
    pulse_of,
    signal_as_stored,
)
from perdure.backends.mongo.inbox import NOT_ENDED, InboxDelivery, address_to, deliver
from perdure.backends.mongo.overflow import (
    MANY_CONSUMED,
    delete_consumed,
    delete_other_journals,
    inline_or_reference,
    insert_missing,
    item_copy,
    journal_stem_in,
    load_payloads,
    move_overflow,
    spilled_flag,
    stem_in,
    step_copy,
    store_payloads,
)
from perdure.backends.mongo.reading import by_key
from perdure.backends.mongo.schema import Collections
from perdure.backends.mongo.writes import (
    ANSWER,
    RunUpdate,
    condition_of,
    continue_changes,
    entry_documents,
    fence,
    is_held,
    item_documents,
    journal_stem_for,
    pipeline_of,
    stem_for,
    write_one,
)
from perdure.errors import LeaseLost, PerdureError, PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Item, Lease, NewInput, Pulse, Signal

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession


async def record_all(db: Collections, writes: Sequence[RunUpdate]) -> list[Reply[Pulse]]:
    """Record what each write has. The reply to one that is refused is its error."""
    await _store_large(db, writes)
    groups = _group_by_lease(writes)
    found = await _write_all(db, [_merge(group) for group in groups.values()])
    replies: dict[str, Reply[Pulse]] = {}
    for group, document in zip(groups.values(), found, strict=True):
        for write in group:
            reply = pulse_of(document) if document is not None else await _record_alone(db, write)
            is_unsure = isinstance(reply, LeaseLost) and len(groups) > 1
            replies[write.mark] = await _find_recorded(db, write) or reply if is_unsure else reply
    await _move_full(db, found)
    return [replies.get(write.mark, SEND_AGAIN) for write in writes]


def _group_by_lease(writes: Sequence[RunUpdate]) -> dict[tuple[str, int, str], list[RunUpdate]]:
    """The writes under each lease, as many as fit into one update; the others are left for the next."""
    groups: dict[tuple[str, int, str], list[RunUpdate]] = {}
    for write in writes:
        lease = write.lease
        group = groups.setdefault((lease.run_id, lease.epoch, lease.token), [])
        if not group or _fits(group, write):
            group.append(write)
    return groups


def _fits(group: Sequence[RunUpdate], write: RunUpdate) -> bool:
    taken = {place for one in group for place in one.numbers}
    return sum(one.weight for one in group) + write.weight <= FULL and taken.isdisjoint(write.numbers)


def _merge(group: Sequence[RunUpdate]) -> RunUpdate:
    """One write in place of all of these."""
    if len(group) == 1:
        return group[0]
    entries = [entry for write in group for entry in write.entries]
    items = [item for write in group for item in write.items]
    consume = list(dict.fromkeys(seq for write in group for seq in write.consume))
    return group[0]._replace(entries=entries, items=items, consume=consume)


async def _record_alone(db: Collections, write: RunUpdate) -> Reply[Pulse]:
    try:
        document, _ = await write_step_by_step(db, write)
    except PerdureError as refusal:
        return refusal
    return pulse_of(document)


async def _find_recorded(db: Collections, write: RunUpdate) -> Pulse | None:
    """The pulse, if a write that was sent in a bulk is in the journal, although its lease is lost.

    Then it was written, and the next holder took the run over and left its own mark, all before the reply to the bulk.
    """
    found = await db.runs.find_one({"_id": db.key(write.lease.run_id)})
    if found is None or not write.entries:
        return None
    with suppress(PersistenceError):  # something else is recorded
        return None if await _find_new_entries(db, found, write) else pulse_of(found)
    return None


async def close_all(db: Collections, writes: Sequence[RunUpdate]) -> list[Reply[list[Signal]]]:
    """Record, and end or suspend each run. No two of the writes are for the same run."""
    await _store_large(db, writes)
    found = await _write_all(db, writes)
    return [await _close_alone(db, write) if document is None else [] for write, document in zip(writes, found, strict=True)]


async def _close_alone(db: Collections, write: RunUpdate) -> Reply[list[Signal]]:
    try:
        _, arrived = await write_step_by_step(db, write)
    except PerdureError as refusal:
        return refusal
    return arrived


async def _store_large(db: Collections, writes: Sequence[RunUpdate]) -> None:
    of_journals = [(journal_stem_for(db, write.lease), entry.payload) for write in writes for entry in write.entries]
    kept = [(stem_for(db, write.lease), payload) for write in writes for payload in write.kept_payloads]
    await store_payloads(db, [*of_journals, *kept])


async def _move_full(db: Collections, found: Sequence[Document | None]) -> None:
    """Move the overflow out of full documents. If that fails nothing is lost: the next record does it."""
    from pymongo.errors import PyMongoError

    full = [document["_id"] for document in found if document is not None and document["weight"] >= FULL]
    if full:
        with suppress(PyMongoError):
            await move_overflow(db, full)


async def _write_all(db: Collections, writes: Sequence[RunUpdate]) -> list[Document | None]:
    """The documents after these writes, or None for each that did not meet its condition."""
    usual = [write for write in writes if not write.moved and not write.is_oversize]
    found: dict[str, Document] = {}
    if len(usual) == 1:
        document = await write_one(db, usual[0])
        found = {} if document is None else {usual[0].mark: document}
    elif usual:
        found = await _write_many(db, usual)
    return [found.get(write.mark) for write in writes]


async def _write_many(db: Collections, writes: Sequence[RunUpdate]) -> dict[str, Document]:
    from pymongo import UpdateOne

    updates = [UpdateOne(condition_of(db, write, None), pipeline_of(db, write)) for write in writes]
    all_done = (await db.runs.bulk_write(updates, ordered=False)).matched_count == len(writes)
    keys = [db.key(write.lease.run_id) for write in writes]
    found = by_key(await db.runs.find({"_id": {"$in": keys}}, ANSWER).to_list())
    seen = ((write, found.get(key)) for write, key in zip(writes, keys, strict=True))
    return {write.mark: document for write, document in seen if document and (all_done or _has_mark(document, write))}


def _has_mark(document: Document, write: RunUpdate) -> bool:
    """Whether the document has the mark of this write. The lease was current then, even if it is lost by now."""
    return bool(document["last_write" if write.status is None else "closed_by"] == write.mark)


async def report(db: Collections, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress. Raises `LeaseLost`."""
    stem = stem_for(db, lease)
    await store_payloads(db, [(stem, progress)])
    changes = {"progress": inline_or_reference(stem, progress), **spilled_flag(progress)}
    done = await db.runs.update_one(fence(db, lease), {"$set": changes})
    if not done.matched_count:
        raise LeaseLost(lease.run_id, lease.epoch)


async def write_step_by_step(db: Collections, write: RunUpdate) -> tuple[Document, list[Signal]]:
    """Do the write step by step; the document after it, and the awaited rows that kept a run from being suspended.

    Raises `LeaseLost`, `PersistenceError`.
    """
    key = db.key(write.lease.run_id)
    while True:
        found = await db.runs.find_one({"_id": key})
        if found is not None and write.status is not None and found["closed_by"] == write.mark:
            return found, []  # it was done before, and the reply was lost
        if found is None or not is_held(found, write.lease):
            raise LeaseLost(write.lease.run_id, write.lease.epoch)
        left = await _find_missing(db, found, write)
        if _needs_move(found, left):
            await move_overflow(db, [key])
            continue
        arrived = await _find_awaited(db, found, write) if write.awaited else []
        done = await _apply(db, found, left._replace(status=None, awaited=()) if arrived else left)
        if done is not None:
            return done, arrived


def _needs_move(found: Document, left: RunUpdate) -> bool:
    is_full = found["weight"] >= FULL and left.weight > 0 and not left.is_oversize
    return is_full or len(found["consumed"]) >= MANY_CONSUMED


async def _find_missing(db: Collections, found: Document, write: RunUpdate) -> RunUpdate:
    """The part of the write that is not recorded yet. Raises `PersistenceError` for a contradiction or a missing inbox row."""
    entries = await _find_new_entries(db, found, write)
    items = await _find_new_items(db, found, write)
    inline = {row["seq"] for row in found["inbox"]}
    elsewhere = [seq for seq in write.consume if seq not in inline]
    moved = await _find_moved_rows(db, found, write.lease, elsewhere) if elsewhere else []
    consume = [seq for seq in write.consume if seq in inline]
    return write._replace(entries=entries, items=items, consume=consume, moved=moved)


async def _find_new_entries(db: Collections, found: Document, write: RunUpdate) -> list[Entry]:
    """The entries that are not recorded. Raises `PersistenceError` when something else is recorded under their seqs."""
    recorded = {entry["seq"]: entry_as_stored(entry) for entry in found["tail"]}
    stem = journal_stem_in(found)
    ids = [numbered_id(stem, entry.seq) for entry in write.entries if entry.seq <= found["steps_top"]]
    if ids:
        recorded |= {entry["seq"]: entry_as_stored(entry) async for entry in db.steps.find({"_id": {"$in": ids}})}
    missing = missing_entries(write.lease.run_id, recorded, [entry_as_stored(entry) for entry in entry_documents(db, write)])
    return [entry for entry in write.entries if entry.seq in missing]


async def _find_new_items(db: Collections, found: Document, write: RunUpdate) -> list[Item]:
    """The items that are not recorded. Raises `PersistenceError` when others are recorded under their numbers."""
    recorded = {(item["stream"], item["n"]): item_of(item) for item in found["items"]}
    ids = [item_id(stem_in(found), item.stream, item.n) for item in write.items if item.n <= found["items_top"]]
    if ids:
        recorded |= {(item["stream"], item["n"]): item_of(item) async for item in db.items.find({"_id": {"$in": ids}})}
    missing = missing_items(write.lease.run_id, recorded, [item_of(item) for item in item_documents(db, write)])
    return [item for item in write.items if (item.stream, item.n) in missing]


async def _find_moved_rows(db: Collections, found: Document, lease: Lease, seqs: Sequence[int]) -> list[int]:
    """Which of these rows, all of which were moved, are not consumed yet. Raises `PersistenceError` for one that is missing."""
    ids = [numbered_id(stem_in(found), seq) for seq in seqs if seq > 0]
    rows = {row["seq"]: row async for row in db.signals.find({"_id": {"$in": ids}}, {"seq": 1, "is_consumed": 1})}
    check_consumed(lease.run_id, rows, seqs)
    return [seq for seq in seqs if not rows[seq]["is_consumed"] and seq not in found["consumed"]]


async def _find_awaited(db: Collections, found: Document, write: RunUpdate) -> list[Signal]:
    """The awaited inbox rows that are not consumed, also not by this write, in order."""
    rows = [row for row in found["inbox"] if not row["is_consumed"] and row["address"] in write.awaited]
    if found["moved_waiting"]:
        waiting = {"_id": ids_below(stem_in(found)), "is_consumed": False, "address": {"$in": list(write.awaited)}}
        rows += await db.signals.find(waiting).to_list()
    consumed = {*write.consume, *found["consumed"]}
    arrived = {row["seq"]: row for row in rows if row["seq"] not in consumed}
    return [signal_as_stored(row) for row in await load_payloads(db, [arrived[seq] for seq in sorted(arrived)])]


async def _apply(db: Collections, found: Document, left: RunUpdate) -> Document | None:
    """The document after what is left was written, or None when the run has to be read again."""
    notice = await _notice_for(db, found, left) if left.is_end and found["parent_key"] is not None else None
    if notice is None and not left.is_oversize:
        return await write_one(db, left, found["moves"])  # type: ignore[no-any-return]  # a document or None
    try:
        return await db.run_transaction(lambda session: _apply_all(db, found, left, notice, session))
    except _ParentChangedError as refusal:
        await move_overflow(db, [refusal.args[0]])
        return None


async def _apply_all(
    db: Collections, found: Document, left: RunUpdate, notice: _ParentNotice | None, session: AsyncClientSession
) -> Document | None:
    done: Document | None = await write_one(db, left, found["moves"], session)
    if done is None:
        return None
    if left.is_oversize:
        stem = stem_in(found)
        await insert_missing(db.steps, [step_copy(journal_stem_in(found), entry) for entry in entry_documents(db, left)], session)
        await insert_missing(db.items, [item_copy(stem, item) for item in item_documents(db, left)], session)
    if notice is not None:
        await _notify_parent(db, notice, session)
    return done


class _ParentNotice(NamedTuple):
    """A child's outcome on its way to its parent, whose incarnation is the one that was read."""

    parent: str
    incarnation: str
    delivery: InboxDelivery


async def _notice_for(db: Collections, found: Document, left: RunUpdate) -> _ParentNotice | None:
    """The notice to the parent, or None when the parent has ended or was deleted, which does not change any more."""
    if found["parent_id"] is None:
        return None
    parent = await db.runs.find_one({"_id": db.key(found["parent_id"]), **NOT_ENDED}, {"incarnation": 1})
    if parent is None or parent["_id"] == found["_id"]:
        return None
    outcome = Signal(seq=0, kind="child", name=found["parent_key"], payload=left.outcome or b"")
    delivery = await address_to(db, parent, InboxDelivery(outcome, left.mark, left.now))
    return _ParentNotice(parent["_id"], parent["incarnation"], delivery)


async def _notify_parent(db: Collections, notice: _ParentNotice, session: AsyncClientSession) -> None:
    """Put the outcome into the parent's inbox, unless the parent has ended or was deleted meanwhile."""
    as_found = {"incarnation": notice.incarnation, "inbox_weight": {"$lt": FULL}}
    if await deliver(db, notice.parent, notice.delivery, as_found, session) is None:
        is_there = {"_id": notice.parent, **NOT_ENDED}
        if await db.runs.find_one(is_there, {"_id": 1}, session=session) is not None:
            raise _ParentChangedError(notice.parent)


class _ParentChangedError(Exception):
    """The parent's inbox is full, or the parent was replaced. Nothing was written; it has to be read again."""


async def continue_as(db: Collections, lease: Lease, new: NewInput, now: int | None) -> None:
    """Let the run start over with this input and another journal, and then delete the old one. Raises `LeaseLost`."""
    key, dropped = db.key(lease.run_id), list[Document]()
    journal = secrets.token_hex(JOURNAL_LENGTH // 2)
    while True:
        found = await db.runs.find_one({"_id": key})
        if found is not None and found["seed"] == new.seed:
            break  # it was done before, and the reply was lost
        if found is None or not is_held(found, lease):
            raise LeaseLost(lease.run_id, lease.epoch)
        stem = journal_stem_of(stem_in(found), journal)
        await store_payloads(db, [(stem, new.input)])
        large = {"input": inline_or_reference(stem, new.input), **spilled_flag(new.input)}
        kept = [row for row in found["inbox"] if not row["is_consumed"] or row["dedupe"] is not None]
        changes = (
            continue_changes(found, kept, new, now) | {"journal": journal} | {name: literal(each) for name, each in large.items()}
        )
        unchanged = {"moves": found["moves"], "length": found["length"], "inbox_seq": found["inbox_seq"]}
        done = await db.runs.find_one_and_update({**fence(db, lease), **unchanged}, [{"$set": changes}], return_document=True)
        if done is not None:
            dropped = [row for row in found["inbox"] if row not in kept]
            found = done
            break
    await delete_other_journals(db, found)
    await delete_consumed(db, found, dropped)
