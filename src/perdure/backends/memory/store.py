"""The memory store: the whole contract in plain Python, and the reference for whoever writes another store.

A `MemoryDatabase` stands for the database, a `MemoryStore` for one process's handle on it, so two handles on one database act
like two processes. Each verb takes the database's one lock, checks, and only then changes something: that makes it atomic and
all-or-nothing. Rows are frozen structs over bytes, and lists are copied on their way in and out, so nothing a caller holds is
shared with the database. Nothing survives the process, and nothing reaches another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import NoReturn

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.base.leases import length_in_microseconds
from perdure.backends.base.new_runs import checked_inbox, checked_journal, checked_start, found_row, new_row, restored_row
from perdure.backends.memory.database import MemoryDatabase, Namespace, Room
from perdure.errors import LeaseHeld, LeaseLost, PersistenceError, RunFinished, StoreCapabilityError
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import (
    Awaited,
    Claim,
    Claims,
    Created,
    EndStatus,
    Item,
    Lease,
    NewRun,
    Pulse,
    QueueLimits,
    RunInfo,
    RunRow,
    Schedule,
    Signal,
    Status,
)
from perdure.snapshots.save_load import SavesSnapshots
from perdure.store import STANDARD_PARTS, Capability, Durability, Transaction

__all__ = ["MemoryDatabase", "MemoryStore"]


class MemoryStore(SavesSnapshots):
    """A `Store` in this process's memory; see `perdure.store.Store` for what each verb promises."""

    def __init__(self, database: MemoryDatabase | None = None, *, prefix: str = "") -> None:
        self._database = MemoryDatabase() if database is None else database
        self._prefix = prefix
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
        with self._locked():
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
        now = _clock(now)
        row, journal, rows = new_row(checked_start(run), now, created_at), checked_journal(entries), checked_inbox(inbox)
        with self._waking() as namespace:
            found = namespace.runs.get(run.id)
            if found is not None:
                found.row = found_row(found.row, run, now)
                return Created(run=found.row, is_new=False)
            stored = namespace.put(row, journal, rows)
            claim = None if ttl is None else stored.give(ttl, now)
            return Created(run=stored.row, is_new=True, claim=claim)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        now = _clock(now)
        journal, rows = checked_journal(entries), checked_inbox(inbox)
        with self._waking() as namespace:
            found = namespace.runs.get(run.id)
            if found is not None:
                _refuse_live(found, now)
            namespace.put(restored_row(run, rows, None if found is None else found.row, now), journal, rows)

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[str],
        queues: Collection[str] | None = None,
        *,
        now: int | None = None,
    ) -> Claims:
        now = _clock(now)
        with self._locked() as namespace:
            fitting = [run for run in namespace.claimable() if _fits(run.row, workflows, queues)]
            later = [run.row.wake_at for run in fitting if run.row.wake_at is not None and run.row.wake_at > now]
            room = Room(namespace, now)
            due = sorted((run for run in fitting if run.due(now)), key=_by_priority)
            claims: list[Claim] = []
            for run in due:
                if len(claims) < limit and room.take(run.row):
                    claims.append(run.give(ttl, now))
            return Claims(claims=claims, next_wake_at=min(later, default=None))

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        now = _clock(now)
        with self._locked() as namespace:
            run = namespace.find(run_id)
            if run.row.ended:
                return None
            if run.row.held:
                raise LeaseHeld(run_id, "an operator; unhold it first")
            _refuse_live(run, now)
            if run.row.lacks_input or (due_only and not run.due(now)):
                return None
            return run.give(ttl, now)

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> list[Pulse | None]:
        now = _clock(now)
        with self._locked() as namespace:
            return [self._renew(namespace, lease, now + length_in_microseconds(ttl), now) for lease in leases]

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        now = _clock(now)
        with self._waking() as namespace:
            run = self._fenced(namespace, lease)
            run.free(status="pending", wake_at=now, attempts=max(0, run.row.attempts - 1), updated_at=now)

    async def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Pulse:
        with self._locked() as namespace:
            run = self._fenced(namespace, lease)
            run.write(lease, entries, consume, items)
            return run.pulse()

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
        now = _clock(now)
        with self._waking() as namespace:
            run = self._fenced(namespace, lease)
            run.write(lease, entries, consume)
            arrived = [signal for signal in run.unconsumed() if signal.address in waiting_for]
            if not arrived:
                run.free(status="suspended", wake_at=wake_at, attempts=0, updated_at=now)
                run.change(waiting_for=tuple(waiting_for))
                if run.row.cancel_requested:
                    run.wake(now)
            return arrived

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
        now = _clock(now)
        with self._waking() as namespace:
            run = self._fenced(namespace, lease)
            run.write(lease, entries, consume)
            run.free(status=status, outcome=outcome, wake_at=None, updated_at=now)
            namespace.live.discard(lease.run_id)
            self._tell_parent(namespace, run, now)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        now = _clock(now)
        with self._waking() as namespace:
            run = namespace.find(run_id)
            if run.row.status == "completed":
                raise RunFinished(run_id, "completed")
            if not run.row.ended:
                raise LeaseHeld(run_id, f"whoever drives it: it is {run.row.status} and has not ended")
            epoch = max(run.row.epoch + 1, now)
            entry = drop_entry(max(run.entries, default=0) + 1, drop, now, epoch)
            run.entries[entry.seq] = entry
            wake_at = None if run.row.lacks_input else now
            run.free(status="pending", wake_at=wake_at, epoch=epoch, attempts=0, updated_at=now)
            run.change(outcome=None, cancel_requested=False, parent_notified=False)
            namespace.live.add(run_id)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        now = _clock(now)
        with self._waking() as namespace:
            first = _already_sent(namespace.find(run_id), name, dedupe)
            if first is not None:
                return first.seq
            return namespace.find_live(run_id).put(name, payload, dedupe=dedupe, now=now)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        now = _clock(now)
        with self._waking() as namespace:
            run = namespace.find_live(run_id)
            run.change(cancel_requested=True)
            if not run.leased(now) and not run.row.lacks_input:
                run.wake(now)

    async def hold(self, run_id: str) -> None:
        with self._locked() as namespace:
            namespace.find(run_id).change(held=True)

    async def unhold(self, run_id: str) -> None:
        with self._waking() as namespace:
            namespace.find(run_id).change(held=False)

    async def report(self, lease: Lease, progress: bytes) -> None:
        with self._locked() as namespace:
            self._fenced(namespace, lease).change(progress=progress)

    async def get(self, run_id: str) -> RunRow | None:
        with self._locked() as namespace:
            run = namespace.runs.get(run_id)
            return None if run is None else run.row

    async def journal(self, run_id: str, *, after: int = 0) -> list[Entry]:
        with self._locked() as namespace:
            run = namespace.runs.get(run_id)
            return [] if run is None else run.journal(after)

    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        with self._locked() as namespace:
            run = namespace.runs.get(run_id)
            return [] if run is None else run.unconsumed(after)

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> list[Item]:
        with self._locked() as namespace:
            run = namespace.runs.get(run_id)
            found = [] if run is None else [item for item in run.items.values() if item.stream == stream and item.n > after]
            return sorted(found, key=lambda item: item.n)[:limit]

    async def list(
        self,
        *,
        prefix: str = "",
        status: Status | None = None,
        workflow: str | None = None,
        before: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> list[RunInfo]:
        with self._locked() as namespace:
            rows = sorted(_selected(namespace, prefix, status, workflow), key=_newest_first)
        if before is not None:
            rows = [row for row in rows if _newest_first(row) > (-before[0], before[1])]
        return [RunInfo.of(row.id, row.workflow, row.status, row.updated_at) for row in rows[:limit]]

    async def count(self, *, prefix: str = "", status: Status | None = None, workflow: str | None = None) -> int:
        with self._locked() as namespace:
            return sum(1 for _ in _selected(namespace, prefix, status, workflow))

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        now = _clock(now)
        with self._locked() as namespace:
            due = sorted((run.row.wake_at, run.row.id) for run in namespace.claimable() if run.due(now))
        return [run_id for _, run_id in due[:limit]]

    async def delete(self, run_id: str) -> None:
        with self._waking() as namespace:
            namespace.remove(run_id)

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        last = _clock(now) - length_in_microseconds(older_than)
        with self._locked() as namespace:
            ended = (run.row for run in namespace.runs.values() if run.row.ended and run.row.updated_at <= last)
            oldest = sorted(ended, key=lambda row: (row.updated_at, row.id))[:limit]
            for row in oldest:
                namespace.remove(row.id)
            return len(oldest)

    async def watch(self, timeout: float) -> None:
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._locked():
            self._database.watchers.add(watcher)
        try:
            await asyncio.wait([watcher], timeout=timeout)
        finally:
            with self._database.lock:
                self._database.watchers.discard(watcher)

    async def put_schedule(self, schedule: Schedule) -> None:
        with self._waking() as namespace:
            namespace.schedules[schedule.id] = schedule

    async def schedules(self) -> Sequence[Schedule]:
        with self._locked() as namespace:
            return [namespace.schedules[schedule_id] for schedule_id in sorted(namespace.schedules)]

    async def drop_schedule(self, schedule_id: str) -> bool:
        with self._locked() as namespace:
            return namespace.schedules.pop(schedule_id, None) is not None

    async def fire(self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun, now: int | None = None) -> bool:
        row = new_row(checked_start(run), _clock(now))
        with self._waking() as namespace:
            schedule = namespace.schedules.get(schedule_id)
            if schedule is None or schedule.next_at != expected_at:
                return False
            namespace.schedules[schedule_id] = msgspec.structs.replace(schedule, next_at=next_at)
            if run.id not in namespace.runs:
                namespace.put(row)
            return True

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        with self._waking() as namespace:
            namespace.limits[queue] = limits

    async def queue_limits(self) -> dict[str, QueueLimits]:
        with self._locked() as namespace:
            return dict(namespace.limits)

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        raise StoreCapabilityError("memory", "transactions")

    @contextmanager
    def _locked(self) -> Iterator[Namespace]:
        with self._database.lock:
            if self._closed:
                raise PersistenceError("the memory store", "this handle is closed; open another one")
            yield self._database.namespaces[self._prefix]

    @contextmanager
    def _waking(self) -> Iterator[Namespace]:
        """As `_locked`, for what may make something due or end it."""
        with self._locked() as namespace:
            yield namespace
        self._database.wake_watchers()

    def _fenced(self, namespace: Namespace, lease: Lease) -> InMemoryRun:
        """The run, if this lease is its current one. An expired lease that nobody took over still is."""
        run = namespace.runs.get(lease.run_id)
        if run is None or run.row.epoch != lease.epoch or run.token != lease.token:
            raise LeaseLost(lease.run_id, lease.epoch)
        return run

    def _renew(self, namespace: Namespace, lease: Lease, until: int, now: int) -> Pulse | None:
        try:
            run = self._fenced(namespace, lease)
        except LeaseLost:
            return None
        run.change(lease_until=until, wake_at=until, updated_at=now)
        return run.pulse()

    def _tell_parent(self, namespace: Namespace, child: InMemoryRun, now: int) -> None:
        row = child.row
        if row.parent_id is None or row.parent_key is None or row.outcome is None:
            return
        parent = namespace.runs.get(row.parent_id)
        if parent is not None and not parent.row.ended:
            parent.put(row.parent_key, row.outcome, "child", now=now)
        child.change(parent_notified=True)


def _clock(now: int | None) -> int:
    return time.time_ns() // 1000 if now is None else now


def _refuse_live(run: InMemoryRun, now: int) -> None:
    if run.leased(now):
        raise LeaseHeld(run.row.id, run.row.lease_owner or "a live worker")


def _already_sent(run: InMemoryRun, name: str, dedupe: str | None) -> Signal | None:
    if dedupe is None:
        return None
    return next((sent for sent in run.inbox.values() if (sent.kind, sent.name, sent.dedupe) == ("signal", name, dedupe)), None)


def _fits(row: RunRow, workflows: Collection[str], queues: Collection[str] | None) -> bool:
    return row.workflow in workflows and (queues is None or row.queue in queues)


def _selected(namespace: Namespace, prefix: str, status: Status | None, workflow: str | None) -> Iterator[RunRow]:
    for run in namespace.runs.values():
        row = run.row
        if row.id.startswith(prefix) and status in (None, row.status) and workflow in (None, row.workflow):
            yield row


def _by_priority(run: InMemoryRun) -> tuple[int, int, str]:
    return (-run.row.priority, run.row.wake_at or 0, run.row.id)


def _newest_first(row: RunRow) -> tuple[int, str]:
    return (-row.updated_at, row.id)
