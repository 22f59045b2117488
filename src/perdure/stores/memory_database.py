"""What memory handles share: runs, schedules and queue limits by namespace, under one lock.

These classes know the transitions of one run (give a lease, free it, write, wake); which verb may do which one when is said in
`perdure.stores.memory_store`. Nothing here takes the lock: whoever calls holds it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from perdure.duration import MICROSECOND
from perdure.errors import PersistenceError, RunFinished, RunNotFound
from perdure.journal import Entry
from perdure.records import Claim, Item, Lease, Pulse, QueueLimits, RunRow, Schedule, Signal
from perdure.stores.leasing import new_token

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class StoredRun:
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
        until = now + microseconds(ttl)
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
        new_entries = _without_contradiction(self.row.id, self.entries, ((entry.seq, entry) for entry in entries))
        new_items = _without_contradiction(self.row.id, self.items, (((item.stream, item.n), item) for item in items))
        self.entries.update(new_entries)
        self.items.update(new_items)
        for signal in consumed:
            self.inbox[signal.seq] = msgspec.structs.replace(signal, consumed_by=lease.token)

    def _arrived(self, seq: int) -> Signal:
        if seq not in self.inbox:
            raise PersistenceError(f"run {self.row.id!r}", f"its inbox has no row {seq} to consume; nothing was written")
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


@dataclass(slots=True)
class Namespace:
    """The runs, schedules and queue limits under one prefix. `live` are the ids of the runs that have not ended."""

    runs: dict[str, StoredRun] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    limits: dict[str, QueueLimits] = field(default_factory=dict)

    def find(self, run_id: str) -> StoredRun:
        if run_id not in self.runs:
            raise RunNotFound(run_id)
        return self.runs[run_id]

    def find_live(self, run_id: str) -> StoredRun:
        run = self.find(run_id)
        if run.row.ended:
            raise RunFinished(run_id, run.row.status)
        return run

    def put(self, row: RunRow, entries: Iterable[Entry] = (), inbox: Iterable[Signal] = ()) -> StoredRun:
        """Have this run, which nobody has leased, in place of what is there under its id. Entries and inbox are by seq."""
        self.remove(row.id)
        run = StoredRun(row, entries={entry.seq: entry for entry in entries}, inbox={signal.seq: signal for signal in inbox})
        self.runs[row.id] = run
        if not row.ended:
            self.live.add(row.id)
        return run

    def remove(self, run_id: str) -> None:
        self.runs.pop(run_id, None)
        self.live.discard(run_id)

    def claimable(self) -> list[StoredRun]:
        """Runs that are due or that time alone will make due."""
        return [run for run in map(self.runs.__getitem__, self.live) if not run.row.held and run.row.wake_at is not None]


class Room:
    """How many more runs the queue limits let in. Only leases that have not expired take a place."""

    def __init__(self, namespace: Namespace, now: int) -> None:
        self._limits = namespace.limits
        self._taken: Counter[tuple[str, str | None]] = Counter()
        for run in map(namespace.runs.__getitem__, namespace.live):
            if run.leased(now):
                self._count(run.row)

    def take(self, row: RunRow) -> bool:
        limits = self._limits.get(row.queue, QueueLimits())
        fits = _below(self._taken[row.queue, None], limits.concurrency) and (
            row.limit_key is None or _below(self._taken[row.queue, row.limit_key], limits.key_concurrency)
        )
        if fits:
            self._count(row)
        return fits

    def _count(self, row: RunRow) -> None:
        self._taken[row.queue, None] += 1
        if row.limit_key is not None:
            self._taken[row.queue, row.limit_key] += 1


class MemoryDatabase:
    """What several `MemoryStore` handles share."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.lock = threading.Lock()  # guards everything below; nobody waits and nothing is called back under it
        self.namespaces: defaultdict[str, Namespace] = defaultdict(Namespace)
        self.watchers: set[asyncio.Future[None]] = set()

    def wake_watchers(self) -> None:
        """Takes the lock itself, and lets go of it before it wakes anybody."""
        with self.lock:
            watchers, self.watchers = self.watchers, set()
        for watcher in watchers:
            with suppress(RuntimeError):  # its loop was closed, so nobody waits there any more
                watcher.get_loop().call_soon_threadsafe(_resolve, watcher)


def microseconds(seconds: float) -> int:
    """The length in whole microseconds."""
    return round(seconds * MICROSECOND)


def _without_contradiction(run_id: str, written: dict[K, V], new: Iterable[tuple[K, V]]) -> dict[K, V]:
    """What is new by its place, if no place is taken by something else."""
    placed: dict[K, V] = {}
    for place, value in new:
        if written.get(place, value) != value or placed.setdefault(place, value) != value:
            raise PersistenceError(f"run {run_id!r}", f"something else is recorded at {place!r} already; nothing was written")
    return placed


def _below(taken: int, limit: int | None) -> bool:
    return limit is None or taken < limit


def _resolve(watcher: asyncio.Future[None]) -> None:
    if not watcher.done():
        watcher.set_result(None)
