"""What is read without a lease: journals, inboxes, streams, due runs, lists and counts.

A run's document is read first and what was moved out of it afterwards. If more was moved or the run was replaced in between, all
of it is read again.

Each index that serves a list has the status before `updated_at`. A filter that leaves the status out names all of them, so the
server merges the runs of each status in the order of the list (SORT_MERGE) and sorts nothing. Metadata are binary to the server:
the filter on them reads the runs that the index leaves, one batch after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perdure.backends.base.damaged_runs import LINE_FIELDS, UNREADABLE, damaged_line, line_from, raise_damage
from perdure.backends.mongo.documents import (
    LARGE_COLUMNS,
    LEAST,
    REFERENCE,
    ROW_ONLY,
    Document,
    awaited_from,
    entry_of,
    ids_below,
    ids_with_prefix,
    item_id,
    item_of,
    name_in,
    numbered_id,
    row_of,
    same_run,
    signal_of,
)
from perdure.backends.mongo.errors import TornError
from perdure.backends.mongo.overflow import journal_stem_in, load_payloads, stem_in
from perdure.backends.mongo.schema import Collections
from perdure.codec.outcomes import FAILED
from perdure.model.journal import Entry
from perdure.model.records import Item, RunInfo, RunRow, Signal
from perdure.model.run_filter import RunFilter

_OF_JOURNAL: Final = dict.fromkeys(("incarnation", "journal", "moves", "tail", "steps_top"), 1)
_OF_INBOX: Final = dict.fromkeys(("incarnation", "moves", "inbox", "moved_waiting", "consumed"), 1)
_OF_ITEMS: Final = dict.fromkeys(("incarnation", "moves", "items", "items_top"), 1)


async def get(db: Collections, run_id: str) -> RunRow | None:
    """The run's row, or None."""
    found = await db.runs.find_one({"_id": db.key(run_id)}, ROW_ONLY)
    return None if found is None else row_of((await load_payloads(db, [found], LARGE_COLUMNS))[0])


async def journal(db: Collections, run_id: str, after: int) -> list[Entry]:
    """The entries above `after`, by seq."""
    found = await db.runs.find_one({"_id": db.key(run_id)}, _OF_JOURNAL)
    with raise_damage(run_id, "the journal"):
        return [] if found is None else await journal_of(db, found, after)


async def inbox(db: Collections, run_id: str, after: int) -> list[Signal]:
    """The unconsumed inbox rows above `after`, by seq."""
    found = await db.runs.find_one({"_id": db.key(run_id)}, _OF_INBOX)
    with raise_damage(run_id, "the inbox"):
        return [] if found is None else [row for row in await inbox_of(db, found) if row.seq > after]


async def items(db: Collections, run_id: str, stream: str, after: int, limit: int) -> list[Item]:
    """Items of a stream above `after`, in order."""
    found = await db.runs.find_one({"_id": db.key(run_id)}, _OF_ITEMS)
    if found is None or limit <= 0:
        return []
    written = {item["n"]: item for item in found["items"] if item["stream"] == stream and item["n"] > after}
    if found["items_top"] >= 0:
        stem = stem_in(found)
        wanted = ids_below(f"{stem}\0{stream}") | {"$gte": item_id(stem, stream, max(after + 1, 0))}
        written |= {item["n"]: item async for item in db.items.find({"_id": wanted}).sort("_id", 1).limit(limit)}
        await _check_unmoved(db, found)
    return [item_of(item) for item in await load_payloads(db, [written[n] for n in sorted(written)[:limit]])]


async def journal_of(db: Collections, found: Mapping[str, Any], after: int = 0) -> list[Entry]:
    """The journal of a run whose document was read. Raises `TornError`."""
    written = {entry["seq"]: entry for entry in found["tail"] if entry["seq"] > after}
    if found["steps_top"] > after:
        stem = journal_stem_in(found)
        wanted = ids_below(stem) | {"$gte": numbered_id(stem, max(after + 1, 0))}
        written |= {entry["seq"]: entry async for entry in db.steps.find({"_id": wanted})}
        await _check_unmoved(db, found)
    return [entry_of(entry) for entry in await load_payloads(db, [written[seq] for seq in sorted(written)])]


async def inbox_of(db: Collections, found: Mapping[str, Any]) -> list[Signal]:
    """The unconsumed inbox of a run whose document was read. Raises `TornError`."""
    rows = [row for row in found["inbox"] if not row["is_consumed"]]
    if found["moved_waiting"]:
        moved = await db.signals.find({"_id": ids_below(stem_in(found)), "is_consumed": False}).sort("_id", 1).to_list()
        consumed = set(found["consumed"])
        rows = [*(row for row in moved if row["seq"] not in consumed), *rows]
        await _check_unmoved(db, found)
    waiting = {row["seq"]: row for row in rows}  # a row may also have a copy that a late move wrote
    return [signal_of(row) for row in await load_payloads(db, [waiting[seq] for seq in sorted(waiting)])]


async def item_counts(db: Collections, found: Mapping[str, Any]) -> dict[str, int]:
    """The length of each stream of a run whose document was read: its items are numbered from 0."""
    counts: dict[str, int] = {}
    if found["items_top"] >= 0:
        counts = await _count_moved(db, stem_in(found))
    for item in found["items"]:
        counts[item["stream"]] = max(counts.get(item["stream"], 0), item["n"] + 1)
    return counts


