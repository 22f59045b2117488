"""Which runs there are: `list` and `count`, by their indexes.

Each index that serves a list has the status before `updated_at`. A filter that leaves the status out names all of them, so the
server merges the runs of each status in the order of the list (SORT_MERGE) and sorts nothing. Metadata are binary to the server:
the filter on them reads the runs that the index leaves, one batch after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.base.damaged_runs import LINE_FIELDS, UNREADABLE, damaged_line, line_from
from perdure.backends.mongo.documents import REFERENCE, Document, awaited_from, ids_with_prefix, name_in
from perdure.backends.mongo.schema import Collections
from perdure.codec.outcomes import FAILED
from perdure.model.records import RunInfo
from perdure.model.run_filter import RunFilter

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
