"""A run as a document and back, the `_id` of every document, and the expressions of update pipelines.

The document has the run's columns, and the parts that make its transitions atomic: the end of the journal (`tail`), the last
`items`, and the `inbox`. Older parts may have been moved to the collections `steps`, `items` and `signals`; `steps_top` and
`items_top` are the highest numbers there, `moved_rows` is how many inbox rows were moved, `moved_waiting` how many of those are
not consumed, and `consumed` has those that are consumed but not marked so yet. `moves` changes whenever those collections do.
`weight` and `inbox_weight` say how full the document is.

An `_id` is text and sorts by its bytes. A run's is its id, or in a namespace its id, a NUL and the namespace. Neither may have a
NUL, so no two collide, and within a namespace runs sort by their ids. Documents in the other collections have ids that begin
with the run's stem: its `_id`, two NULs and its incarnation, a random text made when the run is created or restored. A run that
is deleted and created again has another incarnation, so the remains of the old run are never taken for parts of the new one. What
belongs to the journal (entries, their large payloads, a large input) has ids that begin with the journal's stem: the run's, and
`journal`, another random text, made when the run starts over.

In an expression everything that a caller passed in is a `$literal`: it may begin with a dollar.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from perdure.backends.base.damaged_runs import check_entry, check_row, check_signal, raise_damage
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Item, Lease, Pulse, RunRow, Signal

Document: TypeAlias = dict[str, Any]
Expression: TypeAlias = Any

# The least whole number of BSON. The condition that an instant is not less selects those that are not null, as an index has them.
LEAST: Final = -(2**63)

FULL: Final = 256 << 10  # from this weight on the tail or the inbox is moved before anything is added
OVERSIZE: Final = 1 << 20  # a write that weighs more never goes into the run's document
LARGE: Final = 256 << 10  # a payload with more bytes goes into the collection `payloads`
LARGE_COLUMNS: Final = ("input", "metadata", "progress", "outcome")
REFERENCE: Final = "aside"  # the one field of the document that stands for such a payload: its id

INCARNATION_LENGTH: Final = 32
JOURNAL_LENGTH: Final = 16
FIRST_JOURNAL: Final = "0" * JOURNAL_LENGTH
_MICROSECONDS: Final = 1000  # in a millisecond
_WHOLE_ARRAY: Final = 2**31 - 1
_OVERHEAD: Final = 4096  # added to the bytes of an entry, so that a tail has at most 64
_COLUMNS: Final = tuple(name for name in RunRow.__struct_fields__ if name not in {"id", "waiting_for"})
# The projection that leaves the journal, streams and inbox out of a run's document.
ROW_ONLY: Final = {"tail": 0, "items": 0, "inbox": 0, "consumed": 0}


def run_document(namespace: str, row: RunRow, incarnation: str, entries: Sequence[Entry], inbox: Sequence[Signal]) -> Document:
    """The document of a run that is not leased, with all of this in it."""
    return {
        "_id": key_of(namespace, row.id),
        "namespace": namespace,
        "incarnation": incarnation,
        "journal": FIRST_JOURNAL,
        **{name: getattr(row, name) for name in _COLUMNS},
        "waiting_for": addresses(row.waiting_for),
        "token": None,
        "length": len(entries),
        "claimed_length": 0,
        "tail": [entry_document(entry) for entry in entries],
        "steps_top": 0,
        "items": [],
        "items_top": -1,
        "weight": weight(entries),
        "inbox": [signal_document(signal) for signal in inbox],
        "inbox_seq": max((signal.seq for signal in inbox), default=0),
        "inbox_weight": weight(inbox),
        "moved_rows": 0,
        "moved_waiting": 0,
        "consumed": [],
        "moves": 0,
        "is_spilled": False,
        "last_write": None,
        "closed_by": None,
    }


def row_of(document: Mapping[str, Any]) -> RunRow:
    """The run's row. Large columns have been loaded before. Raises `SnapshotCorrupt`."""
    run_id = name_in(document["_id"])
    with raise_damage(run_id, "the row"):
        waiting_for = tuple(awaited_from(text) for text in document["waiting_for"])
        columns = {name: document[name] for name in _COLUMNS}
        return check_row(RunRow(id=run_id, waiting_for=waiting_for, **columns))


def entry_document(entry: Entry) -> Document:
    """The entry in a tail; in `steps` it also has an `_id`."""
    return msgspec.structs.asdict(entry)


