"""A `Store` over a user's own `WorkflowStore`: runs are driven in memory, saved whole, and found again by `due`.

It is a `StateStore` that also claims. The user's store cannot refuse a write by a worker that lost its lease: it is unfenced. If
it has `acquire` and `release`, a run is leased from it before it is read, and changed only under that lease; a worker whose lease
has expired by its own clock saves nothing more. Without them only one process may use the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NoReturn

import msgspec

from perdure.backends.base.claim_rules import ClaimFilter, SuspectCounter
from perdure.backends.base.leases import is_leased, store_time
from perdure.backends.memory.store import MemoryStore
from perdure.backends.user_defined.state_store import StateStore, call_user_method, shared_store
from perdure.backends.user_defined.workflow_leases import UserStoreLeases
from perdure.errors import LeaseHeld, LeaseLost, PerdureError, PersistenceError, RunNotFound, StoreCapabilityError
from perdure.model.durations import moment
from perdure.model.journal import Entry
from perdure.model.records import Claim, Claims, Created, Lease, NewRun, Pulse, RunRow, Signal, WorkflowVersion
from perdure.simple_stores import StoredRun, WorkflowStore, stored_run
from perdure.snapshots.snapshot import Snapshot
from perdure.store import MISSING_PART

_logger: Final = logging.getLogger("perdure")
# How often, and after what pauses in seconds, is looked for a run that another process is about to save.
_LOOKS_FOR_CREATED: Final = 50
_PAUSE_FOR_CREATED: Final = 0.02

# For how long a run is leased to be signalled, cancelled or reopened, until a worker here asks for another ttl.
CHANGE_TTL: Final = 10.0
# Seconds after which a watch ends: its caller asks the user's store what is due.
POLL_EVERY: Final = 1.0


class WorkflowStateStore(StateStore):
    """A `Store` over a user's own store, unfenced."""

    def __init__(self, user_store: WorkflowStore) -> None:
        super().__init__(user_store)
        self._user_store = user_store
        self._leases = UserStoreLeases(user_store)
        # The ttl for changes from outside: the last that a worker here asked for.
        self._change_ttl = CHANGE_TTL
        # Why due runs could not be claimed, by run, so that each reason is logged once.
        self._passed_over: dict[str, str] = {}

    def __repr__(self) -> str:
        reach = "leases by its acquire" if self._leases.are_needed else "one process only"
        return f"WorkflowStateStore({self._user_store!r}, unfenced, {reach})"

    def sibling(self) -> MemoryStore:
        return self if self._leases.are_needed else super().sibling()

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """As the contract says; it ends soon, since nothing reports what other processes change in the user's store."""
        await super().watch(min(timeout, POLL_EVERY), items=items)

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
        async def create(ttl: float | None) -> Created:
            return await MemoryStore.create(self, run, ttl=ttl, entries=entries, inbox=inbox, created_at=created_at, now=now)

        async with self._lock_and_refresh(run.id):
            if self._has_input(run.id):
                return await create(None)
            async with self._lease_run(run.id, ttl) as is_ours:
                if self._leases.are_needed:  # another process may have created it meanwhile
                    await self._refresh(run.id)
                    if self._has_input(run.id):
                        return await create(None)
                if not is_ours:
                    self._refuse_foreign(run.id)
                    # Some stores keep the lease in the run, and give none before the run is saved. In others another process is
                    # about to save it, and a new row that came later would replace what it has recorded.
                    if await self._leases.precede_runs():
                        await self._wait_for_creator(run.id)
                        return await create(None)
                created = await create(ttl if is_ours else None)
                await self._save_or_forget(run.id)
            return created if is_ours or ttl is None else await self._lease_created(created, ttl, now)

    async def _wait_for_creator(self, run_id: str) -> None:
        """Return when another process has saved the run that it is creating. Raises `LeaseHeld` if that takes long."""
        for _ in range(_LOOKS_FOR_CREATED):
            await asyncio.sleep(_PAUSE_FOR_CREATED)
            await self._refresh(run_id)
            if self._has_input(run_id):
                return
        raise LeaseHeld(run_id, "another process that is creating it; try again")

    def _has_input(self, run_id: str) -> bool:
        row = self._row(run_id)
        return row is not None and not row.lacks_input

    async def _lease_created(self, created: Created, ttl: float, now: int | None) -> Created:
        async with self._lease_run(created.run.id, ttl) as is_ours:
            claim = await self._grant_lease(created.run.id, ttl, due_only=False, now=now) if is_ours else None
            return msgspec.structs.replace(created, claim=claim)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        async with self._lock_run(run_id), self._lease_run(run_id, ttl) as is_ours:
            await self._refresh(run_id)
            if not is_ours:
                self._refuse_foreign(run_id)
            return await self._grant_lease(run_id, ttl, due_only=due_only, now=now)

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
        """As the contract says, but in the order of the user's `due`, and queue limits count only the leases of this process."""
        now, wanted, suspect_counter = store_time(now), ClaimFilter.of(workflows, queues), SuspectCounter(suspects)
        claims: list[Claim] = []
        try:
            async with aclosing(self._candidates(now, limit, wanted)) as candidates:
                async for run_id in candidates:
                    if len(claims) >= limit:
                        break
                    claims += await self._claim_one(run_id, ttl, now, wanted, suspect_counter)
        except PersistenceError:
            if not claims:  # runs that are leased must reach their worker; the next call raises the error again
                raise
        return Claims(claims=claims, next_wake_at=self._next_wake_at(now, wanted), now=now)

    async def _candidates(self, now: int, limit: int, wanted: ClaimFilter) -> AsyncGenerator[str, None]:
        """Ids from the user's `due`: `limit` of them, then twice as many, so that runs which cannot be claimed hide no others."""
        tried: set[str] = set()
        names = {workflow for workflow, _ in wanted.workflows}
        asking = limit
        while True:
            due = await self._due(now, asking)
            fresh = [one for one in due if _id_of(one) not in tried]
            for one in fresh:
                tried.add(_id_of(one))
                if not isinstance(one, StoredRun) or one.workflow in names:
                    yield _id_of(one)
            if not fresh or len(due) < asking:
                return
            asking *= 2

    async def _claim_one(self, run_id: str, ttl: float, now: int, wanted: ClaimFilter, suspects: SuspectCounter) -> list[Claim]:
        """The claim on this run, if it can be leased. A run that cannot be read is left as it is, and the reason logged once."""
        if self._is_driven_now(run_id, now):
            return []
        try:
            async with self._lock_run(run_id), self._lease_run(run_id, ttl) as is_ours:
                await self._refresh(run_id)
                is_free = is_ours and self._fits(run_id, wanted, now, suspects)
                claim = await self._grant_lease(run_id, ttl, due_only=True, now=now) if is_free else None
        except (LeaseHeld, RunNotFound):
            return []
        except PerdureError as reason:
            if self._passed_over.get(run_id) != str(reason):
                self._passed_over[run_id] = str(reason)
                _logger.error("run %r is due but passed over: %s", run_id, reason)  # noqa: TRY400 - the reason says it all
            return []
        self._passed_over.pop(run_id, None)
        return [] if claim is None else [claim]

    def _is_driven_now(self, run_id: str, now: int) -> bool:
        """Whether a worker of this process drives the run, with a lease that is still ours."""
        with self._lock() as namespace:
            known = namespace.runs.get(run_id)
            return known is not None and is_leased(known.row, now) and self._leases.is_ours(run_id)

    def _fits(self, run_id: str, wanted: ClaimFilter, now: int, suspects: SuspectCounter) -> bool:
        with self._lock() as namespace:
            run = namespace.runs.get(run_id)
            return (
                run is not None
                and wanted.matches(run.row)
                and namespace.queue_counter(now).has_room(run.row.queue, run.row.limit_key)
                and suspects.take(is_suspect=run.row.is_suspect)
            )

    def _next_wake_at(self, now: int, wanted: ClaimFilter) -> int | None:
        """The earliest instant among the runs in memory. Those that are only saved are found by the next `due`."""
        with self._lock() as namespace:
            known = [run.row for run in namespace.claimable() if wanted.matches(run.row)]
        return min((row.wake_at for row in known if row.wake_at is not None and row.wake_at > now), default=None)

    async def _grant_lease(self, run_id: str, ttl: float, *, due_only: bool, now: int | None) -> Claim | None:
        """Lease the run, and save that, so that the attempt counts even if this process dies during it."""
        claim = await MemoryStore.acquire(self, run_id, ttl, due_only=due_only, now=now)
        if claim is not None:
            await self._save_or_forget(run_id)
        return claim

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> list[Pulse | None]:
        are_ours = await asyncio.gather(*(self._leases.renew(lease.run_id, ttl) for lease in leases))
        pulses = await super().renew(leases, ttl, running_steps=running_steps, now=now)
        return [pulse if is_ours else None for pulse, is_ours in zip(pulses, are_ours, strict=True)]

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        return [_id_of(one) for one in await self._due(store_time(now), limit)]

    async def delete(self, run_id: str) -> None:
        await super().delete(run_id)
        await self._leases.release(run_id)

    async def list(self, *_given: Any, **_options: Any) -> NoReturn:
        self._refuse("list of runs")

    async def count(self, *_given: Any) -> NoReturn:
        self._refuse("list of runs")

    async def purge(self, *_given: Any, **_options: Any) -> NoReturn:
        self._refuse("list of runs, so that nothing can be purged")

    async def put_schedule(self, *_given: Any) -> NoReturn:
        self._refuse(MISSING_PART["schedules"])

    async def limit_queue(self, *_given: Any) -> NoReturn:
        self._refuse(MISSING_PART["schedules"])

    def _refuse(self, what: str) -> NoReturn:
        raise StoreCapabilityError(type(self._user_store).__name__, what)

    def _is_driven(self, run_id: str) -> bool:
        return super()._is_driven(run_id) and self._leases.is_ours(run_id)

    @asynccontextmanager
    async def _lease_run(self, run_id: str, ttl: float | None = None) -> AsyncIterator[bool]:
        """Lease the run from the user's store; whether it is ours. It is released afterwards, unless it is driven here."""
        self._change_ttl = ttl or self._change_ttl
        is_ours = self._leases.is_ours(run_id) or await self._leases.acquire(run_id, self._change_ttl)
        try:
            yield is_ours
        finally:
            if not self._is_driven(run_id):
                await self._leases.release(run_id)

    @asynccontextmanager
    async def _change(self, run_id: str) -> AsyncIterator[None]:
        async with self._lock_run(run_id), self._lease_run(run_id) as is_ours:
            await self._refresh(run_id)
            if not is_ours:
                self._refuse_foreign(run_id)
            before = self._copy_run(run_id)
            yield
            if is_ours and not self._leases.is_ours(run_id):
                self._forget(run_id)
                raise LeaseHeld(run_id, "another process perhaps: the store took longer than the lease that it gave; try again")
            await self._save_or_put_back(run_id, before)

    @asynccontextmanager
    async def _write(self, lease: Lease) -> AsyncIterator[None]:
        if not self._leases.is_ours(lease.run_id):
            raise LeaseLost(lease.run_id, lease.epoch)
        try:
            async with self._change(lease.run_id):
                yield
        except LeaseHeld:
            raise LeaseLost(lease.run_id, lease.epoch) from None

    def _refuse_foreign(self, run_id: str) -> None:
        """Raise `LeaseHeld`, as another process has the run, unless there is no such run."""
        if self._row(run_id) is not None:
            raise LeaseHeld(run_id, "another process that uses this store")

    async def _load(self, run_id: str) -> Any:
        trouble = f"run {run_id!r} could not be loaded"
        kept = await call_user_method(self._user_store.load, run_id, trouble=trouble)
        if kept is None:
            return None
        if not isinstance(kept, StoredRun):
            raise PersistenceError(trouble, f"load({run_id!r}) gave a {type(kept).__name__}, not a StoredRun or None")
        if kept.run_id != run_id:
            raise PersistenceError(trouble, f"load({run_id!r}) gave the run {kept.run_id!r}")
        return kept.snapshot

    async def _save(self, row: RunRow, snapshot: Snapshot) -> None:
        await call_user_method(self._user_store.save, stored_run(row, snapshot), trouble=f"run {row.id!r} could not be saved")

    async def _due(self, now: int, limit: int) -> Sequence[str | StoredRun]:
        trouble = "what is due could not be found out"
        due = await call_user_method(self._user_store.due, moment(now), limit, trouble=trouble)
        if due is None:
            return ()
        if not isinstance(due, Sequence) or isinstance(due, str) or not all(isinstance(one, str | StoredRun) for one in due):
            raise PersistenceError(trouble, f"due gave {type(due).__name__}, not a list of run ids or StoredRuns, or None")
        return due


def workflow_store(user_store: Any) -> StateStore:
    """The one store of this process over this store of the user's."""
    return shared_store(user_store, WorkflowStateStore)


def _id_of(one: str | StoredRun) -> str:
    return one if isinstance(one, str) else one.run_id
