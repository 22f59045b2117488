"""A run's document: its row, its lease, the end of its journal and its unconsumed inbox, as JSON, changed as a whole.

What is too large for it is kept in the folder of the run's incarnation: payloads above a few kilobytes, as blobs, and all of the
journal and of the streams but their ends, in chunks. A chunk only ever holds what the document held before, and is written once:
a second writer finds it there and uses it as it is. Therefore a run that starts over uses no number of a chunk again. A run that
is created again, or restored, is another incarnation, so it never finds pieces of what was there before. A deleted run leaves a
document without a row where other processes might still write the old one.

Every write carries a nonce, and the last few stay in the document: a writer that got no reply, or lost a compare-and-swap, finds
out by it whether its own write is the one that is there.

Which seqs are recorded, consumed or streamed is kept as a list of ranges, as such sets have few gaps.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias, TypeVar

import msgspec

from perdure.backends.base.damaged_runs import check_row, raise_damage
from perdure.backends.key_value.keys import ExistsKey, new_nonce
from perdure.errors import SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.records import Item, NewRun, RunRow, Signal

FORMAT: Final = 3
# How long a payload may be to stand in the document itself.
INLINE: Final = 4096
TAIL_BYTES: Final = 32 << 10
TAIL_LENGTH: Final = 64
ORIGINS: Final = 256
_NONCES: Final = 16
_REFERENCE: Final = b"\0perdure:"
# Columns of a row that may be large.
_LARGE: Final = ("input", "metadata", "progress", "outcome")

E = TypeVar("E", Entry, Item, Signal)
N = TypeVar("N", NewRun, RunRow)

# First and last number of each range, in order, neither touching nor overlapping.
Ranges: TypeAlias = list[tuple[int, int]]


def contains(ranges: Ranges, number: int) -> bool:
    """Whether the number is in one of them."""
    at = bisect_right(ranges, (number, number)) - 1
    # A range that begins with this number and goes on sorts behind (number, number).
    return (at >= 0 and ranges[at][1] >= number) or (at + 1 < len(ranges) and ranges[at + 1][0] == number)


def add_to_ranges(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """The ranges, with these numbers too."""
    merged: Ranges = []
    for first, last in sorted([*ranges, *((number, number) for number in numbers)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def total(ranges: Ranges) -> int:
    """How many numbers there are."""
    return sum(last - first + 1 for first, last in ranges)


def highest(ranges: Ranges) -> int:
    """The highest number, or zero."""
    return ranges[-1][1] if ranges else 0


def numbers_above(ranges: Ranges, number: int, limit: int | None = None) -> set[int]:
    """The numbers above this one, the lowest `limit` of them."""
    found: set[int] = set()
    for first, last in ranges:
        begin = max(first, number + 1)
        end = last if limit is None else min(last, begin + limit - len(found) - 1)
        found.update(range(begin, end + 1))
    return found


class InboxRow(msgspec.Struct, frozen=True, array_like=True):
    """An inbox row, and by what a repetition of it is known: a signal's dedupe, or the end of a child."""

    row: Signal
    origin: str | None = None


