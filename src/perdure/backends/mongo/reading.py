"""What is read without a lease: journals, inboxes, streams, due runs.

A run's document is read first and what was moved out of it afterwards. If more was moved or the run was replaced in between, all
of it is read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perdure.backends.base.damaged_runs import raise_damage
from perdure.backends.mongo.documents import (
    LARGE_COLUMNS,
    LEAST,
    ROW_ONLY,
    Document,
    entry_of,
    ids_below,
    item_id,
    item_of,
    name_in,
    numbered_id,
    row_of,
    same_run,
    signal_of,
)
from perdure.backends.mongo.errors import TornError
from perdure.backends.mongo.overflow import load_payloads, stem_in
from perdure.backends.mongo.schema import Collections
from perdure.model.journal import Entry
from perdure.model.records import Item, RunRow, Signal

_OF_JOURNAL: Final = dict.fromkeys(("generation", "moves", "tail", "steps_top"), 1)
_OF_INBOX: Final = dict.fromkeys(("generation", "moves", "inbox", "moved_waiting", "consumed"), 1)
_OF_ITEMS: Final = dict.fromkeys(("generation", "moves", "items", "items_top"), 1)


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
        stem = stem_in(found)
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
    still = same_run(found["_id"], found["generation"], moves=found["moves"])
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
