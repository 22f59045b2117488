"""A run as a document, and back.

The document has the run's columns, and besides them what makes its transitions atomic: the end of the journal (`tail`), the last
`items`, and the `inbox`. Their older parts may have been moved to the collections `steps`, `items` and `signals`; `steps_top` and
`items_top` are the highest numbers there, `moved_rows` is how many inbox rows were moved, `moved_waiting` how many of those are
not consumed, and `consumed` has moved ones that are but are not marked so yet. `moves` changes whenever those collections do.
`weight` and `inbox_weight` say how full the document is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from perdure.backends.mongo.names import key_of, name_in
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Item, Lease, Pulse, RunRow, Signal

Document: TypeAlias = dict[str, Any]

# The least and highest whole numbers of BSON: an index holds only runs whose wake_at is one of those, and not null.
LEAST: Final = -(2**63)

FULL: Final = 256 << 10  # from this weight on the tail or the inbox is moved before anything is added
OVERSIZE: Final = 1 << 20  # what weighs more never stands in the run's document
LARGE: Final = 256 << 10  # a payload with more bytes stands elsewhere, whosever it is
LARGE_COLUMNS: Final = ("input", "metadata", "progress", "outcome")
ASIDE: Final = "aside"  # the one field of what stands in place of such a payload: its name

GENERATION_LENGTH: Final = 32
_OVERHEAD: Final = 4096  # what an entry weighs besides its bytes, so that a tail has at most 64
_COLUMNS: Final = tuple(name for name in RunRow.__struct_fields__ if name not in {"id", "waiting_for"})
# What of a document is not the run's row.
PARTS: Final = {"tail": 0, "items": 0, "inbox": 0, "consumed": 0}


def run_document(namespace: str, row: RunRow, generation: str, entries: Sequence[Entry], inbox: Sequence[Signal]) -> Document:
    """The document of a run that nobody has leased, with all of this in it."""
    return {
        "_id": key_of(namespace, row.id),
        "namespace": namespace,
        "generation": generation,
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
    """The run's row. Columns that stand elsewhere have been filled in."""
    waiting_for = tuple(_awaited(text) for text in document["waiting_for"])
    columns = {name: document[name] for name in _COLUMNS}
    return RunRow(id=name_in(document["_id"]), waiting_for=waiting_for, **columns)


def entry_document(entry: Entry) -> Document:
    """The entry in a tail; in `steps` it has an `_id` besides."""
    return msgspec.structs.asdict(entry)


def entry_of(document: Mapping[str, Any]) -> Entry:
    """The entry, from a tail or from `steps`."""
    return Entry(**{name: document[name] for name in Entry.__struct_fields__})


def item_document(item: Item) -> Document:
    """The item in a run's document. `at` is its place, to look for."""
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


def signal_of(document: Mapping[str, Any]) -> Signal:
    """The unconsumed inbox row, from a run's document or from `signals`."""
    return Signal(**{name: document[name] for name in ("seq", "kind", "name", "payload", "dedupe")})


def address(awaited: Awaited) -> str:
    """What a run waits for, or an inbox row answers to, as one text."""
    return f"{awaited.kind}:{awaited.name}"


def addresses(waiting_for: Collection[Awaited]) -> list[str]:
    """What a run waits for."""
    return sorted({address(awaited) for awaited in waiting_for})


def _awaited(text: str) -> Awaited:
    kind, _, name = text.partition(":")
    return Awaited("child" if kind == "child" else "signal", name)


def generation_in(token: str) -> str:
    """The generation of the run that a lease with this token was given on."""
    return token[:GENERATION_LENGTH]


def lease_of(document: Mapping[str, Any]) -> Lease:
    """The lease that was just given on this run."""
    return Lease(run_id=name_in(document["_id"]), epoch=document["epoch"], token=document["token"], until=document["lease_until"])


def pulse_of(document: Mapping[str, Any]) -> Pulse:
    """What the holder learns."""
    return Pulse(document["inbox_seq"], document["cancel_requested"])


def weight(parts: Iterable[Entry | Item | Signal]) -> int:
    """How much of a document's room these take: about their bytes, and something for each."""
    return sum(_bytes(part.payload) + _words(part) + _OVERHEAD for part in parts)


def _bytes(payload: bytes | Document) -> int:
    """What stands elsewhere, or was read as the name under which it does, takes no room."""
    return len(payload) if isinstance(payload, bytes) and len(payload) <= LARGE else 0


def _words(part: Entry | Item | Signal) -> int:
    if isinstance(part, Entry):
        return 4 * (len(part.key) + len(part.name)) + len(part.args_hash or b"")
    return 4 * len(part.stream) if isinstance(part, Item) else 4 * (len(part.name) + len(part.dedupe or ""))