def entry_as_stored(document: Mapping[str, Any]) -> Entry:
    """The entry, from a tail or from `steps`. A large payload is still a reference to where it is."""
    return Entry(**{name: document[name] for name in Entry.__struct_fields__})


def entry_of(document: Mapping[str, Any]) -> Entry:
    """The entry, whose payload has been loaded before. Raises one of `UNREADABLE`."""
    return check_entry(entry_as_stored(document))


def item_document(item: Item) -> Document:
    """The item in a run's document. Conditions compare `at`, its stream and number."""
    return {"at": item_place(item), **msgspec.structs.asdict(item)}


def item_place(item: Item) -> str:
    """Stream and number as one text."""
    return f"{item.stream}\0{item.n}"


def item_of(document: Mapping[str, Any]) -> Item:
    """The item, from a run's document or from `items`."""
    return Item(stream=document["stream"], n=document["n"], payload=document["payload"])


def signal_document(signal: Signal, mark: str | None = None) -> Document:
    """The inbox row in a run's document. `address` is what a run must wait for to get it, `mark` is its sender's."""
    return {
        "mark": mark,
        "seq": signal.seq,
        "kind": signal.kind,
        "name": signal.name,
        "payload": signal.payload,
        "dedupe": signal.dedupe,
        "address": address(signal.address),
        "is_consumed": False,
    }


def signal_as_stored(document: Mapping[str, Any]) -> Signal:
    """The unconsumed inbox row, from a run's document or from `signals`. A large payload is still a reference."""
    return Signal(**{name: document[name] for name in ("seq", "kind", "name", "payload", "dedupe")})


def signal_of(document: Mapping[str, Any]) -> Signal:
    """The unconsumed inbox row, whose payload has been loaded before. Raises one of `UNREADABLE`."""
    return check_signal(signal_as_stored(document))


def address(awaited: Awaited) -> str:
    """What a run waits for, or an inbox row answers to, as one text."""
    return f"{awaited.kind}:{awaited.name}"


def addresses(waiting_for: Collection[Awaited]) -> list[str]:
    """All that a run waits for, each as one text."""
    return sorted({address(awaited) for awaited in waiting_for})


def awaited_from(text: str) -> Awaited:
    """What a run waits for, from one text."""
    kind, _, name = text.partition(":")
    return Awaited("child" if kind == "child" else "signal", name)


def incarnation_in(token: str) -> str:
    """The incarnation of the run that a lease with this token was given on."""
    return token[:INCARNATION_LENGTH]


def journal_in(token: str) -> str:
    """The journal to which the holder of the lease with this token appends."""
    return token[INCARNATION_LENGTH : INCARNATION_LENGTH + JOURNAL_LENGTH]


def lease_of(document: Mapping[str, Any]) -> Lease:
    """The lease that was just given on this run."""
    return Lease(run_id=name_in(document["_id"]), epoch=document["epoch"], token=document["token"], until=document["lease_until"])


def pulse_of(document: Mapping[str, Any]) -> Pulse:
    """What a record or a renewal answers to the holder."""
    return Pulse(document["inbox_seq"], document["cancel_requested"])


def weight(parts: Iterable[Entry | Item | Signal]) -> int:
    """How much of a document these fill: about their bytes, and an overhead for each."""
    return sum(_bytes(part.payload) + _words(part) + _OVERHEAD for part in parts)


def _bytes(payload: bytes | Document) -> int:
    """A payload that is stored outside the document, or a reference to one, fills nothing."""
    return len(payload) if isinstance(payload, bytes) and len(payload) <= LARGE else 0


def _words(part: Entry | Item | Signal) -> int:
    if isinstance(part, Entry):
        return 4 * (len(part.key) + len(part.name)) + len(part.args_hash or b"")
    return 4 * len(part.stream) if isinstance(part, Item) else 4 * (len(part.name) + len(part.dedupe or ""))


def key_of(namespace: str, name: str) -> str:
    """The `_id` of the run, queue or schedule in its collection."""
    return f"{name}\0{namespace}" if namespace else name


def name_in(key: str) -> str:
    """The id in a run's key."""
    return key.partition("\0")[0]


def stem_of(key: str, incarnation: str) -> str:
    """What the ids of everything outside the run's document begin with."""
    return f"{key}\0\0{incarnation}"


def journal_stem_of(stem: str, journal: str) -> str:
    """What the ids of everything of this journal begin with. No hash, by which other payloads are known, begins with a "j"."""
    return f"{stem}\0j{journal}"


