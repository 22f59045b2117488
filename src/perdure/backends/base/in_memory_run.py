"""A run in memory, and what each verb of the contract does to one run.

`RunTransitions` is the part that the stores without SQL share: it checks first and changes afterwards, so one that raises has
changed nothing. `InMemoryRun` keeps everything of a run in dictionaries. Nothing here takes a lock: the caller holds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from perdure.backends.base.duplicate_records import check_consumed, missing_entries, missing_items, unique_entries, unique_items
from perdure.backends.base.leases import Release, is_due, is_leased, length_in_microseconds, new_token, refuse_leased
from perdure.errors import LeaseHeld, LeaseLost, RunFinished
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import (
    NO_PROBLEM,
    Awaited,
    Claim,
    EndStatus,
    Item,
    Lease,
    NewInput,
    Pulse,
    RunRow,
    Signal,
    columns_after_continue,
)


class RunTransitions(ABC):
    """The changes of a run's row. `token` is None while the run has no lease."""

    row: RunRow
    token: str | None

    @property
    @abstractmethod
    def inbox_seq(self) -> int:
        """The highest seq of the inbox, consumed or not."""

    @property
    @abstractmethod
    def next_seq(self) -> int:
        """The lowest seq above all that are recorded."""

    @abstractmethod
    def unconsumed(self) -> list[Signal]:
        """The inbox rows that are not consumed, by seq."""

    @abstractmethod
    def append(self, entry: Entry) -> None:
        """Add an entry whose seq is known to be free."""

    @abstractmethod
    def clear_journal(self) -> None:
        """Forget all entries, and the consumed inbox rows that nothing can ask for any more."""

    def change(self, **columns: Any) -> None:
        """Change columns of the row."""
        self.row = msgspec.structs.replace(self.row, **columns)

    def free(self, **columns: Any) -> None:
        """Give up the lease and stop waiting, in one change with `columns`."""
        self.token = None
        self.change(**{"lease_owner": None, "lease_until": None, "running_steps": None, "waiting_for": (), **columns})

    def wake(self, now: int) -> None:
        """Make the run due. One that is due already keeps its place in the order."""
        if not is_due(self.row, now):
            self.change(wake_at=now)

    def wake_for(self, signal: Signal, now: int) -> None:
        """Make the run due if it is suspended and waits for this signal."""
        if self.row.status == "suspended" and signal.address in self.row.waiting_for:
            self.wake(now)

    def pulse(self) -> Pulse:
        """What the holder of the lease learns with each write."""
        return Pulse(self.inbox_seq, self.row.cancel_requested)

    def check_fence(self, lease: Lease) -> None:
        """Raise `LeaseLost` unless this lease is the current one. An expired lease still is, until the run is leased again."""
        if self.row.epoch != lease.epoch or self.token != lease.token:
            raise LeaseLost(lease.run_id, lease.epoch)

    def can_acquire(self, now: int, *, due_only: bool, owner_has_died: bool = False) -> bool:
        """Whether `acquire` leases the run. Raises `LeaseHeld` while an operator holds it or a worker has it leased.

        A lease whose owner has died counts as expired.
        """
        if self.row.ended:
            return False
        if self.row.held:
            raise LeaseHeld.by_operator(self.row.id)
        if not owner_has_died:
            refuse_leased(self.row, now)
        return not self.row.lacks_input and (not due_only or owner_has_died or is_due(self.row, now))

    def renew(self, until: int, now: int, running_steps: bytes | None, **columns: Any) -> Pulse:
        """Prolong the lease."""
        self.change(lease_until=until, wake_at=until, updated_at=now, running_steps=running_steps, **columns)
        return self.pulse()

    def release(self, now: int, release: Release) -> None:
        """Give up the lease."""
        self.free(status="pending", updated_at=now, **release.columns(self.row, now))

    def suspend(self, wake_at: int | None, waiting_for: Collection[Awaited], now: int) -> list[Signal]:
        """Give up the lease, unless a signal that the run would wait for has arrived: then return what has."""
        arrived = [signal for signal in self.unconsumed() if signal.address in waiting_for]
        if not arrived:
            self.free(
                status="suspended", wake_at=wake_at, attempts=0, updated_at=now, waiting_for=tuple(waiting_for), **NO_PROBLEM
            )
            if self.row.cancel_requested:
                self.wake(now)
        return arrived

    def finish(self, status: EndStatus, outcome: bytes, now: int, **columns: Any) -> None:
        """End the run."""
        self.free(status=status, outcome=outcome, wake_at=None, updated_at=now, **NO_PROBLEM, **columns)

    def continue_as(self, new: NewInput, now: int) -> None:
        """Let the run start over with this input."""
        self.clear_journal()
        self.free(**columns_after_continue(self.row, new, now))

    def reopen(self, drop: Collection[str], now: int) -> None:
        """Make an ended run pending again. Raises `RunFinished`, `LeaseHeld`."""
        row = self.row
        if row.status == "completed":
            raise RunFinished(row.id, "completed")
        if not row.ended:
            raise LeaseHeld.by_attempt(row.id, row.status)
        epoch = max(row.epoch + 1, now)
        self.append(drop_entry(self.next_seq, drop, now, epoch))
        self.free(status="pending", wake_at=None if row.lacks_input else now, epoch=epoch, attempts=0, updated_at=now)
        self.change(outcome=None, cancel_requested=False, parent_notified=False, **NO_PROBLEM)

    def request_cancel(self, now: int) -> None:
        """Ask the run to stop, and make it due unless a worker has it. Raises `RunFinished`."""
        self.refuse_ended()
        self.change(cancel_requested=True)
        if not is_leased(self.row, now) and not self.row.lacks_input:
            self.wake(now)

    def unhold(self, now: int) -> None:
        """Let the run be driven again."""
        self.change(held=False)
        self.wake_from_problem(now)

    def wake_from_problem(self, now: int) -> None:
        """Make the run due at once if it waits only because of a problem: an additional try is harmless."""
        if self.row.status == "pending" and self.row.problem is not None:
            self.wake(now)

    def refuse_ended(self) -> None:
        """Raise `RunFinished` when the run has ended."""
        if self.row.ended:
            raise RunFinished(self.row.id, self.row.status)


