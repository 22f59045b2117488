"""One write of the holder of a lease, as the update of its run's document.

The update's condition is the fence: epoch and token, checked in the same atomic step that writes. The condition also says that
the write meets nothing unusual: room in the tail, numbers that are free, inbox rows that exist, no parent to notify. With `moves`
the other collections were read, and the condition says instead that nothing was moved since.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.backends.base.duplicate_records import unique_entries, unique_items
from perdure.backends.base.leases import new_token
from perdure.backends.mongo.documents import (
    FULL,
    OVERSIZE,
    Document,
    Expression,
    addresses,
    append_to,
    either,
    entry_document,
    incarnation_in,
    instant,
    item_document,
    item_of,
    item_place,
    journal_in,
    journal_stem_of,
    lease_columns,
    literal,
    plus,
    signal_as_stored,
    stem_of,
    weight,
)
from perdure.backends.mongo.overflow import inline_or_reference, spilled_flag, with_reference
from perdure.backends.mongo.schema import Collections
from perdure.model.journal import Entry
from perdure.model.records import NO_PROBLEM, Awaited, EndStatus, Item, Lease, NewInput

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

ANSWER: Final = dict.fromkeys(("epoch", "token", "inbox_seq", "cancel_requested", "weight", "last_write", "closed_by"), 1)
_NO_PARENT: Final = [{"parent_id": None}, {"parent_key": None}]


class RunUpdate(NamedTuple):
    """A record, or with `status` the end or suspension of a run and what is recorded with it.

    It leaves its `mark` in the document, the same when it is sent again. `moved` are consumed inbox rows that were moved.
    """

    lease: Lease
    mark: str
    entries: Sequence[Entry]
    consume: Sequence[int]
    items: Sequence[Item] = ()
    status: str | None = None
    outcome: bytes | None = None
    wake_at: int | None = None
    awaited: Sequence[str] = ()
    now: int | None = None
    moved: Sequence[int] = ()

    @property
    def written_rows(self) -> list[Hashable]:
        """A bulk ends or suspends a run once; records of one run go together."""
        return [] if self.status is None else [self.lease.run_id]

    @property
    def numbers(self) -> list[int | str]:
        """The places in the journal and in streams that it fills."""
        return [*(entry.seq for entry in self.entries), *map(item_place, self.items)]

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        return self.weight + len(self.outcome or b"") + 200

    @property
    def weight(self) -> int:
        """How much of the document it fills."""
        return weight(self.entries) + weight(self.items)

    @property
    def kept_payloads(self) -> list[bytes | None]:
        """Its payloads that are not of the journal. Large ones are stored outside the document."""
        return [*(item.payload for item in self.items), self.outcome]

    @property
    def is_oversize(self) -> bool:
        """Whether it is too large for the document."""
        return self.weight > OVERSIZE

    @property
    def is_end(self) -> bool:
        """Whether it ends the run."""
        return self.status not in {None, "suspended"}


def record(lease: Lease, entries: Sequence[Entry], consume: Sequence[int], items: Sequence[Item] = ()) -> RunUpdate:
    """The write that records these. Raises `PersistenceError` when two different ones have the same number."""
    return RunUpdate(
        lease, new_token(), unique_entries(lease.run_id, entries), list(dict.fromkeys(consume)), unique_items(lease.run_id, items)
    )


def suspend(
    lease: Lease,
    wake_at: int | None,
    waiting_for: Collection[Awaited],
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> RunUpdate:
    """The write that records, and gives up the lease unless something awaited has arrived."""
    written = record(lease, entries, consume)
    return written._replace(status="suspended", wake_at=wake_at, awaited=addresses(waiting_for), now=now)


def finish(
    lease: Lease, status: EndStatus, outcome: bytes, entries: Sequence[Entry], consume: Sequence[int], now: int | None
) -> RunUpdate:
    """The write that records, ends the run and notifies its parent."""
    return record(lease, entries, consume)._replace(status=status, outcome=outcome, now=now)


def stem_for(db: Collections, lease: Lease) -> str:
    return stem_of(db.key(lease.run_id), incarnation_in(lease.token))


def journal_stem_for(db: Collections, lease: Lease) -> str:
    return journal_stem_of(stem_for(db, lease), journal_in(lease.token))


def is_held(document: Document, lease: Lease) -> bool:
    return (document["epoch"], document["token"]) == (lease.epoch, lease.token)


def fence(db: Collections, lease: Lease) -> Document:
    """The condition that this lease is the current one."""
    return {"_id": db.key(lease.run_id), "epoch": lease.epoch, "token": lease.token}


async def write_one(
    db: Collections, write: RunUpdate, moves: int | None = None, session: AsyncClientSession | None = None
) -> Any:
    return await db.runs.find_one_and_update(
        condition_of(db, write, moves), pipeline_of(db, write), projection=ANSWER, return_document=True, session=session
    )


def condition_of(db: Collections, write: RunUpdate, moves: int | None) -> Document:
    """The fence, and that the write meets nothing unusual. With `moves` the other collections were read."""
    condition = fence(db, write.lease)
    if write.entries:
        seqs = [entry.seq for entry in write.entries]
        condition |= {"tail.seq": {"$nin": seqs}, "steps_top": {"$lt": min(seqs)}}
    if write.items:
        places = [item_place(item) for item in write.items]
        condition |= {"items.at": {"$nin": places}, "items_top": {"$lt": min(item.n for item in write.items)}}
    if (write.entries or write.items) and not write.is_oversize:
        condition["weight"] = {"$lt": FULL}
    if write.consume:
        condition["inbox.seq"] = {"$all": list(write.consume)}
    if write.moved:
        condition["consumed"] = {"$nin": list(write.moved)}
    condition |= _close_condition(write)
    return condition if moves is None else _without_lookups(condition, moves)


def _close_condition(write: RunUpdate) -> Document:
    if write.is_end:
        return {"$or": _NO_PARENT}
    if not write.awaited:
        return {}
    is_awaited = {"is_consumed": False, "address": {"$in": list(write.awaited)}, "seq": {"$nin": list(write.consume)}}
    return {"inbox": {"$not": {"$elemMatch": is_awaited}}, "moved_waiting": 0}


def _without_lookups(condition: Document, moves: int) -> Document:
    known = {"steps_top", "items_top", "moved_waiting", "$or"}
    return {name: wanted for name, wanted in condition.items() if name not in known} | {"moves": moves}


def pipeline_of(db: Collections, write: RunUpdate) -> list[Expression]:
    changes: dict[str, Expression] = {
        "last_write": write.mark,
        **_append_changes(db, write),
        **_consume_changes(write),
        **spilled_flag(*(entry.payload for entry in write.entries), *write.kept_payloads),
    }
    if write.items:
        changes["items_mark"] = write.mark  # for the change stream: it cannot match a change inside an array
    if write.status == "suspended":
        changes |= _suspend_changes(write)
    elif write.status is not None:
        changes |= _end_changes(db, write)
    return [{"$set": changes}]


def _append_changes(db: Collections, write: RunUpdate) -> dict[str, Expression]:
    changes: dict[str, Expression] = {"length": plus("length", len(write.entries))} if write.entries else {}
    if write.is_oversize:
        steps_top = max((entry.seq for entry in write.entries), default=0)
        items_top = max((item.n for item in write.items), default=-1)
        tops = {"steps_top": {"$max": ["$steps_top", steps_top]}, "items_top": {"$max": ["$items_top", items_top]}}
        return {**changes, **tops, "moves": plus("moves", 1), "is_spilled": True}
    if write.entries:
        changes["tail"] = append_to("tail", entry_documents(db, write))
    if write.items:
        changes["items"] = append_to("items", item_documents(db, write))
    return changes | ({"weight": plus("weight", write.weight)} if write.weight else {})


def entry_documents(db: Collections, write: RunUpdate) -> list[Document]:
    stem = journal_stem_for(db, write.lease)
    return [with_reference(stem, entry_document(entry)) for entry in write.entries]


def item_documents(db: Collections, write: RunUpdate) -> list[Document]:
    stem = stem_for(db, write.lease)
    return [with_reference(stem, item_document(item)) for item in write.items]


def _consume_changes(write: RunUpdate) -> dict[str, Expression]:
    changes: dict[str, Expression] = {}
    if write.consume:
        is_consumed = {"$or": ["$$this.is_consumed", {"$in": ["$$this.seq", list(write.consume)]}]}
        changes["inbox"] = {
            "$map": {"input": "$inbox", "in": {"$mergeObjects": ["$$this", {"is_consumed": is_consumed}]}},
        }
    if write.moved:
        changes["consumed"] = append_to("consumed", write.moved)
        changes["moved_waiting"] = plus("moved_waiting", -len(write.moved))
    return changes


def _suspend_changes(write: RunUpdate) -> dict[str, Expression]:
    now = instant(write.now)
    wake_at = either("$cancel_requested", {"$min": [literal(write.wake_at), now]}, literal(write.wake_at))
    suspended = {"status": "suspended", "wake_at": wake_at, "attempts": 0, "updated_at": now, "closed_by": write.mark}
    return lease_columns(**suspended, **NO_PROBLEM, waiting_for=literal(list(write.awaited)))


def _end_changes(db: Collections, write: RunUpdate) -> dict[str, Expression]:
    outcome = inline_or_reference(stem_for(db, write.lease), write.outcome)
    ended = {"status": write.status, "wake_at": None, "updated_at": instant(write.now), "closed_by": write.mark}
    has_parent = {"$and": [{"$ne": ["$parent_id", None]}, {"$ne": ["$parent_key", None]}]}
    notified = {"parent_notified": {"$or": ["$parent_notified", has_parent]}}
    return lease_columns(**ended, **NO_PROBLEM, **notified, outcome=literal(outcome))


def continue_changes(found: Document, kept: Sequence[Document], new: NewInput, now: int | None) -> dict[str, Expression]:
    """The changes by which this run, as it was found, starts over: an empty journal, and of the inbox what is `kept`."""
    at = instant(now)
    columns = {name: literal(getattr(new, name)) for name in ("input_hash", "seed", "definition_hash", "deadline")}
    first = {"first_input_hash": {"$ifNull": ["$first_input_hash", "$input_hash"]}, "generation": plus("generation", 1)}
    pending = lease_columns(status="pending", wake_at=at, attempts=0, updated_at=at, continued_at=at, **NO_PROBLEM)
    journal = {"tail": [], "length": 0, "claimed_length": 0, "steps_top": 0, "moves": plus("moves", 1)}
    weights = {"weight": weight(map(item_of, found["items"])), "inbox_weight": weight(map(signal_as_stored, kept))}
    return {**columns, **first, **pending, **journal, **weights, "inbox": literal(list(kept))}