def row_stem_of(stem: str, mark: str) -> str:
    """What the id of an inbox row's large payload begins with. A row shares it with no other: it can be deleted with the row."""
    return f"{stem}\0{mark}"


def ids_of_other_journals(stem: str, journal: str) -> tuple[dict[str, str], dict[str, str]]:
    """Two conditions on `_id`: everything of the run's journals before and after this one in the order of ids."""
    kept = journal_stem_of(stem, journal)
    return {"$gte": f"{stem}\0j", "$lt": f"{kept}\0"}, {"$gte": f"{kept}\1", "$lt": f"{stem}\0k"}


def numbered_id(stem: str, number: int) -> str:
    """The id of the entry or inbox row with this number."""
    return f"{stem}\0{number:016x}"


def item_id(stem: str, stream: str, number: int) -> str:
    """The id of the item with this number."""
    return numbered_id(f"{stem}\0{stream}", number)


def payload_id(stem: str, payload: bytes) -> str:
    """The id of the payload, by its hash."""
    return f"{stem}\0{hashlib.sha256(payload).hexdigest()}"


def ids_below(stem: str) -> dict[str, str]:
    """A condition on `_id`: everything of the run, or of a stream of it."""
    return {"$gte": f"{stem}\0", "$lt": f"{stem}\1"}


def ids_with_prefix(prefix: str) -> dict[str, str]:
    """A condition on `_id`: ids that begin with this text, whatever characters it has."""
    bounded = prefix.rstrip("\U0010ffff")
    if not bounded:
        return {"$gte": prefix}
    last = ord(bounded[-1]) + 1
    return {"$gte": prefix, "$lt": bounded[:-1] + chr(0xE000 if last == 0xD800 else last)}  # surrogates are no text


def same_run(key: str, incarnation: str, **conditions: Any) -> dict[str, Any]:
    """A condition: this run, and no other that had or will have its id."""
    return {"_id": key, "incarnation": incarnation, **conditions}


def literal(value: Any) -> Expression:
    """The value itself, also when it looks like an expression."""
    return {"$literal": value}


def instant(now: int | None) -> Expression:
    """The instant `now`, or the server's own time."""
    return literal(now) if now is not None else {"$multiply": [{"$toLong": "$$NOW"}, _MICROSECONDS]}


class KnownLimits(NamedTuple):
    """The queues that have limits, as this process knows it until `until` by the server's clock."""

    queues: frozenset[str]
    until: datetime
    read_at: float

    @property
    def is_current(self) -> Expression:
        """Whether that still holds when the server executes the update."""
        return {"$lt": ["$$NOW", literal(self.until)]}


def append_to(field: str, values: Sequence[Any]) -> Expression:
    """The array with these values at its end."""
    return {"$concatArrays": [f"${field}", literal(list(values))]}


def without_first(field: str, count: int) -> Expression:
    """The array without its first `count` members."""
    return {"$slice": [f"${field}", count, _WHOLE_ARRAY]}


def plus(field: str, number: Expression) -> Expression:
    """The field plus the number."""
    return {"$add": [f"${field}", number]}


def plus_sound(field: str, number: int) -> Expression:
    """The field plus the number; the number where the field is damaged, since that would fail the whole update."""
    return {"$add": [either({"$isNumber": f"${field}"}, f"${field}", 0), number]}


def earliest(field: str, at: Expression) -> Expression:
    """The earlier of the field and the instant; the instant when the field is null."""
    return {"$min": [f"${field}", at]}


def either(condition: Expression, then: Expression, otherwise: Expression) -> Expression:
    """`then` where the condition holds, else `otherwise`."""
    return {"$cond": [condition, then, otherwise]}


def is_leased(at: Expression) -> Expression:
    """Whether a lease is alive. Null is less than every instant."""
    return {"$gt": ["$lease_until", at]}


def is_due(at: Expression) -> Expression:
    """Whether the run's wake_at has come."""
    return {"$and": [{"$ne": ["$wake_at", None]}, {"$lte": ["$wake_at", at]}]}


# Whether a pending run waits because of a problem.
HAS_PROBLEM: Final[Expression] = {"$and": [{"$eq": ["$status", "pending"]}, {"$ne": ["$problem", None]}]}


def lease_columns(**columns: Expression) -> dict[str, Expression]:
    """The changes that reset the lease and what the run waits for, with or instead of which `columns` are set."""
    return {"token": None, "lease_owner": None, "lease_until": None, "running_steps": None, "waiting_for": [], **columns}
