"""What memory handles share: runs, schedules and queue limits by namespace, under one lock.

These classes know the transitions of one run (give a lease, free it, write, wake); which verb may do which one when is said in
`perdure.backends.memory.store`. Nothing here takes the lock: whoever calls holds it.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.errors import RunFinished, RunNotFound
from perdure.model.journal import Entry
from perdure.model.records import QueueLimits, RunRow, Schedule, Signal

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Namespace:
    """The runs, schedules and queue limits under one prefix. `live` are the ids of the runs that have not ended."""

    runs: dict[str, InMemoryRun] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    limits: dict[str, QueueLimits] = field(default_factory=dict)

    def find(self, run_id: str) -> InMemoryRun:
        if run_id not in self.runs:
            raise RunNotFound(run_id)
        return self.runs[run_id]

    def find_live(self, run_id: str) -> InMemoryRun:
        run = self.find(run_id)
        if run.row.ended:
            raise RunFinished(run_id, run.row.status)
        return run

    def put(self, row: RunRow, entries: Iterable[Entry] = (), inbox: Iterable[Signal] = ()) -> InMemoryRun:
        """Have this run, which nobody has leased, in place of what is there under its id. Entries and inbox are by seq."""
        self.remove(row.id)
        run = InMemoryRun(row, entries={entry.seq: entry for entry in entries}, inbox={signal.seq: signal for signal in inbox})
        self.runs[row.id] = run
        if not row.ended:
            self.live.add(row.id)
        return run

    def remove(self, run_id: str) -> None:
        self.runs.pop(run_id, None)
        self.live.discard(run_id)

    def claimable(self) -> list[InMemoryRun]:
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


def _below(taken: int, limit: int | None) -> bool:
    return limit is None or taken < limit


def _resolve(watcher: asyncio.Future[None]) -> None:
    if not watcher.done():
        watcher.set_result(None)
