"""A run in memory and the transitions of it that stores without SQL share: give a lease, free it, write, wake.

Nothing here takes a lock: the caller holds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from perdure.backends.base.leases import new_token
from perdure.backends.base.lost_reply import check_consumed, missing_entries, missing_items
from perdure.model.durations import MICROSECOND
from perdure.model.journal import Entry
from perdure.model.records import Claim, Item, Lease, Pulse, RunRow, Signal


@dataclass(slots=True)
class InMemoryRun:
    """Everything of one run. `token` is None while nobody has the lease; `claimed_length` is the journal's at the last claim."""

    row: RunRow
    token: str | None = None
    claimed_length: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)
    inbox: dict[int, Signal] = field(default_factory=dict)
    items: dict[tuple[str, int], Item] = field(default_factory=dict)

    def change(self, **columns: Any) -> None:
        self.row = msgspec.structs.replace(self.row, **columns)

    def free(self, **columns: Any) -> None:
        """Give up the lease and stop waiting, in one change with `columns`."""
        self.token = None
        self.change(**{"lease_owner": None, "lease_until": None, "waiting_for": (), **columns})

    def give(self, ttl: float, now: int) -> Claim:
        """Lease the run, whoever had it before, and count the attempt."""
        grew = len(self.entries) > self.claimed_length
        attempts = 1 if grew else self.row.attempts + 1
        until = now + round(ttl * MICROSECOND)
        epoch = max(self.row.epoch + 1, now)
        self.free(status="running", wake_at=until, lease_until=until, epoch=epoch, attempts=attempts, updated_at=now)
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

    def leased(self, now: int) -> bool:
        return self.row.lease_until is not None and self.row.lease_until > now

    def due(self, now: int) -> bool:
        return self.row.wake_at is not None and self.row.wake_at <= now

    def wake(self, now: int) -> None:
        """Make it due, without losing its place in the line when it is due already."""
        if not self.due(now):
            self.change(wake_at=now)

    def write(self, lease: Lease, entries: Iterable[Entry], consume: Iterable[int], items: Iterable[Item] = ()) -> None:
        """Everything or nothing; what is there already is left as it is."""
        consumed = [self._arrived(seq) for seq in consume]
        new_entries = missing_entries(self.row.id, self.entries, entries)
        new_items = missing_items(self.row.id, self.items, items)
        self.entries.update(new_entries)
        self.items.update(new_items)
        for signal in consumed:
            self.inbox[signal.seq] = msgspec.structs.replace(signal, consumed_by=lease.token)

    def _arrived(self, seq: int) -> Signal:
        check_consumed(self.row.id, self.inbox, (seq,))
        return self.inbox[seq]

    def put(
        self, name: str, payload: bytes, kind: Literal["signal", "child"] = "signal", dedupe: str | None = None, *, now: int
    ) -> int:
        """Append to the inbox and wake the run if it waits for just this."""
        signal = Signal(seq=self.inbox_seq + 1, name=name, payload=payload, kind=kind, dedupe=dedupe)
        self.inbox[signal.seq] = signal
        if self.row.status == "suspended" and signal.address in self.row.waiting_for:
            self.wake(now)
        return signal.seq

    def journal(self, after: int = 0) -> list[Entry]:
        return sorted((entry for entry in self.entries.values() if entry.seq > after), key=lambda entry: entry.seq)

    def unconsumed(self, after: int = 0) -> list[Signal]:
        return [signal for signal in self.inbox.values() if signal.seq > after and signal.consumed_by is None]

    @property
    def inbox_seq(self) -> int:
        """The highest seq, consumed or not. The inbox is in that order."""
        return next(reversed(self.inbox), 0)

    def pulse(self) -> Pulse:
        return Pulse(self.inbox_seq, self.row.cancel_requested)
