"""A run's document: its row, its lease, the end of its journal and its unconsumed inbox, as JSON, changed as a whole.

What is too much for it is kept beside it, in the folder of the run's incarnation: payloads above a few kilobytes, and all of the
journal but its end, in chunks. A chunk only ever holds what the document held before, and is written once: a second writer finds
it there and takes it as it is. A run that is created anew, or restored, is another incarnation, so nobody ever finds pieces of
what was there before. A deleted run leaves a document without a row where other processes might still have the old one in hand.

Every write carries a nonce, and the last few stay in the document: whoever got no answer, or was told that somebody else was
faster, finds out whether that was himself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import msgspec

from perdure.backends.key_value.cards import Badge
from perdure.backends.key_value.names import nonce
from perdure.backends.key_value.ranges import Ranges
from perdure.errors import SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.records import Item, NewRun, RunRow, Signal

FORMAT: Final = 1
# What a payload may have to stand in the document itself.
INLINE: Final = 4096
TAIL_BYTES: Final = 32 << 10
TAIL_LENGTH: Final = 64
ORIGINS: Final = 256
_NONCES: Final = 16
_MARK: Final = b"\0perdure:"
# Columns of a row that may be large.
_LARGE: Final = ("input", "metadata", "progress", "outcome")

E = TypeVar("E", Entry, Item, Signal)
N = TypeVar("N", NewRun, RunRow)


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """An inbox row, and by what it is known when it is sent again: its dedupe, or the end of the child that tells it."""

    row: Signal
    origin: str | None = None


class Document(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Everything of one run that can change. Without a row there is no run, though there was one."""

    format: int = FORMAT
    row: RunRow | None
    incarnation: str
    card: str = ""
    epoch: int = 0
    token: str | None = None
    claimed_length: int = 0
    owes_parent: bool = False
    # The journal: which seqs are recorded, how many chunks there are, and what is in none of them yet.
    seqs: Ranges = []
    chunks: int = 0
    tail: list[Entry] = []
    # Which items of each stream are recorded, and those in no chunk yet.
    streams: dict[str, Ranges] = {}
    items: list[Item] = []
    # The unconsumed inbox, its highest seq, the seqs that were consumed, and by origin what must not be taken twice, which is
    # also moved to chunks when it gets long.
    inbox: list[Arrival] = []
    inbox_seq: int = 0
    consumed: Ranges = []
    origins: dict[str, int] = {}
    origin_chunks: int = 0
    nonces: list[str] = []


class Chunk(msgspec.Struct, omit_defaults=True):
    """A part of what is recorded, which no longer changes."""

    entries: list[Entry] = []
    items: list[Item] = []
    origins: dict[str, int] = {}


_document: Final = msgspec.json.Decoder(Document)
_chunk: Final = msgspec.json.Decoder(Chunk)


def encoded(value: Document | Chunk) -> bytes:
    """As it is kept."""
    return msgspec.json.encode(value)


def read_document(data: bytes, name: str) -> Document:
    """What these bytes are. Raises `SnapshotCorrupt`."""
    try:
        document = _document.decode(data)
    except (msgspec.MsgspecError, ValueError) as reason:
        raise SnapshotCorrupt(name, "the document", str(reason)) from reason
    if document.format != FORMAT:
        raise SnapshotCorrupt(name, "the document", f"it has format {document.format}, and this version reads {FORMAT}")
    return document


def read_chunk(data: bytes, run_id: str) -> Chunk:
    """What these bytes are. Raises `SnapshotCorrupt`."""
    try:
        return _chunk.decode(data)
    except (msgspec.MsgspecError, ValueError) as reason:
        raise SnapshotCorrupt(run_id, "a chunk of the journal", str(reason)) from reason


def names_of(document: Document | None) -> set[str]:
    """The card and the badge of the run."""
    if document is None or document.row is None:
        return set()
    return {document.card, Badge.of(document.row.id, document.incarnation).name}


def signed(document: Document, mark: str) -> None:
    """Let the document say that this write was made."""
    document.nonces = [*document.nonces[-_NONCES + 1 :], mark]


def chunk_key(number: int) -> str:
    """Where a chunk of the journal is, in its incarnation's folder."""
    return f"c-{number}"


def origins_key(number: int) -> str:
    """Where a chunk of what must not be taken twice is."""
    return f"s-{number}"


class Cargo:
    """Large payloads on their way in: what is to be written beside the document, by key, before it refers to them."""

    def __init__(self) -> None:
        self.parcels: dict[str, bytes] = {}

    def entries(self, rows: Iterable[Entry]) -> list[Entry]:
        """The entries as a document has them. Equal ones come out equal."""
        return [self._with_payload(row, self._by_content(row.payload)) for row in rows]

    def items(self, rows: Iterable[Item]) -> list[Item]:
        """The items as a document has them. Equal ones come out equal."""
        return [self._with_payload(row, self._by_content(row.payload)) for row in rows]

    def inbox(self, rows: Iterable[Signal]) -> list[Signal]:
        """Inbox rows as a document has them."""
        return [self._with_payload(row, self.once(row.payload)) for row in rows]

    def row(self, row: N) -> N:
        """A row as a document has it."""
        large = {name: self.once(value) for name in _LARGE if (value := getattr(row, name, None)) is not None}
        return msgspec.structs.replace(row, **large)

    def once(self, payload: bytes) -> bytes:
        """A payload that is taken away again when nothing refers to it, so no other may share its place."""
        return payload if _fits(payload) else self._parcel(payload, nonce())

    def _by_content(self, payload: bytes) -> bytes:
        return payload if _fits(payload) else self._parcel(payload, hashlib.blake2b(payload, digest_size=20).hexdigest())

    def _parcel(self, payload: bytes, name: str) -> bytes:
        self.parcels[f"p-{name}"] = msgspec.json.encode(payload)  # text, as some stores keep nothing else
        return _MARK + name.encode()

    def _with_payload(self, row: E, payload: bytes) -> E:
        return row if payload is row.payload else msgspec.structs.replace(row, payload=payload)


def _fits(payload: bytes) -> bool:
    # What looks like a reference is kept apart too, so that nothing in a document is taken for one that is none.
    return len(payload) <= INLINE and not payload.startswith(_MARK)


def parcel_of(payload: bytes | None) -> str | None:
    """The key of the parcel that stands here, or None when it is the payload itself."""
    if payload is None or not payload.startswith(_MARK):
        return None
    return f"p-{payload.removeprefix(_MARK).decode()}"


def large_columns(row: RunRow) -> dict[str, str]:
    """The parcels that the row refers to, by column."""
    return {name: key for name in _LARGE if (key := parcel_of(getattr(row, name))) is not None}


def passing_parcels(document: Document) -> Iterator[str]:
    """The parcels that are no longer needed once the document does not refer to them."""
    if document.row is not None:
        yield from large_columns(document.row).values()
    yield from (key for arrival in document.inbox if (key := parcel_of(arrival.row.payload)) is not None)
