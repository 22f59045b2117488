"""KeyValueRunStore: the contract over any key-value store or object store.

Over an object store with conditional writes (S3, Google Cloud Storage, Azure) any number of processes may use it. Over anything
else it serves one process: it cannot be sent to another, nor opened while another process of this machine has it open.

Key-value stores have no clock that a lease could go by, so leases go by the clocks of the processes. A process whose clock is
ahead takes a run over too early; the process it was taken from is then refused, as after any takeover, and nothing is recorded
twice.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.base.leases import Release, lease_microseconds, steps_by_lease, store_time
from perdure.backends.base.new_runs import check_inbox, check_journal, check_start, new_row
from perdure.backends.base.server_store import ServerStore
from perdure.backends.key_value import lookup, verbs
from perdure.backends.key_value.adapters import traits_of
from perdure.backends.key_value.connections import STORE, KeyValueConnections, Services, services_of
from perdure.backends.key_value.editable_run import EditableRun, LeaseGrant
from perdure.backends.key_value.run_document import RunDocument
from perdure.backends.key_value.verbs import PackedRecords, PackedRun
from perdure.errors import LeaseLost, PersistenceError, StoreCapabilityError
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
from perdure.store import MISSING_PART, STANDARD_PARTS, Capability, Durability, Transaction

T = TypeVar("T")

# After how many seconds `watch` reads again whether another process has written the wake key.
_POLL_EVERY: Final = 0.8


class KeyValueRunStore(ServerStore[KeyValueConnections]):
    """Runs over a `KeyValueStore`, a store of py-key-value, or an object store of obstore, which stays the caller's."""

    def __init__(self, kv: Any, *, prefix: str = "") -> None:
        by_loop = services_of(kv, traits_of(kv), check_namespace(prefix))
        super().__init__(KeyValueConnections(by_loop), prefix=prefix, auto_migrate=True)

    def _on_attach(self) -> None:
        self._by_loop = self._connections.by_loop
        self._traits = self._by_loop.traits
        self._by_loop.add_store(self._lifecycle)

    def __repr__(self) -> str:
        return f"KeyValueRunStore({type(self._by_loop.kv).__name__}, prefix={self._namespace!r})"

    def __reduce__(self) -> NoReturn:
        if self._traits.is_shared:
            raise TypeError("a KeyValueRunStore cannot be pickled: make one over the same bucket in the other process")
        raise StoreCapabilityError(STORE, "way into another process over a store without compare-and-swap")

    def _reopen_in_child(self) -> NoReturn:
        """In a forked child: the documents in memory are the parent's, and so are the connections."""
        if self._traits.is_shared:
            raise PersistenceError(self._connections.label, "it cannot be used in a forked process; make another store there")
        raise StoreCapabilityError(STORE, "way into a forked process over a store without compare-and-swap")

    @property
    def key(self) -> tuple[str, ...]:
        """Which store it is, and the prefix."""
        return (STORE, *self._traits.identity, self._namespace)

    @property
    def durability(self) -> Durability:
        """What the key-value store is known to survive, or its own attribute `durability` says."""
        return self._traits.durability

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Shared where there is compare-and-swap between processes, durable where something is known to survive."""
        shared: set[Capability] = {"shared"} if self._traits.is_shared else set()
        durable: set[Capability] = {"durable"} if self.durability != "process" else set()
        return STANDARD_PARTS | shared | durable

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
        length = None if ttl is None else lease_microseconds(ttl)
        at = store_time(now)
        packed = PackedRun.of(new_row(check_start(run), at, created_at), check_journal(entries), check_inbox(inbox))
        verb = partial(verbs.create, new=run, packed=packed, owner=self._owner, now=at)

        async def create(services: Services) -> Created:
            waits = length is None or await services.claimer.is_limited(run.queue)
            is_new, created = await services.writer.change(run.id, partial(verb, length=None if waits else length))
            if isinstance(created, LeaseGrant):
                claim = await services.namespace.load_claim(created)
                return Created(run=claim.run, is_new=True, claim=claim)
            row = await services.namespace.read_row(run.id)
            return Created(run=created if row is None else row, is_new=is_new)

        return await self._do(create, wakes=True)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        journal, rows = check_journal(entries), check_inbox(inbox)
        await self._change(run.id, partial(verbs.restore, row=run, entries=journal, inbox=rows, now=store_time(now)), wakes=True)

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
        """Lease due runs, which are found by their due keys. When nothing is due this writes nothing."""
        wanted, length = ClaimFilter.of(workflows, queues), lease_microseconds(ttl)
        request = ClaimRequest(wanted, limit, length, self._owner, now, suspects)
        return await self._do(lambda services: services.claimer.claim(request))

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, if its queue has room."""
        length, at = lease_microseconds(ttl), store_time(now)
        return await self._do(lambda services: services.claimer.acquire(run_id, length, self._owner, at, due_only=due_only))

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> builtins.list[Pulse | None]:
        """Prolong leases, each in the document of its run."""
        length, copied, steps = lease_microseconds(ttl), list(leases), steps_by_lease(leases, running_steps)

        async def renew_all() -> builtins.list[Pulse | None]:
            writer, at = self._connections.services.writer, store_time(now)
            renew = partial(verbs.renew, length=length, now=at)
            calls = [writer.change(lease.run_id, partial(renew, lease=lease, running_steps=steps.get(lease))) for lease in copied]
            with self._connections.map_errors():
                return list(await asyncio.gather(*calls))

        return await self._submit_renewal(ttl, renew_all)

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
        verb = partial(verbs.release, lease=lease, release=Release(wake_at, problem, counts_attempt), now=store_time(now))
        await self._change(lease.run_id, verb, wakes=True)

    async def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Pulse:
        """Append to the journal: one conditional write, or a share of one."""
        records = PackedRecords.of(lease, entries, consume, items)
        return await self._change(lease.run_id, partial(verbs.record, lease=lease, records=records), wakes=bool(items))

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
            records=PackedRecords.of(lease, entries, consume),
            now=store_time(now),
        )

        async def suspend(services: Services) -> builtins.list[Signal]:
            arrived = await services.writer.change(lease.run_id, verb)
            return await self._load_arrived(services, lease, arrived) if arrived else []

        return await self._do(suspend, wakes=True)

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
        """Record and end the run, then notify its parent; after a crash in between the next `claim` does that."""
        records = PackedRecords.of(lease, entries, consume)
        verb = partial(verbs.finish, lease=lease, status=status, outcome=outcome, records=records, now=store_time(now))

        async def finish(services: Services) -> None:
            if await services.writer.change(lease.run_id, verb):
                await services.writer.notify_parent(lease.run_id)

        await self._do(finish, wakes=True)

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        """Let the run start over; its old journal is deleted after that."""
        verb = partial(verbs.continue_as, lease=lease, new=new, now=store_time(now))
        await self._change(lease.run_id, verb, wakes=True)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        await self._change(run_id, partial(verbs.reopen, drop=tuple(drop), now=store_time(now)), wakes=True)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox, which is in its document: the signal waits there, or wakes the run."""
        sent = Signal(seq=0, name=name, payload=payload, dedupe=dedupe)
        return await self._change(run_id, partial(verbs.signal, sent=sent, now=store_time(now)), wakes=True)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._change(run_id, partial(verbs.cancel, now=store_time(now)), wakes=True)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._change(run_id, verbs.hold)

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        """Undo `hold`."""
        await self._change(run_id, partial(verbs.unhold, now=store_time(now)), wakes=True)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._change(lease.run_id, partial(verbs.report, lease=lease, progress=progress))

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._do(lambda services: services.namespace.read_row(run_id))

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""

        async def journal(services: Services) -> builtins.list[Entry]:
            namespace = services.namespace
            return await namespace.read(run_id, lambda document, _: namespace.load_entries(run_id, document, after)) or []

        return await self._do(journal)

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""

        async def inbox(services: Services) -> builtins.list[Signal]:
            async def load(document: RunDocument, _: RunRow) -> builtins.list[Signal]:
                rows = [inbox_row.row for inbox_row in document.inbox if inbox_row.row.seq > after]
                return await services.namespace.load_payloads(run_id, document.incarnation, rows)

            return await services.namespace.read(run_id, load) or []

        return await self._do(inbox)

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""

        async def items(services: Services) -> builtins.list[Item]:
            async def load(document: RunDocument, _: RunRow) -> builtins.list[Item]:
                return await services.namespace.load_items(run_id, document, stream, after, limit)

            return await services.namespace.read(run_id, load) or []

        return await self._do(items)

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> builtins.list[RunInfo]:
        """Runs, last changed first. All due keys are listed, and only the documents of the runs that are returned are read."""
        wanted = wanted.within(prefix)
        check_positive(limit, "limit")
        return await self._do(lambda services: lookup.list_runs(services.claimer.lookup, wanted, before, limit))

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        """How many runs there are, by their due keys: one whose creation a crash cut short counts until a worker finds it."""
        return await self._do(lambda services: lookup.count_runs(services.claimer.lookup, wanted))

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._do(lambda services: services.claimer.list_due(store_time(now), limit))

    async def delete(self, run_id: str) -> None:
        """Remove the run and all its keys. Where several processes write, an empty document stays."""
        await self._change(run_id, verbs.delete, wakes=True)

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
        at = store_time(now)
        return await self._do(
            lambda services: lookup.purge(services.claimer.lookup, services.writer, older_than, status, workflow, limit, at)
        )

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        self._reopen_if_forked()
        watcher = self._lifecycle.watch(items=items)
        ends_at = time.monotonic() + timeout
        try:
            while (left := ends_at - time.monotonic()) > 0:
                await asyncio.wait([watcher.future], timeout=left if self._by_loop.is_alone else min(left, _POLL_EVERY))
                if watcher.future.done() or self._lifecycle.is_closed or self._by_loop.is_alone:
                    return
                await self._do(Services.poll_wake)
        finally:
            self._lifecycle.unwatch(watcher)

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        """Insert or replace the worker, seen now."""
        worker = WorkerRow(id=worker_id, seen_at=store_time(now), info=info)
        await self._do(lambda services: services.schedules.put_worker(worker))

    async def workers(self) -> Sequence[WorkerRow]:
        """All workers, by id."""
        return await self._do(lambda services: services.schedules.list_workers())

    async def drop_worker(self, worker_id: str) -> None:
        """Remove the worker."""
        await self._do(lambda services: services.schedules.drop_worker(worker_id))

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._do(lambda services: services.schedules.put_schedule(schedule), wakes=True)

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        settings = await self._do(lambda services: services.schedules.read())
        return [settings.schedules[schedule_id] for schedule_id in sorted(settings.schedules)]

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._do(lambda services: services.schedules.drop_schedule(schedule_id))

    async def fire(
        self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None = None
    ) -> bool:
        """Move the schedule on and create its run, once."""
        row = None if run is None else new_row(check_start(run), store_time(now))
        return await self._do(lambda services: services.schedules.fire(schedule_id, expected_at, next_at, row), wakes=True)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Replace the limits of a queue."""
        await self._do(lambda services: services.schedules.limit_queue(queue, limits), wakes=True)

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return (await self._do(lambda services: services.schedules.read())).limits

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        """Refused: key-value stores have no transactions that a step's own writes could be part of."""
        raise StoreCapabilityError(STORE, MISSING_PART["transaction"])

    async def _load_arrived(self, services: Services, lease: Lease, arrived: builtins.list[Signal]) -> builtins.list[Signal]:
        """The signals with their payloads. Raises `LeaseLost` when the run was deleted meanwhile."""

        async def load(document: RunDocument, _: RunRow) -> builtins.list[Signal]:
            return await services.namespace.load_payloads(lease.run_id, document.incarnation, arrived)

        loaded = await services.namespace.read(lease.run_id, load)
        if loaded is None:
            raise LeaseLost(lease.run_id, lease.epoch)
        return loaded

    async def _change(self, run_id: str, verb: Callable[[EditableRun], T], *, wakes: bool = False) -> T:
        return await self._do(lambda services: services.writer.change(run_id, verb), wakes=wakes)

    async def _do(self, work: Callable[[Services], Awaitable[T]], *, wakes: bool = False) -> T:
        """What the work returns, done on the connections' loop."""

        async def do() -> T:
            services = self._connections.services
            with self._connections.map_errors():
                result = await work(services)
            if wakes:
                services.wake()
            return result

        return await self._submit(do)
