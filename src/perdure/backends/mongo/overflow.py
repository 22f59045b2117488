"""What overflows a run's document: long journals and inboxes, and large payloads. They stand in other collections.

Nothing here needs the lease. Parts are moved by copying them, under ids that only this incarnation of the run has, then taking
them out of the document, unless another process moved them meanwhile. All copies of a part are equal, however late they are
written, so one that is there already will do, and a reader merges document and copies by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from perdure.backends.mongo.documents import (
    FULL,
    LARGE,
    LARGE_COLUMNS,
    OVERSIZE,
    REFERENCE,
    Document,
    Expression,
    entry_as_stored,
    ids_below,
    ids_of_other_journals,
    item_id,
    item_of,
    journal_stem_of,
    literal,
    numbered_id,
    payload_id,
    plus,
    row_stem_of,
    same_run,
    signal_as_stored,
    stem_of,
    weight,
    without_first,
)
from perdure.backends.mongo.errors import TornError, has_only_duplicates
from perdure.backends.mongo.schema import Collections

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession
    from pymongo.asynchronous.collection import AsyncCollection

MANY_CONSUMED: Final = 500  # from this many on, moved rows that are consumed are marked so in `signals`
_MOVABLE: Final = dict.fromkeys(
    ("incarnation", "journal", "moves", "tail", "items", "inbox", "consumed", "weight", "inbox_weight", "steps_top", "items_top"),
    1,
)


def stem_in(document: Mapping[str, Any]) -> str:
    """What the ids of everything outside this run's document begin with."""
    return stem_of(document["_id"], document["incarnation"])


def journal_stem_in(document: Mapping[str, Any]) -> str:
    """What the ids of everything of the run's present journal begin with."""
    return journal_stem_of(stem_in(document), document["journal"])


def step_copy(stem: str, entry: Document) -> Document:
    """The entry in `steps`, of the journal with this stem."""
    return {"_id": numbered_id(stem, entry["seq"]), **entry}


def item_copy(stem: str, item: Document) -> Document:
    """The item in `items`."""
    return {"_id": item_id(stem, item["stream"], item["n"]), **item}


def signal_copy(stem: str, signal: Document) -> Document:
    """The inbox row in `signals`. Until it is marked there, the run's document says whether it is consumed."""
    return {"_id": numbered_id(stem, signal["seq"]), "run": stem, **signal, "is_consumed": False}


async def insert_missing(
    collection: AsyncCollection[Document], documents: Sequence[Document], session: AsyncClientSession | None = None
) -> None:
    """Insert those of the documents that are missing; those that exist are equal."""
    from pymongo.errors import BulkWriteError

    if not documents:
        return
    try:
        await collection.insert_many(documents, ordered=False, session=session)
    except BulkWriteError as error:
        if session is not None or not has_only_duplicates(error):
            raise


async def move_overflow(db: Collections, keys: Iterable[str]) -> None:
    """Move journals, streams and inboxes out of those documents of these runs that are full."""
    found = await db.runs.find({"_id": {"$in": list(keys)}}, _MOVABLE).to_list()
    moving = [move for move in map(_OverflowMove, found) if not move.is_empty]
    await insert_missing(db.steps, [copy for move in moving for copy in move.steps])
    await insert_missing(db.items, [copy for move in moving for copy in move.items])
    await insert_missing(db.signals, [copy for move in moving for copy in move.signals])
    consumed = [numbered_id(move.stem, seq) for move in moving for seq in move.consumed]
    if consumed:
        await db.signals.update_many({"_id": {"$in": consumed}}, {"$set": {"is_consumed": True}})
    if moving:
        from pymongo import UpdateOne

        await db.runs.bulk_write([UpdateOne(move.condition, move.pipeline) for move in moving], ordered=False)


