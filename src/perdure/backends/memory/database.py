"""What the handles of a memory store share: runs, schedules and queue limits by namespace, under one lock.

The caller holds the lock, except where a method says that it takes it. `perdure.backends.base.in_memory_run` has what happens to
one run, `perdure.backends.memory.store` the verbs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from perdure.aio.fork_locks import new_fork_lock
from perdure.backends.base.claim_rules import QueueCounter
from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.base.leases import is_leased
from perdure.errors import RunNotFound
from perdure.model.journal import Entry
from perdure.model.records import QueueLimits, RunRow, Schedule, Signal, WorkerRow


@dataclass(slots=True)
class Namespace:
    """The runs, schedules, queue limits and workers under one prefix.

    `live` are the ids of the runs that have not ended, `last_starts` when a run last started in each queue that has a rate.
    """

    runs: dict[str, InMemoryRun] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    limits: dict[str, QueueLimits] = field(default_factory=dict)
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    last_starts: dict[str, int] = field(default_factory=dict)

    def find(self, run_id: str) -> InMemoryRun:
        """The run. Raises `RunNotFound`."""
        if run_id not in self.runs:
            raise RunNotFound(run_id)
        return self.runs[run_id]

    def put(self, row: RunRow, entries: Iterable[Entry] = (), inbox: Iterable[Signal] = ()) -> InMemoryRun:
        """Put this run, without a lease, in place of what is there under its id. Entries and inbox are in order."""
        self.remove(row.id)
        run = InMemoryRun(row, entries={entry.seq: entry for entry in entries}, inbox={signal.seq: signal for signal in inbox})
        self.runs[row.id] = run
        if not row.ended:
            self.live.add(row.id)
        return run

    def remove(self, run_id: str) -> None:
        """Remove the run, if there is one."""
        self.runs.pop(run_id, None)
        self.live.discard(run_id)

    def claimable(self) -> list[InMemoryRun]:
        """Runs that are due or that time alone will make due."""
        return [run for run in map(self.runs.__getitem__, self.live) if not run.row.held and run.row.wake_at is not None]

    def queue_counter(self, now: int) -> QueueCounter:
        """How many more runs the queue limits let in."""
        rows = (self.runs[run_id].row for run_id in self.live) if self.limits else ()
        leased = ((row.queue, row.limit_key, 1) for row in rows if is_leased(row, now))
        return QueueCounter(self.limits, leased, last_starts=self.last_starts, now=now)


class MemoryDatabase:
    """What several `MemoryStore` handles share."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.lock = new_fork_lock()  # guards everything below; nothing waits and no callback runs while it is held
        self.namespaces: defaultdict[str, Namespace] = defaultdict(Namespace)
        # Each with whether new items of a stream wake it too.
        self.watchers: dict[asyncio.Future[None], bool] = {}

    def wake_watchers(self, *, only_items: bool = False) -> None:
        """Resolve the futures of all watchers, or of those that want to know of new items.

        Takes the lock, and releases it before it wakes anything.
        """
        with self.lock:
            watchers = [watcher for watcher, wants_items in self.watchers.items() if wants_items or not only_items]
            for watcher in watchers:
                del self.watchers[watcher]
        for watcher in watchers:
            with suppress(RuntimeError):  # its event loop was closed, so nothing waits there any more
                watcher.get_loop().call_soon_threadsafe(_resolve, watcher)


def _resolve(watcher: asyncio.Future[None]) -> None:
    if not watcher.done():
        watcher.set_result(None)
