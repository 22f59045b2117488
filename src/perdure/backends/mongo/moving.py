"""What does not stay in a run's document: long journals and inboxes, and large payloads.

Nothing here needs the lease. What is moved is first copied, under names that only this generation of the run has, and then taken
out of the document if that was not moved by somebody else meanwhile. A copy says the same whoever made it and however late, so
one that is there already is as good, and whoever reads takes both together, by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from perdure.backends.mongo.documents import (
    ASIDE,
    FULL,
    LARGE,
    LARGE_COLUMNS,
    OVERSIZE,
    Document,
    entry_of,
    item_of,
    signal_of,
    weight,
)
from perdure.backends.mongo.errors import TornError, has_only_duplicates
from perdure.backends.mongo.expressions import Expression, literal, plus, without_first
from perdure.backends.mongo.names import below, in_place, numbered, payload_name, stem_of, streamed
from perdure.backends.mongo.schema import Collections

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession
    from pymongo.asynchronous.collection import AsyncCollection

MANY_CONSUMED: Final = 500  # from so many on, consumed rows are marked where they stand
_MOVABLE: Final = dict.fromkeys(
    ("generation", "moves", "tail", "items", "inbox", "consumed", "weight", "inbox_weight", "steps_top", "items_top"), 1
)


def stem_in(document: Mapping[str, Any]) -> str:
    """What everything of this run begins with."""
    return stem_of(document["_id"], document["generation"])


def step_document(stem: str, entry: Document) -> Document:
    """The entry in `steps`."""
    return {"_id": numbered(stem, entry["seq"]), **entry}


def moved_item(stem: str, item: Document) -> Document:
    """The item in `items`."""
    return {"_id": streamed(stem, item["stream"], item["n"]), **item}


def moved_signal(stem: str, signal: Document) -> Document:
    """The inbox row in `signals`. Whether it is consumed is said in the run's document, until it is marked."""
    return {"_id": numbered(stem, signal["seq"]), "run": stem, **signal, "is_consumed": False}


async def put_all(
    collection: AsyncCollection[Document], documents: Sequence[Document], session: AsyncClientSession | None = None
) -> None:
    """Have these documents there; what is there already is the same."""
    from pymongo.errors import BulkWriteError

    if not documents:
        return
    try:
        await collection.insert_many(documents, ordered=False, session=session)
    except BulkWriteError as error:
        if session is not None or not has_only_duplicates(error):
            raise


async def make_room(db: Collections, keys: Iterable[str]) -> None:
    """Move what is too much out of the documents of these runs."""
    found = await db.runs.find({"_id": {"$in": list(keys)}}, _MOVABLE).to_list()
    moving = [move for move in map(_Move, found) if not move.is_empty]
    await put_all(db.steps, [copy for move in moving for copy in move.steps])
    await put_all(db.items, [copy for move in moving for copy in move.items])
    await put_all(db.signals, [copy for move in moving for copy in move.signals])
    consumed = [numbered(move.stem, seq) for move in moving for seq in move.consumed]
    if consumed:
        await db.signals.update_many({"_id": {"$in": consumed}}, {"$set": {"is_consumed": True}})
    if moving:
        from pymongo import UpdateOne

        await db.runs.bulk_write([UpdateOne(move.condition, move.pipeline) for move in moving], ordered=False)


