"""What is delivered into a run's inbox: signals, and the outcomes of children.

One update numbers a row, puts it into the run's document and wakes the run, so no `suspend` can miss it. A full inbox is moved
first, and a large payload is stored before the row, for which the run's incarnation has to be known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.backends.mongo.documents import (
    FULL,
    HAS_PROBLEM,
    Document,
    Expression,
    earliest,
    either,
    ids_below,
    instant,
    literal,
    plus,
    row_stem_of,
    signal_document,
    weight,
)
from perdure.backends.mongo.overflow import is_large, move_overflow, spilled_flag, stem_in, store_payloads, with_reference
from perdure.backends.mongo.schema import Collections
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import ENDED, Signal

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

NOT_ENDED: Final[Document] = {"status": {"$nin": sorted(ENDED)}}
_NEXT: Final = plus("inbox_seq", 1)


class InboxDelivery(NamedTuple):
    """A row on its way into an inbox. Its `mark` stays the same when it is sent again; `stem` is that of a large payload."""

    signal: Signal
    mark: str
    now: int | None
    stem: str = ""

    @property
    def is_large(self) -> bool:
        """Whether its payload is stored outside the run's document."""
        return is_large(self.signal.payload)

    @property
    def document(self) -> Document:
        """The row, still without its number."""
        return with_reference(self.stem, signal_document(self.signal, self.mark))


async def signal(db: Collections, run_id: str, delivery: InboxDelivery, *, is_repeated: bool = False) -> int:
    """Put the signal into the inbox, or find it there. Raises `RunNotFound`, `RunFinished`."""
    key, sent = db.key(run_id), delivery.signal
    conditions: Document = {"inbox.mark": {"$ne": delivery.mark}, "inbox_weight": {"$lt": FULL}}
    if sent.dedupe is not None:
        conditions |= {"inbox": {"$not": {"$elemMatch": _same(sent)}}, "moved_rows": 0}
    seq = None if delivery.is_large else await deliver(db, key, delivery, conditions)
    return await _signal_step_by_step(db, run_id, delivery, is_repeated=is_repeated) if seq is None else seq


async def address_to(db: Collections, found: Document, delivery: InboxDelivery) -> InboxDelivery:
    """The delivery to this incarnation of the run, with its payload stored."""
    stem = row_stem_of(stem_in(found), delivery.mark)
    await store_payloads(db, [(stem, delivery.signal.payload)])
    return delivery._replace(stem=stem)


async def deliver(
    db: Collections, key: str, delivery: InboxDelivery, conditions: Document, session: AsyncClientSession | None = None
) -> int | None:
    """Put the row into the inbox; its seq, or None when the run has ended, does not exist or does not meet the conditions."""
    found = await db.runs.find_one_and_update(
        {"_id": key, **NOT_ENDED, **conditions},
        [{"$set": _changes(delivery)}],
        projection={"inbox_seq": 1},
        return_document=True,
        session=session,
    )
    return None if found is None else int(found["inbox_seq"])


def _changes(delivery: InboxDelivery) -> dict[str, Expression]:
    row = delivery.document
    is_awaited = {"$and": [{"$eq": ["$status", "suspended"]}, {"$in": [literal(row["address"]), "$waiting_for"]}]}
    wakes = {"$or": [is_awaited, HAS_PROBLEM]} if delivery.signal.kind == "signal" else is_awaited
    numbered = {"$mergeObjects": [literal(row), {"seq": _NEXT}]}
    return {
        "inbox": {"$concatArrays": ["$inbox", [numbered]]},
        "inbox_seq": _NEXT,
        "inbox_weight": plus("inbox_weight", weight([delivery.signal])),
        "wake_at": either(wakes, earliest("wake_at", instant(delivery.now)), "$wake_at"),
        **spilled_flag(delivery.signal.payload),
    }


async def _signal_step_by_step(db: Collections, run_id: str, delivery: InboxDelivery, *, is_repeated: bool) -> int:
    """Find out why the signal was not delivered at once, and answer for that or deliver it again."""
    key = db.key(run_id)
    while True:
        found = await db.runs.find_one(
            {"_id": key}, dict.fromkeys(("incarnation", "moves", "inbox", "inbox_weight", "status"), 1)
        )
        if found is None:
            raise RunNotFound(run_id)
        first = await _find_sent(db, found, delivery, is_repeated=is_repeated)
        if first is not None:
            return int(first["seq"])
        if found["status"] in ENDED:
            raise RunFinished(run_id, found["status"])
        if found["inbox_weight"] >= FULL:
            await move_overflow(db, [key])
            continue
        delivery = await address_to(db, found, delivery)
        unchanged = {"incarnation": found["incarnation"], "moves": found["moves"], "inbox_weight": {"$lt": FULL}}
        seq = await deliver(db, key, delivery, unchanged | {"inbox": {"$not": {"$elemMatch": _same_or_marked(delivery)}}})
        if seq is not None:
            return seq


async def _find_sent(db: Collections, found: Document, delivery: InboxDelivery, *, is_repeated: bool) -> Document | None:
    """The row of this signal, by its mark or its dedupe, in the document or in `signals`."""
    sent = delivery.signal
    for row in found["inbox"]:
        is_same = sent.dedupe is not None and (row["kind"], row["name"], row["dedupe"]) == ("signal", sent.name, sent.dedupe)
        if is_same or row["mark"] == delivery.mark:
            return dict(row)
    stem = stem_in(found)
    if sent.dedupe is not None:
        return await db.signals.find_one({"run": stem, **_same(sent)})
    return await db.signals.find_one({"_id": ids_below(stem), "mark": delivery.mark}) if is_repeated else None


def _same_or_marked(delivery: InboxDelivery) -> Document:
    of_mark = {"mark": delivery.mark}
    return of_mark if delivery.signal.dedupe is None else {"$or": [of_mark, _same(delivery.signal)]}


def _same(sent: Signal) -> dict[str, Any]:
    return {"kind": "signal", "name": sent.name, "dedupe": sent.dedupe}