async def _count_moved(db: Collections, stem: str) -> dict[str, int]:
    """The length of each stream in `items`, read from stream to stream by the index: each may have many items."""
    counts: dict[str, int] = {}
    wanted = ids_below(stem)
    while True:
        first = await db.items.find_one({"_id": wanted}, {"stream": 1}, sort=[("_id", 1)])
        if first is None:
            return counts
        stream = first["stream"]
        last = await db.items.find_one({"_id": ids_below(f"{stem}\0{stream}")}, {"n": 1}, sort=[("_id", -1)])
        counts[stream] = 0 if last is None else last["n"] + 1
        wanted = wanted | {"$gte": f"{stem}\0{stream}\1"}


async def _check_unmoved(db: Collections, found: Mapping[str, Any]) -> None:
    still = same_run(found["_id"], found["incarnation"], moves=found["moves"])
    if await db.runs.find_one(still, {"_id": 1}) is None:
        raise TornError("a run was replaced while it was read")


def due_condition(db: Collections, now: int) -> Document:
    """A condition: runs that may be claimed now, in the form that the index serves."""
    return {"namespace": db.namespace, "held": False, "wake_at": {"$gte": LEAST, "$lte": now}}


async def due(db: Collections, limit: int, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed, longest due first."""
    if limit <= 0:
        return []
    cursor = db.runs.find(due_condition(db, await db.clock(now)), {"_id": 1}).sort([("wake_at", 1), ("_id", 1)]).limit(limit)
    return [name_in(found["_id"]) async for found in cursor]


def by_key(documents: Sequence[Document]) -> dict[str, Document]:
    """The documents by their `_id`."""
    return {document["_id"]: document for document in documents}


_LINE: Final[Document] = {
    **{name: 1 for name in LINE_FIELDS if name != "id"},
    "outcome": {"$cond": [{"$in": ["$status", list(FAILED)]}, "$outcome", None]},
}


async def list_runs(db: Collections, wanted: RunFilter, before: tuple[int, str] | None, limit: int) -> list[RunInfo]:
    """The runs that are asked for, last changed first, ties by id."""
    conditions = _conditions(db, wanted, is_sorted=True)
    if conditions is None:
        return []
    if before is not None:
        at, last = before[0], db.key(before[1])
        conditions["updated_at"] = {**conditions.get("updated_at", {}), "$lte": at}  # so that the index is used
        conditions["$or"] = [{"updated_at": {"$lt": at}}, {"_id": {"$gt": last}}]  # for ties
    found: list[Document] = []
    async with db.read_at_one_moment() as session:
        cursor = db.runs.find(conditions, _LINE, session=session).sort([("updated_at", -1), ("_id", 1)])
        if wanted.metadata is None:
            found = await cursor.limit(limit).to_list()
        else:
            async for document in cursor:
                if await _has_metadata(db, wanted, document):
                    found.append(document)
                if len(found) == limit:
                    break
    await _load_large(db, found, ("metadata", "outcome"))
    return [_line(document) for document in found]


def _line(document: Document) -> RunInfo:
    run_id = name_in(document["_id"])
    try:
        waiting_for = tuple(awaited_from(text) for text in document["waiting_for"])
        columns = {name: document[name] for name in LINE_FIELDS if name != "id"} | {"waiting_for": waiting_for}
    except UNREADABLE as reason:
        return damaged_line(run_id, document, reason)
    outcome = document.get("outcome")
    return line_from(run_id, columns, outcome if isinstance(outcome, bytes) else None)


async def count(db: Collections, wanted: RunFilter) -> int:
    """How many runs that are asked for there are."""
    conditions = _conditions(db, wanted, is_sorted=False)
    if conditions is None:
        return 0
    async with db.read_at_one_moment() as session:
        if wanted.metadata is None:
            return await db.runs.count_documents(conditions, session=session)
        total = 0
        async for document in db.runs.find(conditions, {"metadata": 1}, session=session):
            total += await _has_metadata(db, wanted, document)
        return total


async def _has_metadata(db: Collections, wanted: RunFilter, document: Document) -> bool:
    await _load_large(db, [document], ("metadata",))
    stored: Any = document.get("metadata")
    return isinstance(stored, bytes) and wanted.has_metadata(stored)


async def _load_large(db: Collections, documents: Sequence[Document], names: Sequence[str]) -> None:
    """Replace references to large payloads. One that is missing stays: that is damage to one run, or the run was deleted."""
    references = [(document, name) for document in documents for name in names if isinstance(document.get(name), dict)]
    if references:
        ids = sorted({str(document[name].get(REFERENCE)) for document, name in references})
        payloads = {found["_id"]: found["payload"] async for found in db.payloads.find({"_id": {"$in": ids}})}
        for document, name in references:
            document[name] = payloads.get(document[name].get(REFERENCE), document[name])


def _conditions(db: Collections, wanted: RunFilter, *, is_sorted: bool) -> Document | None:
    """The conditions on the runs that are asked for, but those on metadata; None when there can be none: no id has a NUL."""
    if "\0" in wanted.prefix:
        return None
    conditions: Document = {"namespace": db.namespace}
    if wanted.prefix:
        conditions["_id"] = ids_with_prefix(wanted.prefix)
    if wanted.status is not None or (is_sorted and not wanted.prefix):
        conditions["status"] = {"$in": list(wanted.statuses)}
    if wanted.workflow is not None:
        conditions["workflow"] = wanted.workflow
    if wanted.queue is not None:
        conditions["queue"] = wanted.queue
    instants = {"$gte": wanted.updated_after, "$lt": wanted.updated_before}
    if bounds := {name: at for name, at in instants.items() if at is not None}:
        conditions["updated_at"] = bounds
    return conditions
