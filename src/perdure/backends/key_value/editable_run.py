"""A run that is being changed: its document, and the transitions that the verbs are made of.

A transition that raises has changed nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from perdure.backends.base.duplicate_records import check_consumed, missing_entries, missing_items, unique_entries, unique_items
from perdure.backends.base.in_memory_run import RunTransitions
from perdure.backends.base.leases import new_token
from perdure.backends.key_value.keys import new_nonce
from perdure.backends.key_value.run_document import (
    TAIL_LENGTH,
    InboxRow,
    JournalChunk,
    LargePayloads,
    RunDocument,
    add_to_ranges,
    chunk_key,
    contains,
    encode,
    highest,
    is_full,
    total,
)
from perdure.errors import LeaseLost, RunNotFound, SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.records import Item, Lease, RunRow, Signal


class NeedsHistory(Exception):
    """The chunks must be loaded into `history` first."""


class LeaseGrant(NamedTuple):
    """A lease that was given, and the run at that moment. What is in its chunks never changes."""

    lease: Lease
    row: RunRow
    incarnation: str
    chunks: range
    tail: list[Entry]
    inbox: list[Signal]
    inbox_seq: int
    item_counts: dict[str, int]


class EditableRun(RunTransitions):
    """A run with its document, which is None when there never was one."""

    def __init__(self, run_id: str, document: RunDocument | None) -> None:
        row = None if document is None else document.row
        if row is not None and row.id != run_id:
            raise SnapshotCorrupt(run_id, "the document", f"it is that of run {row.id!r}")
        self.id = run_id
        self.document = document
        # What must be written beside the document, by key, before the document is.
        self.blobs: dict[str, bytes] = {}
        # All that the chunks hold, once a verb has raised `NeedsHistory`.
        self.history: JournalChunk | None = None
        # Entries of a journal that the run has left behind, and that were in no chunk.
        self.left_behind: list[Entry] = []
        # Whether the document is to be written though it is unchanged.
        self.is_touched = False

    @property
    def exists(self) -> bool:
        """Whether there is a run."""
        return self.document is not None and self.document.row is not None

    @property
    def _stored(self) -> RunDocument:
        if self.document is None or self.document.row is None:
            raise RunNotFound(self.id)
        return self.document

    @property
    def row(self) -> RunRow:
        """The run's row. Raises `RunNotFound`."""
        row = self._stored.row
        if row is None:
            raise RunNotFound(self.id)
        return row

    @row.setter
    def row(self, row: RunRow) -> None:
        self._stored.row = row

    @property
    def token(self) -> str | None:
        """The token of the lease, or None."""
        return self._stored.token

    @token.setter
    def token(self, token: str | None) -> None:
        self._stored.token = token

    def check_fence(self, lease: Lease) -> None:
        """Raise `LeaseLost` unless this lease is the current one."""
        if not self.exists:
            raise LeaseLost(lease.run_id, lease.epoch)
        super().check_fence(lease)

    def create(self, row: RunRow, entries: list[Entry], inbox: list[Signal], blobs: Mapping[str, bytes]) -> None:
        """Put this whole run, without a lease, in place of what is there."""
        before = self.document
        inbox_rows = [InboxRow(signal, origin_of_signal(signal)) for signal in inbox]
        self.document = RunDocument(
            row=row,
            incarnation=new_nonce(),
            due_key="" if before is None else before.due_key,
            epoch=_highest_epoch(before),
            seqs=add_to_ranges([], (entry.seq for entry in entries)),
            tail=entries,
            inbox=inbox_rows,
            inbox_seq=max((signal.seq for signal in inbox), default=0),
            origins={one.origin: one.row.seq for one in inbox_rows if one.origin is not None},
            nonces=[] if before is None else before.nonces,
        )
        self.blobs = dict(blobs)
        if is_full(self.document):
            self._move_entries_to_chunks(entries)

    def _move_entries_to_chunks(self, entries: list[Entry]) -> None:
        """Put the journal of a new incarnation into chunks, which can be written before its document."""
        parts = [entries[at : at + TAIL_LENGTH] for at in range(0, len(entries), TAIL_LENGTH)]
        document = self._stored
        document.tail, document.chunks = [], len(parts)
        self.blobs |= {chunk_key(number): encode(JournalChunk(entries=part)) for number, part in enumerate(parts)}

    def add_blobs(self, payloads: LargePayloads) -> None:
        """Write the blobs of these payloads before the document."""
        self.blobs |= payloads.blobs

    def delete(self) -> None:
        """Leave only a document that says that there was a run."""
        before = self.document
        if before is not None and before.row is not None:
            self.document = RunDocument(
                row=None, incarnation="", due_key=before.due_key, epoch=_highest_epoch(before), nonces=before.nonces
            )

    def touch(self) -> None:
        """Write the document even if it is unchanged, so that a concurrent writer must read it again."""
        self.is_touched = True
        if self.document is None:
            self.document = RunDocument(row=None, incarnation="")

    @property
    def owes_parent(self) -> bool:
        """Whether the parent must be notified of the end."""
        return self._stored.owes_parent

    @owes_parent.setter
    def owes_parent(self, owes_parent: bool) -> None:
        self._stored.owes_parent = owes_parent

    def grant_lease(self, length: int, owner: str, now: int) -> LeaseGrant:
        """Lease the run for `length` microseconds, whether or not it was leased before, and count the attempt."""
        document, row = self._stored, self.row
        recorded = total(document.seqs)
        attempts = 1 if recorded > document.claimed_length else row.attempts + 1
        until, epoch = now + length, max(row.epoch + 1, document.epoch + 1, now)
        self.free(
            status="running",
            wake_at=until,
            lease_until=until,
            lease_owner=owner,
            epoch=epoch,
            attempts=attempts,
            updated_at=now,
        )
        token = new_token()
        document.token, document.claimed_length = token, recorded
        return LeaseGrant(
            Lease(run_id=self.id, epoch=epoch, token=token, until=until),
            self.row,
            document.incarnation,
            range(document.first_chunk, document.chunks),
            list(document.tail),
            self.unconsumed(),
            document.inbox_seq,
            {stream: total(ranges) for stream, ranges in document.streams.items()},
        )

    def reopen(self, drop: Collection[str], now: int) -> None:
        """Make an ended run pending again. Raises `RunFinished`, `LeaseHeld`."""
        super().reopen(drop, now)
        self.owes_parent = False

    def write(self, entries: Iterable[Entry], consume: Collection[int], items: Iterable[Item] = ()) -> None:
        """Record everything or nothing; what is recorded already is left as it is. Raises `PersistenceError`."""
        document = self._stored
        unconsumed = {inbox_row.row.seq for inbox_row in document.inbox}
        check_consumed(self.id, unconsumed | {seq for seq in consume if contains(document.consumed, seq)}, consume)
        new_entries = self._missing_entries(unique_entries(self.id, entries))
        new_items = self._missing_items(unique_items(self.id, items))
        document.seqs = add_to_ranges(document.seqs, (entry.seq for entry in new_entries))
        document.tail += new_entries
        for item in new_items:
            document.streams[item.stream] = add_to_ranges(document.streams.get(item.stream, []), [item.n])
        document.items += new_items
        consumed = unconsumed.intersection(consume)
        if consumed:
            document.inbox = [inbox_row for inbox_row in document.inbox if inbox_row.row.seq not in consumed]
            document.consumed = add_to_ranges(document.consumed, consumed)

    def _missing_entries(self, entries: list[Entry]) -> list[Entry]:
        document = self._stored
        recorded = {entry.seq: entry for entry in document.tail}
        if any(contains(document.seqs, entry.seq) and entry.seq not in recorded for entry in entries):
            recorded |= {entry.seq: entry for entry in self._history.entries}
        return list(missing_entries(self.id, recorded, entries).values())

    def _missing_items(self, items: list[Item]) -> list[Item]:
        streams = self._stored.streams
        recorded = {(item.stream, item.n): item for item in self._stored.items}
        if any(contains(streams.get(item.stream, []), item.n) and (item.stream, item.n) not in recorded for item in items):
            recorded |= {(item.stream, item.n): item for item in self._history.items}
        return list(missing_items(self.id, recorded, items).values())

    @property
    def _history(self) -> JournalChunk:
        if self.history is None:
            raise NeedsHistory
        return self.history

    def append(self, entry: Entry) -> None:
        """Add an entry whose seq is known to be free."""
        document, payloads = self._stored, LargePayloads()
        document.seqs = add_to_ranges(document.seqs, [entry.seq])
        document.tail += payloads.pack_entries([entry])
        self.add_blobs(payloads)

    def clear_journal(self) -> None:
        """Leave the journal behind: the next chunk is the first of another one."""
        document = self._stored
        self.left_behind += document.tail
        document.seqs, document.tail, document.first_chunk, document.claimed_length = [], [], document.chunks, 0
        document.consumed = []
        self.history = None

    @property
    def next_seq(self) -> int:
        """The lowest seq above all that are recorded."""
        return highest(self._stored.seqs) + 1

    @property
    def inbox_seq(self) -> int:
        """The highest seq of the inbox, consumed or not."""
        return self._stored.inbox_seq

    def unconsumed(self) -> list[Signal]:
        """The inbox rows that are not consumed, by seq."""
        return [inbox_row.row for inbox_row in self._stored.inbox]

    def seq_of(self, origin: str | None) -> int | None:
        """The inbox seq of what came from this origin before, consumed or not."""
        document = self._stored
        if origin is None or origin in document.origins or not document.origin_chunks:
            return document.origins.get(origin or "")
        return self._history.origins.get(origin)

    def deliver(self, signal: Signal, origin: str | None, now: int) -> int:
        """Append to the inbox, under the next seq, and wake the run if it waits for this; the seq."""
        document = self._stored
        document.inbox_seq += 1
        arrived = msgspec.structs.replace(signal, seq=document.inbox_seq)
        document.inbox = [*document.inbox, InboxRow(arrived, origin)]
        if origin is not None:
            document.origins[origin] = arrived.seq
        self.wake_for(arrived, now)
        return arrived.seq


def _highest_epoch(document: RunDocument | None) -> int:
    """The highest epoch that a run with this id ever had."""
    if document is None:
        return 0
    return max(document.epoch, 0 if document.row is None else document.row.epoch)


def origin_of_signal(signal: Signal) -> str | None:
    """By what a signal is known when it is sent again."""
    return None if signal.dedupe is None else _hash_parts("signal", signal.name, signal.dedupe)


def origin_of_end(child: RunRow) -> str:
    """By what the end of a child is known when it is delivered again."""
    return _hash_parts("child", child.id, str(child.epoch))


def _hash_parts(*parts: str) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()
