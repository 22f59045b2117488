"""The memory store: the whole contract in plain Python, and the reference for authors of other stores.

A `MemoryDatabase` stands for the database, a `MemoryStore` for one process's handle on it, so two handles on one database act
like two processes. Each verb takes the database's one lock, checks, and only then changes something: that makes it atomic and
all-or-nothing. What a verb does to one run is in `InMemoryRun`, so the two are read side by side. Rows are frozen structs over
bytes, and lists are copied on their way in and out, so nothing a caller holds is shared with the database. Nothing survives the
process, and nothing reaches another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import NoReturn

import msgspec

from perdure.backends.base.claim_rules import ClaimFilter, SuspectCounter, earliest
from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.base.leases import Release, is_due, length_in_microseconds, refuse_leased, steps_by_lease, store_time
from perdure.backends.base.new_runs import check_inbox, check_journal, check_start, new_row, row_after_create, row_after_restore
from perdure.backends.memory.database import MemoryDatabase, Namespace
from perdure.codec.outcomes import run_info
from perdure.errors import LeaseLost, StoreCapabilityError, StoreClosed
from perdure.model.id_checks import ChecksIds
from perdure.model.ids import check_namespace
from perdure.model.journal import Entry
from perdure.model.records import (
    END_STATUSES,
    Awaited,
    Claim,
    Claims,
    Created,
    EndStatus,
    Item,
    Lease,
    NewInput,
    NewRun,
    Pulse,
    QueueLimits,
    RunInfo,
    RunRow,
    Schedule,
    Signal,
    WorkerRow,
    WorkflowVersion,
    check_positive,
)
from perdure.model.run_filter import EVERY_RUN, RunFilter, page_of
from perdure.snapshots.save_load import SavesSnapshots
from perdure.store import MISSING_PART, STANDARD_PARTS, Capability, Durability, Transaction

__all__ = ["MemoryDatabase", "MemoryStore"]


class MemoryStore(ChecksIds, SavesSnapshots):
    """A `Store` in this process's memory; see `perdure.store.Store` for what each verb promises."""

    def __init__(self, database: MemoryDatabase | None = None, *, prefix: str = "") -> None:
        self._database = MemoryDatabase() if database is None else database
        self._prefix = check_namespace(prefix)
        self._closed = False

    def __repr__(self) -> str:
        return f"MemoryStore(prefix={self._prefix!r})"

    def __reduce__(self) -> NoReturn:
        raise StoreCapabilityError("memory", "way into another process")

    @property
    def key(self) -> tuple[str, ...]:
        return ("memory", self._database.id, self._prefix)

    @property
    def durability(self) -> Durability:
        return "process"

    @property
    def capabilities(self) -> frozenset[Capability]:
        return STANDARD_PARTS

    async def setup(self) -> None:
        with self._lock():
            pass

    async def close(self) -> None:
        self._closed = True
        self._database.wake_watchers()

    def sibling(self) -> MemoryStore:
        return type(self)(self._database, prefix=self._prefix)

    async def create(
        self,
        run: NewRun,
        *,
        ttl: float | None = None,
        entries: Sequence[Entry] = (),
        inbox: Sequence[Signal] = (),
        created_at: int | None = None,
        now: int | None = None,
    ) -> Created:
        now = store_time(now)
        row, journal, rows = new_row(check_start(run), now, created_at), check_journal(entries), check_inbox(inbox)
        with self._lock_and_wake() as namespace:
            found = namespace.runs.get(run.id)
            if found is not None:
                found.row = row_after_create(found.row, run, now)
                return Created(run=found.row, is_new=False)
            stored = namespace.put(row, journal, rows)
            claim = None if ttl is None or run.queue in namespace.limits else stored.grant_lease(ttl, now)
            return Created(run=stored.row, is_new=True, claim=claim)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        now = store_time(now)
        journal, rows = check_journal(entries), check_inbox(inbox)
        with self._lock_and_wake() as namespace:
            found = namespace.runs.get(run.id)
            if found is not None:
                refuse_leased(found.row, now)
            namespace.put(row_after_restore(run, rows, None if found is None else found.row, now), journal, rows)

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[WorkflowVersion],
        queues: Collection[str] | None = None,
        *,
        suspects: int | None = None,
        now: int | None = None,
    ) -> Claims:
        now, wanted = store_time(now), ClaimFilter.of(workflows, queues)
        with self._lock() as namespace:
            matching = [run for run in namespace.claimable() if wanted.matches(run.row)]
            later = [run.row.wake_at for run in matching if run.row.wake_at is not None and run.row.wake_at > now]
            counter, suspect_counter = namespace.queue_counter(now), SuspectCounter(suspects)
            claims: list[Claim] = []
            for run in sorted((run for run in matching if is_due(run.row, now)), key=_by_priority):
                row = run.row
                if len(claims) >= limit or not suspect_counter.take(is_suspect=row.is_suspect):
                    continue
                if counter.take(row.queue, row.limit_key, is_start=not row.has_started):
                    claims.append(run.grant_lease(ttl, now))
                else:
                    suspect_counter.give_back(is_suspect=row.is_suspect)
            namespace.last_starts.update(dict.fromkeys(counter.started, now))
            return Claims(claims=claims, next_wake_at=earliest(*later, counter.next_start_at()), now=now)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        now = store_time(now)
        with self._lock() as namespace:
            run, counter = namespace.find(run_id), namespace.queue_counter(now)
            if not run.can_acquire(now, due_only=due_only):
                return None
            if not counter.take(run.row.queue, run.row.limit_key, is_start=not run.row.has_started):
                return None
            namespace.last_starts.update(dict.fromkeys(counter.started, now))
            return run.grant_lease(ttl, now)

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> list[Pulse | None]:
        now = store_time(now)
        with self._lock() as namespace:
            steps, until = steps_by_lease(leases, running_steps), now + length_in_microseconds(ttl)
            return [self._renew(namespace, lease, until, steps.get(lease), now) for lease in leases]

    async def release(
        self,
        lease: Lease,
        *,
        wake_at: int | None = None,
        problem: str | None = None,
        counts_attempt: bool = False,
        now: int | None = None,
    ) -> None:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            self._find_leased(namespace, lease).release(now, Release(wake_at, problem, counts_attempt))

    async def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Pulse:
        with self._lock() as namespace:
            run = self._find_leased(namespace, lease)
            run.write(lease, entries, consume, items)
            pulse = run.pulse()
        if items:
            self._database.wake_watchers(only_items=True)
        return pulse

    async def suspend(
        self,
        lease: Lease,
        *,
        wake_at: int | None,
        waiting_for: Collection[Awaited] = (),
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> list[Signal]:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            run = self._find_leased(namespace, lease)
            run.write(lease, entries, consume)
            return run.suspend(wake_at, waiting_for, now)

    async def finish(
        self,
        lease: Lease,
        status: EndStatus,
        outcome: bytes,
        *,
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> None:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            run = self._find_leased(namespace, lease)
            run.write(lease, entries, consume)
            run.finish(status, outcome, now)
            namespace.live.discard(lease.run_id)
            self._notify_parent(namespace, run, now)

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            self._find_leased(namespace, lease).continue_as(new, now)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            namespace.find(run_id).reopen(drop, now)
            namespace.live.add(run_id)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            return namespace.find(run_id).send_signal(name, payload, dedupe, now)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            namespace.find(run_id).request_cancel(now)

    async def hold(self, run_id: str) -> None:
        with self._lock() as namespace:
            namespace.find(run_id).change(held=True)

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        now = store_time(now)
        with self._lock_and_wake() as namespace:
            namespace.find(run_id).unhold(now)

    async def report(self, lease: Lease, progress: bytes) -> None:
        with self._lock() as namespace:
            self._find_leased(namespace, lease).change(progress=progress)

    async def get(self, run_id: str) -> RunRow | None:
        with self._lock() as namespace:
            run = namespace.runs.get(run_id)
            return None if run is None else run.row

    async def journal(self, run_id: str, *, after: int = 0) -> list[Entry]:
        with self._lock() as namespace:
            run = namespace.runs.get(run_id)
            return [] if run is None else run.journal(after)

    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        with self._lock() as namespace:
            run = namespace.runs.get(run_id)
            return [] if run is None else run.unconsumed(after)

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> list[Item]:
        with self._lock() as namespace:
            run = namespace.runs.get(run_id)
            return [] if run is None else run.stream(stream, after, limit)

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> list[RunInfo]:
        wanted = wanted.within(prefix)
        check_positive(limit, "limit")
        with self._lock() as namespace:
            found = [run.row for run in namespace.runs.values() if wanted.matches(run.row)]
        return [run_info(row) for row in page_of(found, before, limit)]

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        with self._lock() as namespace:
            return sum(wanted.matches(run.row) for run in namespace.runs.values())

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        now = store_time(now)
        with self._lock() as namespace:
            due = sorted((run.row.wake_at, run.row.id) for run in namespace.claimable() if is_due(run.row, now))
        return [run_id for _, run_id in due[:limit]]

    async def delete(self, run_id: str) -> None:
        with self._lock_and_wake() as namespace:
            namespace.remove(run_id)

    async def purge(
        self,
        older_than: float,
        *,
        status: Collection[EndStatus] = END_STATUSES,
        workflow: str | None = None,
        limit: int = 1000,
        now: int | None = None,
    ) -> int:
        last = store_time(now) - length_in_microseconds(older_than)
        with self._lock() as namespace:
            old = (run.row for run in namespace.runs.values() if run.row.status in status and run.row.updated_at <= last)
            chosen = (row for row in old if workflow in (None, row.workflow) and row.parent_id not in namespace.live)
            oldest = sorted(chosen, key=lambda row: (row.updated_at, row.id))[:limit]
            for row in oldest:
                namespace.remove(row.id)
            return len(oldest)

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        with self._lock() as namespace:
            namespace.workers[worker_id] = WorkerRow(id=worker_id, seen_at=store_time(now), info=info)

    async def workers(self) -> Sequence[WorkerRow]:
        with self._lock() as namespace:
            return [namespace.workers[worker_id] for worker_id in sorted(namespace.workers)]

    async def drop_worker(self, worker_id: str) -> None:
        with self._lock() as namespace:
            namespace.workers.pop(worker_id, None)

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock():
            self._database.watchers[watcher] = items
        try:
            await asyncio.wait([watcher], timeout=timeout)
        finally:
            with self._database.lock:
                self._database.watchers.pop(watcher, None)

    async def put_schedule(self, schedule: Schedule) -> None:
        with self._lock_and_wake() as namespace:
            namespace.schedules[schedule.id] = schedule

    async def schedules(self) -> Sequence[Schedule]:
        with self._lock() as namespace:
            return [namespace.schedules[schedule_id] for schedule_id in sorted(namespace.schedules)]

    async def drop_schedule(self, schedule_id: str) -> bool:
        with self._lock() as namespace:
            return namespace.schedules.pop(schedule_id, None) is not None

    async def fire(
        self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None = None
    ) -> bool:
        row = None if run is None else new_row(check_start(run), store_time(now))
        with self._lock_and_wake() as namespace:
            schedule = namespace.schedules.get(schedule_id)
            if schedule is None or schedule.next_at != expected_at:
                return False
            namespace.schedules[schedule_id] = msgspec.structs.replace(schedule, next_at=next_at)
            if row is not None and row.id not in namespace.runs:
                namespace.put(row)
            return True

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        with self._lock_and_wake() as namespace:
            if limits.is_limited:
                namespace.limits[queue] = limits
            else:
                namespace.limits.pop(queue, None)
                namespace.last_starts.pop(queue, None)

    async def queue_limits(self) -> dict[str, QueueLimits]:
        with self._lock() as namespace:
            return dict(namespace.limits)

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        raise StoreCapabilityError("memory", MISSING_PART["transaction"])

    @contextmanager
    def _lock(self) -> Iterator[Namespace]:
        """The runs under this handle's prefix, for the length of one verb. Raises `StoreClosed` once it is closed."""
        with self._database.lock:
            if self._closed:
                raise StoreClosed("the memory store")
            yield self._database.namespaces[self._prefix]

    @contextmanager
    def _lock_and_wake(self) -> Iterator[Namespace]:
        """As `_lock`, for a verb that may make a run due or end it: afterwards `watch` returns."""
        with self._lock() as namespace:
            yield namespace
        self._database.wake_watchers()

    def _find_leased(self, namespace: Namespace, lease: Lease) -> InMemoryRun:
        """The run, if this lease is its current one. Raises `LeaseLost`."""
        run = namespace.runs.get(lease.run_id)
        if run is None:
            raise LeaseLost(lease.run_id, lease.epoch)
        run.check_fence(lease)
        return run

    def _renew(self, namespace: Namespace, lease: Lease, until: int, running_steps: bytes | None, now: int) -> Pulse | None:
        try:
            return self._find_leased(namespace, lease).renew(until, now, running_steps)
        except LeaseLost:
            return None

    def _notify_parent(self, namespace: Namespace, child: InMemoryRun, now: int) -> None:
        row = child.row
        if row.parent_id is None or row.parent_key is None or row.outcome is None:
            return
        parent = namespace.runs.get(row.parent_id)
        if parent is not None and not parent.row.ended:
            parent.deliver(row.parent_key, row.outcome, "child", now=now)
        child.change(parent_notified=True)


def _by_priority(run: InMemoryRun) -> tuple[int, int, str]:
    return (-run.row.priority, run.row.wake_at or 0, run.row.id)
