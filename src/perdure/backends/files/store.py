"""FilesStore: the contract on plain files, for all processes of one machine, with nothing but the standard library.

Every verb runs in a thread; the store itself belongs to no event loop. Arguments are copied first, since the thread may read them
much later. The layout of the files is in `namespace`, `frames` and `index`.

Costs: a recorded step is one frame and one sync. `create` is three syncs (the log, its directory and the one above), every other
change of one run one; a child that ends and notifies its parent is three. `claim`, `due`, `list` and `count` read what was added
to the index since the last call and go through its summaries in memory; `claim` and `due` through runs that have not ended,
`list` and `count` through all of them. The first call after a reboot reads every log once.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.base.leases import Release, lease_microseconds, steps_by_lease, store_time
from perdure.backends.base.lifecycle import Lifecycle, Watcher
from perdure.backends.base.new_runs import check_inbox, check_journal, check_start
from perdure.backends.base.process_owner import Owners
from perdure.backends.files import claims, listing, queues, schedules, verbs
from perdure.backends.files.locks import check_locks
from perdure.backends.files.namespace import LockedRun
from perdure.backends.files.run_state import RunState
from perdure.backends.files.threads import RunChange, join_namespace, leave_namespace
from perdure.errors import StoreCapabilityError
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
from perdure.model.run_filter import EVERY_RUN, RunFilter
from perdure.snapshots.save_load import SavesSnapshots
from perdure.store import STANDARD_PARTS, Capability, Durability, Transaction

T = TypeVar("T")

_POLL_EVERY: Final = 0.05


class FilesStore(ChecksIds, SavesSnapshots):
    """A store in a directory of a local disk. `prefix` keeps runs of several users of the same directory apart."""

    def __init__(self, directory: str | Path, *, prefix: str = "") -> None:
        check_locks()
        self._open(_check_path(directory), check_namespace(prefix))

    def _open(self, root: str, prefix: str) -> None:
        self._lifecycle = Lifecycle(f"files store {root!r}")
        self._shared = join_namespace(root, prefix, self._lifecycle)
        self._files = self._shared.namespace
        self._owners = Owners()

    def __repr__(self) -> str:
        return f"FilesStore({self._files.root!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a FilesStore cannot be pickled: send its directory, and open a store on it in the other process")

    @property
    def key(self) -> tuple[str, ...]:
        """The real path and the prefix."""
        return ("files", self._files.root, self._files.prefix)

    @property
    def durability(self) -> Durability:
        """Every acknowledged write was synced."""
        return "disk"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Everything but transactions."""
        return STANDARD_PARTS | {"shared", "durable"}

    async def setup(self) -> None:
        """Create the directories."""
        await self._do(lambda: None)

    async def close(self) -> None:
        """Wait for what is under way, and end the threads if no other store of this process uses them."""
        empty = self._lifecycle.close()
        if empty is None:
            return
        await asyncio.shield(asyncio.wrap_future(empty))
        if leave_namespace(self._shared, self._lifecycle) and (ended := self._shared.threads.stop()) is not None:
            await asyncio.shield(asyncio.wrap_future(ended))

    def sibling(self) -> FilesStore:
        """Another handle on the same threads. Like this one it depends on no event loop."""
        sibling = object.__new__(type(self))
        sibling._open(self._files.root, self._files.prefix)
        return sibling

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
        """Create the run with its first entries and signals, or find it; `ttl` leases a new one whose queue has no limits."""
        verb = partial(
            verbs.create,
            new=check_start(run),
            entries=check_journal(entries),
            inbox=check_inbox(inbox),
            owners=self._owners,
            created_at=created_at,
            now=now,
        )
        if ttl is None:
            return await self._change(run.id, partial(verb, ttl=None), create=True, wakes=True)
        lease_microseconds(ttl)
        return await self._do(partial(queues.create_leased, self._files, run, verb, ttl), wakes=True)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there. A lease whose process has died does not count."""
        journal, rows = check_journal(entries), check_inbox(inbox)
        verb = partial(verbs.restore, row=run, entries=journal, inbox=rows, owners=self._owners, now=now)
        await self._change(run.id, verb, create=True, wakes=True)

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
        """Lease due runs. When nothing is due this writes nothing and takes no lock."""
        request = ClaimRequest(ClaimFilter.of(workflows, queues), limit, lease_microseconds(ttl), "", now, suspects)
        return await self._do(partial(claims.claim, self._files, request, ttl, self._owners))

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, if its queue has room."""
        lease_microseconds(ttl)
        return await self._do(partial(queues.acquire, self._files, run_id, ttl, self._owners, now, due_only=due_only))

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> builtins.list[Pulse | None]:
        """Prolong leases, each in the log of its run."""
        lease_microseconds(ttl)
        if not leases:
            await self._do(lambda: None)
            return []
        steps = steps_by_lease(leases, running_steps)
        renewals = [
            partial(verbs.renew, lease=lease, ttl=ttl, running_steps=steps.get(lease), owners=self._owners, now=now)
            for lease in leases
        ]
        futures = [
            self._submit(lease.run_id, RunChange(verb, create=False, wakes=False))
            for lease, verb in zip(leases, renewals, strict=True)
        ]
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    async def release(
        self,
        lease: Lease,
        *,
        wake_at: int | None = None,
        problem: str | None = None,
        counts_attempt: bool = False,
        now: int | None = None,
    ) -> None:
        """Give the run back, due at once or later."""
        release = Release(wake_at, problem, counts_attempt)
        await self._change(lease.run_id, partial(verbs.release, lease=lease, release=release, now=now), wakes=True)

    async def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Pulse:
        """Append to the journal: one frame and one sync, or a share of them."""
        verb = partial(verbs.record, lease=lease, entries=tuple(entries), consume=tuple(consume), items=tuple(items))
        return await self._change(lease.run_id, verb, wakes=bool(items))

    async def suspend(
        self,
        lease: Lease,
        *,
        wake_at: int | None,
        waiting_for: Collection[Awaited] = (),
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> builtins.list[Signal]:
        """Record and give up the lease, unless an awaited signal is there."""
        verb = partial(
            verbs.suspend,
            lease=lease,
            wake_at=wake_at,
            waiting_for=tuple(waiting_for),
            entries=tuple(entries),
            consume=tuple(consume),
            now=now,
        )
        return await self._change(lease.run_id, verb, wakes=True)

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
        """Record, end the run and notify its parent."""
        at = store_time(now)
        verb = partial(
            verbs.finish, lease=lease, status=status, outcome=outcome, entries=tuple(entries), consume=tuple(consume), now=at
        )
        await self._do(partial(self._files.change_and_notify, lease.run_id, verb, at), wakes=True)

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        """Let the run start over, in a new log."""
        await self._change(lease.run_id, partial(verbs.continue_as, lease=lease, new=new, now=now), wakes=True)

    async def reopen(self, run_id: str, drop: Collection[str], *, new_generation: bool = False, now: int | None = None) -> None:
        """Make an ended run pending again."""
        await self._change(run_id, partial(verbs.reopen, drop=tuple(drop), new_generation=new_generation, now=now), wakes=True)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        return await self._change(run_id, partial(verbs.signal, name=name, payload=payload, dedupe=dedupe, now=now), wakes=True)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._change(run_id, partial(verbs.cancel, now=now), wakes=True)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._change(run_id, verbs.hold)

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        """Undo `hold`."""
        await self._change(run_id, partial(verbs.unhold, now=now), wakes=True)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._change(lease.run_id, partial(verbs.report, lease=lease, progress=progress))

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._read(run_id, lambda state: state.row)

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        return await self._read(run_id, lambda state: state.journal(after)) or []

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return await self._read(run_id, lambda state: state.unconsumed(after)) or []

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""
        return await self._read(run_id, lambda state: state.stream(stream, after, limit)) or []

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> builtins.list[RunInfo]:
        """Runs, last changed first."""
        wanted = wanted.within(prefix)
        check_positive(limit, "limit")
        return await self._do(partial(listing.list_runs, self._files, wanted, before, limit))

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        """How many runs there are."""
        return await self._do(partial(listing.count_runs, self._files, wanted))

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._do(partial(listing.list_due, self._files, limit, self._owners, now))

    async def delete(self, run_id: str) -> None:
        """Remove the run and all its files."""
        await self._do(partial(self._files.remove, [run_id]), wakes=True)

    async def purge(
        self,
        older_than: float,
        *,
        status: Collection[EndStatus] = END_STATUSES,
        workflow: str | None = None,
        limit: int = 1000,
        now: int | None = None,
    ) -> int:
        """Delete ended runs, oldest first."""
        return await self._do(partial(listing.purge, self._files, older_than, status, workflow, limit, now))

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        watcher, woken_at = self._lifecycle.watch(items=items), self._files.woken_at
        ends_at = time.monotonic() + timeout
        try:
            await self.setup()
            while not await _wait_for(watcher, ends_at):
                if self._lifecycle.is_closed:
                    return
                last = await self._do(self._files.last_wake)
                if last != woken_at:
                    self._files.woken_at = last
                    return
        finally:
            self._lifecycle.unwatch(watcher)

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        """Insert or replace the worker, seen now."""
        await self._do(partial(schedules.put_worker, self._files, worker_id, info, now))

    async def workers(self) -> Sequence[WorkerRow]:
        """All workers, by id."""
        return await self._do(partial(schedules.list_workers, self._files))

    async def drop_worker(self, worker_id: str) -> None:
        """Remove the worker."""
        await self._do(partial(schedules.drop_worker, self._files, worker_id))

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._do(partial(schedules.put_schedule, self._files, schedule), wakes=True)

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        return await self._do(partial(schedules.list_schedules, self._files))

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._do(partial(schedules.drop_schedule, self._files, schedule_id))

    async def fire(
        self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None = None
    ) -> bool:
        """Move the schedule on and create its run, once."""
        return await self._do(
            partial(
                schedules.fire, self._files, schedule_id, expected_at, next_at, None if run is None else check_start(run), now
            ),
            wakes=True,
        )

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Replace the limits of a queue."""
        await self._do(partial(queues.limit_queue, self._files, queue, limits), wakes=True)

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return await self._do(partial(queues.queue_limits, self._files))

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        """Refused: files have no transactions that a step's own writes could be part of."""
        raise StoreCapabilityError("files", "transactions")

    async def _change(self, run_id: str, verb: Callable[[LockedRun], T], *, create: bool = False, wakes: bool = False) -> T:
        return await asyncio.wrap_future(self._submit(run_id, RunChange(verb, create=create, wakes=wakes)))

    def _submit(self, run_id: str, change: RunChange[T]) -> Future[T]:
        self._lifecycle.enter()
        change.future.add_done_callback(self._lifecycle.leave)
        return self._shared.threads.change(run_id, change)

    async def _read(self, run_id: str, look: Callable[[RunState], T]) -> T | None:
        return await self._do(partial(self._files.read, run_id, look))

    async def _do(self, work: Callable[[], T], *, wakes: bool = False) -> T:
        self._lifecycle.enter()
        try:
            future = self._shared.threads.submit(work, wakes=wakes)
        except BaseException:
            self._lifecycle.leave()
            raise
        future.add_done_callback(self._lifecycle.leave)
        return await asyncio.wrap_future(future)


async def _wait_for(watcher: Watcher, ends_at: float) -> bool:
    """Wait for the watcher until the next poll; whether it was woken, or its time is up."""
    left = ends_at - time.monotonic()
    if left > 0:
        await asyncio.wait([watcher.future], timeout=min(left, _POLL_EVERY))
    return watcher.future.done() or left <= _POLL_EVERY


def _check_path(directory: str | Path) -> str:
    text = os.fspath(directory)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"directory {directory!r} must name a directory; for a store without one use stores.memory()")
    return os.path.realpath(text)