class RunDocument(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Everything of one run that can change. Without a row the run was deleted."""

    format: int = FORMAT
    row: RunRow | None
    incarnation: str
    due_key: str = msgspec.field(default="", name="card")
    epoch: int = 0
    token: str | None = None
    claimed_length: int = 0
    owes_parent: bool = False
    # The journal: which seqs are recorded, the numbers of its first chunk and of the next one, and what is in none of them yet.
    seqs: Ranges = []
    first_chunk: int = 0
    chunks: int = 0
    tail: list[Entry] = []
    # Which items of each stream are recorded, how many chunks there are, and what is in none of them yet.
    streams: dict[str, Ranges] = {}
    item_chunks: int = 0
    items: list[Item] = []
    # The unconsumed inbox, its highest seq, the seqs that were consumed, and by origin what must not be delivered twice, which is
    # also moved to chunks when it gets long.
    inbox: list[InboxRow] = []
    inbox_seq: int = 0
    consumed: Ranges = []
    origins: dict[str, int] = {}
    origin_chunks: int = 0
    nonces: list[str] = []


class JournalChunk(msgspec.Struct, omit_defaults=True):
    """A part of what is recorded, which no longer changes."""

    entries: list[Entry] = []
    items: list[Item] = []
    origins: dict[str, int] = {}


_document_decoder: Final = msgspec.json.Decoder(RunDocument)
_chunk_decoder: Final = msgspec.json.Decoder(JournalChunk)


def encode(value: RunDocument | JournalChunk) -> bytes:
    """The value as it is stored."""
    return msgspec.json.encode(value)


def decode_document(data: bytes, name: str) -> RunDocument:
    """The document that these bytes are. Raises `SnapshotCorrupt`."""
    with raise_damage(name, "the document"):
        document = _document_decoder.decode(data)
        if document.row is not None:
            check_row(document.row)
    if document.format != FORMAT:
        raise SnapshotCorrupt(name, "the document", f"it has format {document.format}, and this version reads {FORMAT}")
    return document


def decode_chunk(data: bytes, run_id: str) -> JournalChunk:
    """The chunk that these bytes are. Raises `SnapshotCorrupt`."""
    with raise_damage(run_id, "a chunk of the journal"):
        return _chunk_decoder.decode(data)


def key_names(document: RunDocument | None) -> set[str]:
    """The names of the run's due key and exists key."""
    if document is None or document.row is None:
        return set()
    return {document.due_key, ExistsKey.of(document.row.id, document.incarnation).name}


def add_nonce(document: RunDocument, nonce: str) -> None:
    """Mark the document as written by the write with this nonce."""
    document.nonces = [*document.nonces[-_NONCES + 1 :], nonce]


def is_full(document: RunDocument) -> bool:
    """Whether the end of the journal has grown so long that it must be moved to a chunk."""
    if len(document.tail) + len(document.items) >= TAIL_LENGTH:
        return True
    size = sum(len(entry.payload) for entry in document.tail) + sum(len(item.payload) for item in document.items)
    return size >= TAIL_BYTES


def chunk_key(number: int) -> str:
    """The key of a chunk of the journal, in its incarnation's folder."""
    return f"c-{number}"


def items_key(number: int) -> str:
    """The key of a chunk of the streams."""
    return f"i-{number}"


def origins_key(number: int) -> str:
    """The key of a chunk of origins."""
    return f"s-{number}"


class LargePayloads:
    """Replaces large payloads by references. `blobs` must be written, by key, before a document refers to them."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def pack_entries(self, rows: Iterable[Entry], token: str = "") -> list[Entry]:
        """The entries as a document has them. Those that are equal and written under one lease stay equal.

        The blob of another lease is another one, also with the same content: it is deleted when the run starts over.
        """
        return [self._with_payload(row, self._pack_by_content(row.payload, token)) for row in rows]

    def pack_items(self, rows: Iterable[Item]) -> list[Item]:
        """The items as a document has them. Equal ones stay equal."""
        return [self._with_payload(row, self._pack_by_content(row.payload, "items")) for row in rows]

    def pack_inbox(self, rows: Iterable[Signal]) -> list[Signal]:
        """Inbox rows as a document has them."""
        return [self._with_payload(row, self.pack_once(row.payload)) for row in rows]

    def pack_row(self, row: N) -> N:
        """A row as a document has it."""
        large = {name: self.pack_once(value) for name in _LARGE if (value := getattr(row, name, None)) is not None}
        return msgspec.structs.replace(row, **large)

    def pack_once(self, payload: bytes) -> bytes:
        """A payload whose blob is deleted when nothing refers to it, so it has a key of its own."""
        return payload if _fits(payload) else self._add_blob(payload, new_nonce())

    def _pack_by_content(self, payload: bytes, key: str) -> bytes:
        if _fits(payload):
            return payload
        return self._add_blob(payload, hashlib.blake2b(payload, digest_size=20, key=key.encode()).hexdigest())

    def _add_blob(self, payload: bytes, name: str) -> bytes:
        self.blobs[f"p-{name}"] = msgspec.json.encode(payload)  # as text, since some stores keep nothing else
        return _REFERENCE + name.encode()

    def _with_payload(self, row: E, payload: bytes) -> E:
        return row if payload is row.payload else msgspec.structs.replace(row, payload=payload)


def _fits(payload: bytes) -> bool:
    # A payload that looks like a reference becomes a blob too, so that every reference in a document is one.
    return len(payload) <= INLINE and not payload.startswith(_REFERENCE)


def blob_key(payload: bytes | None) -> str | None:
    """The key of the blob that this refers to, or None when it is the payload itself."""
    if payload is None or not payload.startswith(_REFERENCE):
        return None
    return f"p-{payload.removeprefix(_REFERENCE).decode()}"


def large_columns(row: RunRow) -> dict[str, str]:
    """The keys of the blobs that the row refers to, by column."""
    return {name: key for name in _LARGE if (key := blob_key(getattr(row, name))) is not None}


def temporary_blobs(document: RunDocument) -> Iterator[str]:
    """The keys of the blobs that are no longer needed once the document does not refer to them."""
    if document.row is not None:
        yield from large_columns(document.row).values()
    yield from (key for inbox_row in document.inbox if (key := blob_key(inbox_row.row.payload)) is not None)