class _OverflowMove:
    """What is moved out of one document as it was read, and the update that takes it out."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.stem = stem_in(document)
        is_full, is_inbox_full = document["weight"] >= FULL, document["inbox_weight"] >= FULL
        self.steps = [step_copy(journal_stem_in(document), entry) for entry in document["tail"]] if is_full else []
        self.items = [item_copy(self.stem, item) for item in document["items"]] if is_full else []
        self.signals = [signal_copy(self.stem, signal) for signal in document["inbox"]] if is_inbox_full else []
        self.consumed: list[int] = document["consumed"]

    @property
    def is_empty(self) -> bool:
        return not (self.steps or self.items or self.signals or len(self.consumed) >= MANY_CONSUMED)

    @property
    def condition(self) -> Document:
        return same_run(self._document["_id"], self._document["incarnation"], moves=self._document["moves"])

    @property
    def pipeline(self) -> list[Expression]:
        # Arrays only grow at their ends, or shrink by another move, which the condition excludes.
        changes = {"moves": plus("moves", 1), "is_spilled": True, **self._journal(), **self._inbox()}
        return [{"$set": changes}]

    def _journal(self) -> dict[str, Expression]:
        entries, items = list(map(entry_as_stored, self.steps)), list(map(item_of, self.items))
        return {
            "tail": without_first("tail", len(entries)),
            "items": without_first("items", len(items)),
            "steps_top": max([self._document["steps_top"], *(entry.seq for entry in entries)]),
            "items_top": max([self._document["items_top"], *(item.n for item in items)]),
            "weight": plus("weight", -weight([*entries, *items])),
        }

    def _inbox(self) -> dict[str, Expression]:
        count = len(self.signals)
        moved: Expression = {"$slice": ["$inbox", count]} if count else literal([])
        # Rows may have been consumed since they were read.
        consumed = {"$filter": {"input": moved, "cond": "$$this.is_consumed"}}
        return {
            "inbox": without_first("inbox", count),
            "inbox_weight": plus("inbox_weight", -weight(map(signal_as_stored, self.signals))),
            "moved_rows": plus("moved_rows", count),
            "moved_waiting": plus("moved_waiting", {"$subtract": [count, {"$size": consumed}]}),
            "consumed": {
                "$concatArrays": [
                    {"$setDifference": ["$consumed", literal(self.consumed)]},
                    {"$map": {"input": consumed, "in": "$$this.seq"}},
                ]
            },
        }


async def split_document(db: Collections, document: Document) -> Document:
    """The document of a new run without what would make it too large, which is stored in the other collections first."""
    stem, journal_stem = stem_in(document), journal_stem_in(document)
    stems = {name: journal_stem if name == "input" else stem for name in LARGE_COLUMNS}
    payloads = [
        *((stems[name], document[name]) for name in LARGE_COLUMNS),
        *((journal_stem, entry["payload"]) for entry in document["tail"]),
        *((row_stem_of(stem, str(row["seq"])), row["payload"]) for row in document["inbox"]),
    ]
    await store_payloads(db, payloads)
    columns = {name: inline_or_reference(stems[name], document[name]) for name in LARGE_COLUMNS}
    tail = [with_reference(journal_stem, entry) for entry in document["tail"]]
    inbox = [with_reference(row_stem_of(stem, str(row["seq"])), row) for row in document["inbox"]]
    flag = spilled_flag(*(payload for _, payload in payloads))
    return await _move_oversize(db, {**document, **columns, "tail": tail, "inbox": inbox, **flag})


async def _move_oversize(db: Collections, document: Document) -> Document:
    stem, entries, rows = stem_in(document), document["tail"], document["inbox"]
    changes: Document = {}
    if document["weight"] > OVERSIZE:
        await insert_missing(db.steps, [step_copy(journal_stem_in(document), entry) for entry in entries])
        changes |= {"steps_top": max(entry["seq"] for entry in entries), "tail": [], "weight": 0, "is_spilled": True}
    if document["inbox_weight"] > OVERSIZE:
        await insert_missing(db.signals, [signal_copy(stem, row) for row in rows])
        changes |= {"moved_rows": len(rows), "moved_waiting": len(rows), "inbox": [], "inbox_weight": 0, "is_spilled": True}
    return document | changes


def is_large(payload: bytes | None) -> bool:
    """Whether the payload is stored outside the run's document."""
    return payload is not None and len(payload) > LARGE


def inline_or_reference(stem: str, payload: bytes | None) -> Any:
    """What the document has for this payload: the payload, or a reference to it in `payloads`."""
    return {REFERENCE: payload_id(stem, payload)} if payload is not None and is_large(payload) else payload


def with_reference(stem: str, part: Document) -> Document:
    """The entry, item or inbox row, with its payload or a reference to it."""
    return part | {"payload": inline_or_reference(stem, part["payload"])}


def spilled_flag(*payloads: bytes | None) -> Document:
    """The change that says that the run has parts outside its document, if one of these payloads is large."""
    return {"is_spilled": True} if any(map(is_large, payloads)) else {}


async def store_payloads(db: Collections, payloads: Iterable[tuple[str, bytes | None]]) -> None:
    """Store the large ones of these payloads, each under the stem of its run, before anything refers to them.

    A write that is refused afterwards leaves them behind unused, until the run is deleted.
    """
    large = {payload_id(stem, payload): payload for stem, payload in payloads if payload is not None and is_large(payload)}
    for name, payload in large.items():
        await insert_missing(db.payloads, [{"_id": name, "payload": payload}])


async def load_payloads(
    db: Collections, documents: Sequence[Document], names: Sequence[str] = ("payload",)
) -> Sequence[Document]:
    """The documents, in which references are replaced by the payloads. Raises `TornError`."""
    references = [(document, name) for document in documents for name in names if isinstance(document[name], dict)]
    if references:
        wanted = {document[name][REFERENCE] for document, name in references}
        payloads = {found["_id"]: found["payload"] async for found in db.payloads.find({"_id": {"$in": sorted(wanted)}})}
        if not payloads.keys() >= wanted:
            raise TornError("a run was deleted while it was read")
        for document, name in references:
            document[name] = payloads[document[name][REFERENCE]]
    return documents


async def delete_overflow(db: Collections, document: Mapping[str, Any]) -> None:
    """Remove what a deleted or replaced run had outside its document."""
    if document["is_spilled"]:
        for collection in (db.steps, db.items, db.signals, db.payloads):
            await collection.delete_many({"_id": ids_below(stem_in(document))})


async def delete_other_journals(db: Collections, document: Mapping[str, Any]) -> None:
    """Remove what the run had outside its document of journals before the present one."""
    if document["is_spilled"]:
        for condition in ids_of_other_journals(stem_in(document), document["journal"]):
            for collection in (db.steps, db.payloads):
                await collection.delete_many({"_id": condition})


async def delete_consumed(db: Collections, document: Mapping[str, Any], dropped: Iterable[Document]) -> None:
    """Remove what consumed inbox rows have outside the document, but those with a dedupe: repeated signals are known by them.

    That is the large payloads of rows that were `dropped` from it, and rows that were moved and marked as consumed, with theirs.
    """
    rows = list(dropped)
    if document["moved_rows"]:
        is_consumed = {"_id": ids_below(stem_in(document)), "is_consumed": True, "dedupe": None}
        rows += await db.signals.find(is_consumed, {"payload": 1}).to_list()
        await db.signals.delete_many({"_id": {"$in": [row["_id"] for row in rows if "_id" in row]}})
    payloads = [row["payload"][REFERENCE] for row in rows if isinstance(row["payload"], dict)]
    if payloads:
        await db.payloads.delete_many({"_id": {"$in": payloads}})