@dataclass(slots=True)
class InMemoryRun(RunTransitions):
    """Everything of one run. `claimed_length` is the journal's length at the last claim; items are by stream and number."""

    row: RunRow
    token: str | None = None
    claimed_length: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    inbox: dict[int, Signal] = field(default_factory=dict)
    items: dict[tuple[str, int], Item] = field(default_factory=dict)

    def grant_lease(self, ttl: float, now: int, owner: str | None = None) -> Claim:
        """Lease the run, whether or not it was leased before, and count the attempt."""
        grew = len(self.entries) > self.claimed_length
        attempts = 1 if grew else self.row.attempts + 1
        until = now + length_in_microseconds(ttl)
        epoch = max(self.row.epoch + 1, now)
        self.free(
            status="running",
            wake_at=until,
            lease_until=until,
            lease_owner=owner,
            epoch=epoch,
            attempts=attempts,
            updated_at=now,
        )
        self.token = new_token()
        self.claimed_length = len(self.entries)
        return Claim(
            lease=Lease(run_id=self.row.id, epoch=epoch, token=self.token, until=until),
            run=self.row,
            journal=self.journal(),
            inbox=self.unconsumed(),
            inbox_seq=self.inbox_seq,
            item_counts=dict(Counter(stream for stream, _ in self.items)),
        )

    def write(self, lease: Lease, entries: Iterable[Entry], consume: Collection[int], items: Iterable[Item] = ()) -> None:
        """Record everything or nothing; what is recorded already is left as it is. Raises `PersistenceError`."""
        check_consumed(self.row.id, self.inbox, consume)
        new_entries = missing_entries(self.row.id, self.entries, unique_entries(self.row.id, entries))
        new_items = missing_items(self.row.id, self.items, unique_items(self.row.id, items))
        for entry in new_entries.values():
            self.append(entry)
        self.items |= new_items
        for seq in consume:
            if self.inbox[seq].consumed_by is None:
                self.inbox[seq] = msgspec.structs.replace(self.inbox[seq], consumed_by=lease.token)

    def send_signal(self, name: str, payload: bytes, dedupe: str | None, now: int) -> int:
        """Deliver a signal, unless one with the same name and dedupe came before; its seq. Raises `RunFinished`."""
        sent = None if dedupe is None else self._find_signal(name, dedupe)
        if sent is not None:
            return sent.seq
        self.refuse_ended()
        self.wake_from_problem(now)
        return self.deliver(name, payload, dedupe=dedupe, now=now)

    def deliver(
        self, name: str, payload: bytes, kind: Literal["signal", "child"] = "signal", dedupe: str | None = None, *, now: int
    ) -> int:
        """Append to the inbox, and wake the run if it waits for this; the seq of the new row."""
        signal = Signal(seq=self.inbox_seq + 1, name=name, payload=payload, kind=kind, dedupe=dedupe)
        self.inbox[signal.seq] = signal
        self.wake_for(signal, now)
        return signal.seq

    def _find_signal(self, name: str, dedupe: str) -> Signal | None:
        sent = ("signal", name, dedupe)
        return next((one for one in self.inbox.values() if (one.kind, one.name, one.dedupe) == sent), None)

    def append(self, entry: Entry) -> None:
        """Add an entry whose seq is known to be free."""
        self.entries[entry.seq] = entry

    def clear_journal(self) -> None:
        """Forget all entries and consumed signals, but those with a dedupe, and the last one, which has the highest seq."""
        self.entries, self.claimed_length, last = {}, 0, self.inbox_seq
        self.inbox = {seq: row for seq, row in self.inbox.items() if seq == last or self._is_needed(row)}

    def _is_needed(self, row: Signal) -> bool:
        """Whether an inbox row is asked for even when the journal is gone."""
        return row.consumed_by is None or row.dedupe is not None

    def journal(self, after: int = 0) -> list[Entry]:
        """The entries above a seq, in order."""
        return sorted((entry for entry in self.entries.values() if entry.seq > after), key=lambda entry: entry.seq)

    def unconsumed(self, after: int = 0) -> list[Signal]:
        """The inbox rows above a seq that are not consumed, in order."""
        return [signal for signal in self.inbox.values() if signal.seq > after and signal.consumed_by is None]

    def stream(self, name: str, after: int, limit: int) -> list[Item]:
        """The first items of a stream above a number, in order."""
        found: list[Item] = []
        while len(found) < limit and (item := self.items.get((name, after + 1 + len(found)))) is not None:
            found.append(item)
        if len(found) == limit or after + 1 + len(found) == len(self.items):
            return found  # without a gap, as always outside of a test
        found = [item for item in self.items.values() if item.stream == name and item.n > after]
        return sorted(found, key=lambda item: item.n)[:limit]

    @property
    def inbox_seq(self) -> int:
        """The highest seq of the inbox, consumed or not. The inbox is in that order."""
        return next(reversed(self.inbox), 0)

    @property
    def next_seq(self) -> int:
        """The lowest seq above all that are recorded."""
        return max(self.entries, default=0) + 1
