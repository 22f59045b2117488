"""What comes from outside into a run's inbox: signals, and the outcomes of children.

A row is numbered, put into the run's document and wakes the run in one update, so that no `suspend` can miss it. A full inbox is
moved first, and a large payload put in its place beforehand, for which the run's generation has to be known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.backends.mongo.documents import FULL, Document, signal_document, weight
from perdure.backends.mongo.expressions import Expression, earlier, either, instant, literal, plus
from perdure.backends.mongo.moving import is_large, make_room, put_payloads, spilling, stem_in, with_aside
from perdure.backends.mongo.names import below
from perdure.backends.mongo.schema import Collections
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import ENDED, Signal

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

NOT_ENDED: Final[Document] = {"status": {"$nin": sorted(ENDED)}}
_NEXT: Final = plus("inbox_seq", 1)


class Arrival(NamedTuple):
    """A row on its way into an inbox. Its `mark` is the same however often it is sent; `stem` is that of the run, if known."""

    signal: Signal
    mark: str
    now: int | None
    stem: str = ""

    @property
    def is_large(self) -> bool:
        """Whether its payload stands outside the run's document."""
        return is_large(self.signal.payload)

    @property
    def document(self) -> Document:
        """The row, still without its number."""
        return with_aside(self.stem, signal_document(self.signal, self.mark))


async def signal(db: Collections, run_id: str, arrival: Arrival, *, is_repeated: bool = False) -> int:
    """Put the signal into the inbox, or find it there. Raises `RunNotFound`, `RunFinished`."""
    key, sent = db.key(run_id), arrival.signal
    conditions: Document = {"inbox.mark": {"$ne": arrival.mark}, "inbox_weight": {"$lt": FULL}}
    if sent.dedupe is not None:
        conditions |= {"inbox": {"$not": {"$elemMatch": _same(sent)}}, "moved_rows": 0}
    seq = None if arrival.is_large else await deliver(db, key, arrival, conditions)
    return await _carefully(db, run_id, arrival, is_repeated=is_repeated) if seq is None else seq


async def for_run(db: Collections, found: Document, arrival: Arrival) -> Arrival:
    """The arrival at this generation of the run, with its payload in place."""
    stem = stem_in(found)
    await put_payloads(db, [(stem, arrival.signal.payload)])
    return arrival._replace(stem=stem)


async def deliver(
    db: Collections, key: str, arrival: Arrival, conditions: Document, session: AsyncClientSession | None = None
) -> int | None:
    """Put the row into the inbox, and give its seq; None when the run has ended, is not there or not as the conditions say."""
    found = await db.runs.find_one_and_update(
        {"_id": key, **NOT_ENDED, **conditions},
        [{"$set": _changes(arrival)}],
        projection={"inbox_seq": 1},
        return_document=True,
        session=session,
    )
    return None if found is None else int(found["inbox_seq"])


def _changes(arrival: Arrival) -> dict[str, Expression]:
    row = arrival.document
    is_awaited = {"$and": [{"$eq": ["$status", "suspended"]}, {"$in": [literal(row["address"]), "$waiting_for"]}]}
    numbered = {"$mergeObjects": [literal(row), {"seq": _NEXT}]}
    return {
        "inbox": {"$concatArrays": ["$inbox", [numbered]]},
        "inbox_seq": _NEXT,
        "inbox_weight": plus("inbox_weight", weight([arrival.signal])),
        "wake_at": either(is_awaited, earlier("wake_at", instant(arrival.now)), "$wake_at"),
        **spilling(arrival.signal.payload),
    }


async def _carefully(db: Collections, run_id: str, arrival: Arrival, *, is_repeated: bool) -> int:
    """Find out why the signal was not taken at once, and answer for that or send it again."""
    key = db.key(run_id)
    while True:
        found = await db.runs.find_one({"_id": key}, dict.fromkeys(("generation", "moves", "inbox", "inbox_weight", "status"), 1))
        if found is None:
            raise RunNotFound(run_id)
        first = await _sent_before(db, found, arrival, is_repeated=is_repeated)
        if first is not None:
            return int(first["seq"])
        if found["status"] in ENDED:
            raise RunFinished(run_id, found["status"])
        if found["inbox_weight"] >= FULL:
            await make_room(db, [key])
            continue
        arrival = await for_run(db, found, arrival)
        unchanged = {"generation": found["generation"], "moves": found["moves"], "inbox_weight": {"$lt": FULL}}
        seq = await deliver(db, key, arrival, unchanged | {"inbox": {"$not": {"$elemMatch": _the_same(arrival)}}})
        if seq is not None:
            return seq


async def _sent_before(db: Collections, found: Document, arrival: Arrival, *, is_repeated: bool) -> Document | None:
    """The row that this signal is, by its mark or its dedupe, wherever it stands."""
    sent = arrival.signal
    for row in found["inbox"]:
        is_same = sent.dedupe is not None and (row["kind"], row["name"], row["dedupe"]) == ("signal", sent.name, sent.dedupe)
        if is_same or row["mark"] == arrival.mark:
            return dict(row)
    stem = stem_in(found)
    if sent.dedupe is not None:
        return await db.signals.find_one({"run": stem, **_same(sent)})
    return await db.signals.find_one({"_id": below(stem), "mark": arrival.mark}) if is_repeated else None


def _the_same(arrival: Arrival) -> Document:
    of_mark = {"mark": arrival.mark}
    return of_mark if arrival.signal.dedupe is None else {"$or": [of_mark, _same(arrival.signal)]}


def _same(sent: Signal) -> dict[str, Any]:
    return {"kind": "signal", "name": sent.name, "dedupe": sent.dedupe}