class _Move:
    """What is moved out of one document as it was read, and the update that takes it out."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.stem = stem_in(document)
        is_full, is_inbox_full = document["weight"] >= FULL, document["inbox_weight"] >= FULL
        self.steps = [step_document(self.stem, entry) for entry in document["tail"]] if is_full else []
        self.items = [moved_item(self.stem, item) for item in document["items"]] if is_full else []
        self.signals = [moved_signal(self.stem, signal) for signal in document["inbox"]] if is_inbox_full else []
        self.consumed: list[int] = document["consumed"]

    @property
    def is_empty(self) -> bool:
        return not (self.steps or self.items or self.signals or len(self.consumed) >= MANY_CONSUMED)

    @property
    def condition(self) -> Document:
        return in_place(self._document["_id"], self._document["generation"], moves=self._document["moves"])

    @property
    def pipeline(self) -> list[Expression]:
        # Arrays only grow at their ends, except by another move, which the condition excludes.
        changes = {"moves": plus("moves", 1), "is_spilled": True, **self._journal(), **self._inbox()}
        return [{"$set": changes}]

    def _journal(self) -> dict[str, Expression]:
        entries, items = list(map(entry_of, self.steps)), list(map(item_of, self.items))
        return {
            "tail": without_first("tail", len(entries)),
            "items": without_first("items", len(items)),
            "steps_top": max([self._document["steps_top"], *(entry.seq for entry in entries)]),
            "items_top": max([self._document["items_top"], *(item.n for item in items)]),
            "weight": plus("weight", -weight([*entries, *items])),
        }

    def _inbox(self) -> dict[str, Expression]:
        count = len(self.signals)
        gone: Expression = {"$slice": ["$inbox", count]} if count else literal([])
        # Rows may have been consumed since they were read.
        consumed = {"$filter": {"input": gone, "cond": "$$this.is_consumed"}}
        return {
            "inbox": without_first("inbox", count),
            "inbox_weight": plus("inbox_weight", -weight(map(signal_of, self.signals))),
            "moved_rows": plus("moved_rows", count),
            "moved_waiting": plus("moved_waiting", {"$subtract": [count, {"$size": consumed}]}),
            "consumed": {
                "$concatArrays": [
                    {"$setDifference": ["$consumed", literal(self.consumed)]},
                    {"$map": {"input": consumed, "in": "$$this.seq"}},
                ]
            },
        }


async def spill(db: Collections, document: Document) -> Document:
    """The document of a run that is not there yet, without what would make it too large; that is put in its place already."""
    stem = stem_in(document)
    parts = [*document["tail"], *document["inbox"]]
    payloads = [*(part["payload"] for part in parts), *(document[name] for name in LARGE_COLUMNS)]
    await put_payloads(db, [(stem, payload) for payload in payloads])
    columns = {name: column(stem, document[name]) for name in LARGE_COLUMNS}
    kept = {name: [with_aside(stem, part) for part in document[name]] for name in ("tail", "inbox")}
    return await _without_too_much(db, {**document, **columns, **kept, **spilling(*payloads)})


async def _without_too_much(db: Collections, document: Document) -> Document:
    stem, entries, rows = stem_in(document), document["tail"], document["inbox"]
    changes: Document = {}
    if document["weight"] > OVERSIZE:
        await put_all(db.steps, [step_document(stem, entry) for entry in entries])
        changes |= {"steps_top": max(entry["seq"] for entry in entries), "tail": [], "weight": 0, "is_spilled": True}
    if document["inbox_weight"] > OVERSIZE:
        await put_all(db.signals, [moved_signal(stem, row) for row in rows])
        changes |= {"moved_rows": len(rows), "moved_waiting": len(rows), "inbox": [], "inbox_weight": 0, "is_spilled": True}
    return document | changes


def is_large(payload: bytes | None) -> bool:
    """Whether the payload stands outside the run's document."""
    return payload is not None and len(payload) > LARGE


def column(stem: str, payload: bytes | None) -> Any:
    """What stands in the document for this payload: itself, or the name under which it stands elsewhere."""
    return {ASIDE: payload_name(stem, payload)} if payload is not None and is_large(payload) else payload


def with_aside(stem: str, part: Document) -> Document:
    """The entry, item or inbox row, with what stands there for its payload."""
    return part | {"payload": column(stem, part["payload"])}


def spilling(*payloads: bytes | None) -> Document:
    """The change that says that something of the run stands outside its document, if one of these does."""
    return {"is_spilled": True} if any(map(is_large, payloads)) else {}


async def put_payloads(db: Collections, payloads: Iterable[tuple[str, bytes | None]]) -> None:
    """Have the large ones of these payloads there, each under the stem of its run, before anything speaks of them.

    Who is refused afterwards leaves them behind, where nobody finds them, until the run is deleted.
    """
    large = {payload_name(stem, payload): payload for stem, payload in payloads if payload is not None and is_large(payload)}
    for name, payload in large.items():
        await put_all(db.payloads, [{"_id": name, "payload": payload}])


async def filled(db: Collections, documents: Sequence[Document], names: Sequence[str] = ("payload",)) -> Sequence[Document]:
    """The documents with the payloads that stood elsewhere. Raises `TornError`."""
    aside = [(document, name) for document in documents for name in names if isinstance(document[name], dict)]
    if aside:
        wanted = {document[name][ASIDE] for document, name in aside}
        payloads = {found["_id"]: found["payload"] async for found in db.payloads.find({"_id": {"$in": sorted(wanted)}})}
        if not payloads.keys() >= wanted:
            raise TornError("a run was deleted while it was read")
        for document, name in aside:
            document[name] = payloads[document[name][ASIDE]]
    return documents


async def sweep(db: Collections, document: Mapping[str, Any]) -> None:
    """Remove what a run that is gone had outside its document."""
    if document["is_spilled"]:
        for collection in (db.steps, db.items, db.signals, db.payloads):
            await collection.delete_many({"_id": below(stem_in(document))})
