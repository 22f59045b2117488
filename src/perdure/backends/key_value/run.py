"""A run in memory: its document, and the transitions that the verbs are made of. A transition that raises has changed nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from perdure.backends.base.leases import lease_microseconds, new_token
from perdure.backends.key_value.document import TAIL_BYTES, TAIL_LENGTH, Arrival, Chunk, Document, chunk_key, encoded
from perdure.backends.key_value.names import nonce
from perdure.backends.key_value.ranges import has, highest, joined, total
from perdure.errors import LeaseLost, PersistenceError, RunFinished, RunNotFound, SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Item, Lease, Pulse, RunRow, Signal

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", Entry, Item)


class NeedsHistory(Exception):
    """What was recorded long ago has to be looked at."""


class Given(NamedTuple):
    """A lease that was given, and how the run stood then. What is in its chunks never changes."""

    lease: Lease
    row: RunRow
    incarnation: str
    chunks: int
    tail: list[Entry]
    inbox: list[Signal]
    inbox_seq: int
    item_counts: dict[str, int]


class Run:
    """A run of which `document` says everything, or None when there never was one."""

    def __init__(self, run_id: str, document: Document | None) -> None:
        row = None if document is None else document.row
        if row is not None and row.id != run_id:
            raise SnapshotCorrupt(run_id, "the document", f"it is that of run {row.id!r}")
        self.id = run_id
        self.document = document
        # What must be kept beside the document before it is written.
        self.parcels: dict[str, bytes] = {}
        # All that the chunks hold, once somebody had to look.
        self.history: Chunk | None = None
        # Whether the document is to be written though it says the same.
        self.is_touched = False

    @property
    def row(self) -> RunRow | None:
        """The run's row, or None when there is no run."""
        return None if self.document is None else self.document.row

    @property
    def _known(self) -> Document:
        if self.document is None or self.document.row is None:
            raise RunNotFound(self.id)
        return self.document

    def found(self) -> RunRow:
        """The run's row. Raises `RunNotFound`."""
        row = self._known.row
        if row is None:
            raise RunNotFound(self.id)
        return row

    def unended(self) -> RunRow:
        """The run's row. Raises `RunNotFound`, `RunFinished`."""
        row = self.found()
        if row.ended:
            raise RunFinished(self.id, row.status)
        return row

    def fenced(self, lease: Lease) -> RunRow:
        """The run's row, if this lease is its current one. Raises `LeaseLost`."""
        row = self.row
        if row is None or row.epoch != lease.epoch or self._known.token != lease.token:
            raise LeaseLost(lease.run_id, lease.epoch)
        return row

    def begin(self, row: RunRow, entries: list[Entry], inbox: list[Signal], parcels: Mapping[str, bytes]) -> None:
        """Have this whole run, which nobody has leased, in place of what is there."""
        epoch = 0 if self.document is None else max(self.document.epoch, 0 if self.row is None else self.found().epoch)
        card = "" if self.document is None else self.document.card
        marks = [] if self.document is None else self.document.nonces
        arrivals = [Arrival(signal, origin_of(signal)) for signal in inbox]
        self.document = Document(
            row=row,
            incarnation=nonce(),
            card=card,
            epoch=epoch,
            seqs=joined([], (entry.seq for entry in entries)),
            tail=entries,
            inbox=arrivals,
            inbox_seq=max((signal.seq for signal in inbox), default=0),
            origins={one.origin: one.row.seq for one in arrivals if one.origin is not None},
            nonces=marks,
        )
        self.parcels = dict(parcels)
        if is_full(self.document):
            self._begin_with_chunks(entries)

    def _begin_with_chunks(self, entries: list[Entry]) -> None:
        """As nobody knows this incarnation yet, its chunks can be written before it is there."""
        parts = [entries[at : at + TAIL_LENGTH] for at in range(0, len(entries), TAIL_LENGTH)]
        document = self._known
        document.tail, document.chunks = [], len(parts)
        self.parcels |= {chunk_key(number): encoded(Chunk(entries=part)) for number, part in enumerate(parts)}

    def carry(self, parcels: Mapping[str, bytes]) -> None:
        """Have these kept beside the document."""
        self.parcels |= parcels

    def delete(self) -> None:
        """Leave nothing but the knowledge that there was something."""
        row = self.row
        if self.document is not None and row is not None:
            epoch = max(self.document.epoch, row.epoch)
            marks = self.document.nonces
            self.document = Document(row=None, incarnation="", card=self.document.card, epoch=epoch, nonces=marks)

    def touch(self) -> None:
        """Make whoever changes the run at the same time look at it again."""
        self.is_touched = True
        if self.document is None:
            self.document = Document(row=None, incarnation="")

    def change(self, **columns: Any) -> None:
        """Change columns of the row."""
        self._known.row = msgspec.structs.replace(self.found(), **columns)

    def replace(self, row: RunRow) -> None:
        """Have this row."""
        self._known.row = row

    def owe(self, *, is_owed: bool) -> None:
        """Remember whether the parent must be told of the end."""
        self._known.owes_parent = is_owed

    def free(self, **columns: Any) -> None:
        """Give up the lease and stop waiting, in one change with `columns`."""
        self._known.token = None
        self.change(**{"lease_owner": None, "lease_until": None, "waiting_for": (), **columns})

    def give(self, ttl: float, owner: str, now: int) -> Given:
        """Lease the run, whoever had it before, and count the attempt."""
        document, row = self._known, self.found()
        length = total(document.seqs)
        attempts = 1 if length > document.claimed_length else row.attempts + 1
        until, epoch = now + lease_microseconds(ttl), max(row.epoch + 1, document.epoch + 1, now)
        self.free(status="running", wake_at=until, lease_until=until, epoch=epoch, attempts=attempts, updated_at=now)
        self.change(lease_owner=owner)
        document.token, document.claimed_length = new_token(), length
        return Given(
            Lease(run_id=self.id, epoch=epoch, token=document.token, until=until),
            self.found(),
            document.incarnation,
            document.chunks,
            list(document.tail),
            [arrival.row for arrival in document.inbox],
            document.inbox_seq,
            {stream: total(ranges) for stream, ranges in document.streams.items()},
        )

    def leased(self, now: int) -> bool:
        """Whether a lease is alive."""
        row = self.row
        return row is not None and row.lease_until is not None and row.lease_until > now

    def due(self, now: int) -> bool:
        """Whether the instant it waits for has come."""
        row = self.row
        return row is not None and row.wake_at is not None and row.wake_at <= now

    def wake(self, now: int) -> None:
        """Make it due, without losing its place in the line when it is due already."""
        if not self.due(now):
            self.change(wake_at=now)

    def pulse(self) -> Pulse:
        """What the holder learns."""
        return Pulse(self._known.inbox_seq, self.found().cancel_requested)

    def write(self, entries: Iterable[Entry], consume: Collection[int], items: Iterable[Item] = ()) -> None:
        """Everything or nothing; what is there already is left as it is."""
        document = self._known
        self._check_arrived(consume)
        new_entries = self._new_entries(entries)
        new_items = self._new_items(items)
        document.seqs = joined(document.seqs, (entry.seq for entry in new_entries))
        document.tail += new_entries
        for item in new_items:
            document.streams[item.stream] = joined(document.streams.get(item.stream, []), [item.n])
        document.items += new_items
        taken = {arrival.row.seq for arrival in document.inbox} & set(consume)
        if taken:
            document.inbox = [arrival for arrival in document.inbox if arrival.row.seq not in taken]
            document.consumed = joined(document.consumed, taken)

    def append(self, entry: Entry) -> None:
        """Add an entry whose place is known to be free."""
        document = self._known
        document.seqs = joined(document.seqs, [entry.seq])
        document.tail.append(entry)

    @property
    def next_seq(self) -> int:
        """The lowest seq above all others."""
        return highest(self._known.seqs) + 1

    def _check_arrived(self, consume: Collection[int]) -> None:
        document = self._known
        there = {arrival.row.seq for arrival in document.inbox}
        for seq in consume:
            if seq not in there and not has(document.consumed, seq):
                raise PersistenceError(f"run {self.id!r}", f"its inbox has no row {seq} to consume; nothing was written")

    def _new_entries(self, entries: Iterable[Entry]) -> list[Entry]:
        document = self._known
        written = {entry.seq: entry for entry in document.tail}
        given = [(entry.seq, entry) for entry in entries]
        if any(has(document.seqs, seq) and seq not in written for seq, _ in given):
            written |= {entry.seq: entry for entry in self._past.entries}
        return self._without_contradiction(written, given)

    def _new_items(self, items: Iterable[Item]) -> list[Item]:
        document = self._known
        written = {(item.stream, item.n): item for item in document.items}
        given = [((item.stream, item.n), item) for item in items]
        if any(has(document.streams.get(stream, []), n) and (stream, n) not in written for (stream, n), _ in given):
            written |= {(item.stream, item.n): item for item in self._past.items}
        return self._without_contradiction(written, given)

    @property
    def _past(self) -> Chunk:
        if self.history is None:
            raise NeedsHistory
        return self.history

    def _without_contradiction(self, written: Mapping[K, V], given: Iterable[tuple[K, V]]) -> list[V]:
        """What is not there yet, if no place is taken by something else."""
        placed: dict[K, V] = {}
        for place, value in given:
            if written.get(place, value) != value or placed.setdefault(place, value) != value:
                reason = f"something else is recorded at {place!r} already; nothing was written"
                raise PersistenceError(f"run {self.id!r}", reason)
        return [value for place, value in placed.items() if place not in written]

    def awaited(self, waiting_for: Collection[Awaited]) -> list[Signal]:
        """The unconsumed inbox rows that answer one of these waits, in order."""
        return [arrival.row for arrival in self._known.inbox if arrival.row.address in waiting_for]

    def seq_of(self, origin: str | None) -> int | None:
        """The inbox seq of what came from there before, consumed or not."""
        document = self._known
        if origin is None or origin in document.origins or not document.origin_chunks:
            return document.origins.get(origin or "")
        return self._past.origins.get(origin)

    def put(self, signal: Signal, origin: str | None, now: int) -> int:
        """Append to the inbox, under the next seq, and wake the run if it waits for just this."""
        document, row = self._known, self.found()
        document.inbox_seq += 1
        arrived = msgspec.structs.replace(signal, seq=document.inbox_seq)
        document.inbox = [*document.inbox, Arrival(arrived, origin)]
        if origin is not None:
            document.origins[origin] = arrived.seq
        if row.status == "suspended" and arrived.address in row.waiting_for:
            self.wake(now)
        return arrived.seq


def is_full(document: Document) -> bool:
    """Whether the end of the journal has grown so long that it must be moved to a chunk."""
    if len(document.tail) + len(document.items) >= TAIL_LENGTH:
        return True
    size = sum(len(entry.payload) for entry in document.tail) + sum(len(item.payload) for item in document.items)
    return size >= TAIL_BYTES


def origin_of(signal: Signal) -> str | None:
    """By what a signal is known when it is sent again."""
    return None if signal.dedupe is None else _hashed("signal", signal.name, signal.dedupe)


def origin_of_end(child: RunRow) -> str:
    """By what the end of a child is known when it is told again."""
    return _hashed("child", child.id, str(child.epoch))


def _hashed(*parts: str) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()
