"""A `Store` over a user's own `WorkflowStore`: runs are driven in memory, saved whole, and found again by `due`.

It is a `StateStore` that also claims. A write by a worker that lost its lease cannot be refused by the user's store: it is
unfenced. Where that has `acquire` and `release`, a run is asked for before it is read, and whatever changes it happens while it
is this process's alone; a worker whose time is up by its own clock saves nothing more. Otherwise only one process may use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from perdure.backends.memory.database import Room
from perdure.backends.memory.store import MemoryStore
from perdure.backends.user_defined.state_store import StateStore, asked, the_one_over
from perdure.backends.user_defined.workflow_leases import OwnLeases
from perdure.errors import LeaseHeld, LeaseLost, PerdureError, PersistenceError, RunNotFound, StoreCapabilityError
from perdure.model.durations import moment
from perdure.model.journal import Entry
from perdure.model.records import Claim, Claims, Created, Lease, NewRun, Pulse, RunRow, Signal
from perdure.simple_stores import StoredRun, WorkflowStore, stored_run
from perdure.snapshots.snapshot import Snapshot

_logger: Final = logging.getLogger("perdure")

# How long a run is asked for to be changed from outside (signalled, cancelled, reopened) as long as nobody drives one here.
CHANGE_TTL: Final = 10.0


class Wanted(NamedTuple):
    """Which runs a worker takes."""

    workflows: Collection[str]
    queues: Collection[str] | None

    def include(self, row: RunRow) -> bool:
        return row.workflow in self.workflows and (self.queues is None or row.queue in self.queues)


class WorkflowStateStore(StateStore):
    """A `Store` over a user's own, unfenced."""

    def __init__(self, own: WorkflowStore) -> None:
        super().__init__(own)
        self._own = own
        self._leases = OwnLeases(own)
        # For changes from outside: as long as what workers here ask for.
        self._change_ttl = CHANGE_TTL
        # Why runs that are due could not be had, as it was logged: once, not whenever they are come across.
        self._passed_over: dict[str, str] = {}

    def __repr__(self) -> str:
        reach = "leases by its acquire" if self._leases.are_asked_for else "one process only"
        return f"WorkflowStateStore({self._own!r}, unfenced, {reach})"

    def sibling(self) -> MemoryStore:
        return self if self._leases.are_asked_for else super().sibling()

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
        async def made(ttl: float | None) -> Created:
            return await MemoryStore.create(self, run, ttl=ttl, entries=entries, inbox=inbox, created_at=created_at, now=now)

        async with self._fresh(run.id):
            if self._is_begun(run.id):
                return await made(None)
            async with self._alone(run.id, ttl) as is_alone:
                if self._leases.are_asked_for:  # somebody may have been faster
                    await self._look(run.id)
                    if self._is_begun(run.id):
                        return await made(None)
                if not is_alone:  # otherwise the lease has its place in the run, which is not there yet
                    self._refuse_held(run.id)
                created = await made(ttl if is_alone else None)
                await self._keep_given(run.id)
            return created if is_alone or ttl is None else await self._leased_at_last(created, ttl, now)

    def _is_begun(self, run_id: str) -> bool:
        row = self._row(run_id)
        return row is not None and not row.lacks_input

    async def _leased_at_last(self, created: Created, ttl: float, now: int | None) -> Created:
        async with self._alone(created.run.id, ttl) as is_alone:
            claim = await self._given(created.run.id, ttl, due_only=False, now=now) if is_alone else None
            return msgspec.structs.replace(created, claim=claim)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        async with self._turn(run_id), self._alone(run_id, ttl) as is_alone:
            await self._look(run_id)
            if not is_alone:
                self._refuse_held(run_id)
            return await self._given(run_id, ttl, due_only=due_only, now=now)

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[str],
        queues: Collection[str] | None = None,
        *,
        now: int | None = None,
    ) -> Claims:
        """As the contract says, but in the order in which the user's store names what is due; limits count this process alone."""
        now, wanted = _clock(now), Wanted(workflows, queues)
        claims: list[Claim] = []
        try:
            async with aclosing(self._candidates(now, limit, wanted)) as candidates:
                async for run_id in candidates:
                    if len(claims) >= limit:
                        break
                    claims += await self._claimed(run_id, ttl, now, wanted)
        except PersistenceError:
            if not claims:  # otherwise nobody would drive those; the next call says it again
                raise
        return Claims(claims=claims, next_wake_at=self._next_wake_at(now, wanted))

    async def _candidates(self, now: int, limit: int, wanted: Wanted) -> AsyncGenerator[str, None]:
        """What is said to be due: so many, and then more, so that what others have or nobody here knows is not in the way."""
        tried: set[str] = set()
        asking = limit
        while True:
            due = await self._due(now, asking)
            fresh = [one for one in due if _id_of(one) not in tried]
            for one in fresh:
                tried.add(_id_of(one))
                if not isinstance(one, StoredRun) or one.workflow in wanted.workflows:
                    yield _id_of(one)
            if not fresh or len(due) < asking:
                return
            asking *= 2

    async def _claimed(self, run_id: str, ttl: float, now: int, wanted: Wanted) -> list[Claim]:
        """The claim on this run, if it can be had. One that cannot be read is left as it is, and said once."""
        if self._is_leased(run_id, now):
            return []
        try:
            async with self._turn(run_id), self._alone(run_id, ttl) as is_alone:
                await self._look(run_id)
                is_had = is_alone and self._is_admitted(run_id, wanted, now)
                claim = await self._given(run_id, ttl, due_only=True, now=now) if is_had else None
        except (LeaseHeld, RunNotFound):
            return []
        except PerdureError as reason:
            if self._passed_over.get(run_id) != str(reason):
                self._passed_over[run_id] = str(reason)
                _logger.error("run %r is due but passed over: %s", run_id, reason)  # noqa: TRY400 - the reason says it all
            return []
        self._passed_over.pop(run_id, None)
        return [] if claim is None else [claim]

    def _is_leased(self, run_id: str, now: int) -> bool:
        """Whether it is driven here, and not only was until saving it failed."""
        with self._lock() as namespace:
            known = namespace.runs.get(run_id)
            return known is not None and known.leased(now) and self._leases.are_ours(run_id)

    def _is_admitted(self, run_id: str, wanted: Wanted, now: int) -> bool:
        with self._lock() as namespace:
            run = namespace.runs.get(run_id)
            return run is not None and wanted.include(run.row) and Room(namespace, now).take(run.row)

    def _next_wake_at(self, now: int, wanted: Wanted) -> int | None:
        """The earliest that is known in memory. Of others `due` tells when it is asked again."""
        with self._lock() as namespace:
            known = [run.row for run in namespace.claimable() if wanted.include(run.row)]
        return min((row.wake_at for row in known if row.wake_at is not None and row.wake_at > now), default=None)

    async def _given(self, run_id: str, ttl: float, *, due_only: bool, now: int | None) -> Claim | None:
        """The run, leased here, and saved as such: the attempt counts also if this process dies of it."""
        claim = await MemoryStore.acquire(self, run_id, ttl, due_only=due_only, now=now)
        if claim is not None:
            await self._keep_given(run_id)
        return claim

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> list[Pulse | None]:
        are_ours = await asyncio.gather(*(self._leases.prolong(lease.run_id, ttl) for lease in leases))
        pulses = await super().renew(leases, ttl, now=now)
        return [pulse if is_ours else None for pulse, is_ours in zip(pulses, are_ours, strict=True)]

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        return [_id_of(one) for one in await self._due(_clock(now), limit)]

    async def delete(self, run_id: str) -> None:
        await super().delete(run_id)
        await self._leases.give_back(run_id)

    async def list(self, **_selection: Any) -> NoReturn:
        self._refuse("list of runs")

    async def count(self, **_selection: Any) -> NoReturn:
        self._refuse("list of runs")

    async def purge(self, *_given: Any, **_options: Any) -> NoReturn:
        self._refuse("list of runs, so that nothing can be purged")

    async def put_schedule(self, *_given: Any) -> NoReturn:
        self._refuse("schedules")

    async def limit_queue(self, *_given: Any) -> NoReturn:
        self._refuse("queue limits")

    def _refuse(self, what: str) -> NoReturn:
        raise StoreCapabilityError(type(self._own).__name__, what)

    def _is_driven(self, run_id: str) -> bool:
        return super()._is_driven(run_id) and self._leases.are_ours(run_id)

    @asynccontextmanager
    async def _alone(self, run_id: str, ttl: float | None = None) -> AsyncIterator[bool]:
        """Whether the run is this process's alone; afterwards it is given up again, unless it is driven here by then."""
        self._change_ttl = ttl or self._change_ttl
        is_alone = self._leases.are_ours(run_id) or await self._leases.take(run_id, self._change_ttl)
        try:
            yield is_alone
        finally:
            if not self._is_driven(run_id):
                await self._leases.give_back(run_id)

    @asynccontextmanager
    async def _changing(self, run_id: str) -> AsyncIterator[None]:
        async with self._turn(run_id), self._alone(run_id) as is_alone:
            await self._look(run_id)
            if not is_alone:
                self._refuse_held(run_id)
            yield
            if is_alone and not self._leases.are_ours(run_id):
                self._forget(run_id)
                raise LeaseHeld(run_id, "somebody else perhaps: the store took longer than the lease that it gave; try again")
            await self._keep(run_id)

    @asynccontextmanager
    async def _writing(self, lease: Lease) -> AsyncIterator[None]:
        if not self._leases.are_ours(lease.run_id):
            raise LeaseLost(lease.run_id, lease.epoch)
        try:
            async with self._changing(lease.run_id):
                yield
        except LeaseHeld:
            raise LeaseLost(lease.run_id, lease.epoch) from None

    def _refuse_held(self, run_id: str) -> None:
        """Refuse a run that another process has; one that is not there nobody has."""
        if self._row(run_id) is not None:
            raise LeaseHeld(run_id, "another process that uses this store")

    async def _load(self, run_id: str) -> Any:
        trouble = f"run {run_id!r} could not be loaded"
        kept = await asked(self._own.load, run_id, trouble=trouble)
        if kept is None:
            return None
        if not isinstance(kept, StoredRun):
            raise PersistenceError(trouble, f"load({run_id!r}) gave a {type(kept).__name__}, not a StoredRun or None")
        if kept.run_id != run_id:
            raise PersistenceError(trouble, f"load({run_id!r}) gave the run {kept.run_id!r}")
        return kept.snapshot

    async def _save(self, row: RunRow, snapshot: Snapshot) -> None:
        await asked(self._own.save, stored_run(row, snapshot), trouble=f"run {row.id!r} could not be saved")

    async def _due(self, now: int, limit: int) -> Sequence[str | StoredRun]:
        trouble = "what is due could not be found out"
        due = await asked(self._own.due, moment(now), limit, trouble=trouble)
        if not isinstance(due, Sequence) or isinstance(due, str) or not all(isinstance(one, str | StoredRun) for one in due):
            raise PersistenceError(trouble, f"due gave {type(due).__name__}, not a list of run ids or StoredRuns")
        return due


def workflow_store(own: Any) -> StateStore:
    """The one store of this process over this one of the user's."""
    return the_one_over(own, WorkflowStateStore)


def _id_of(one: str | StoredRun) -> str:
    return one if isinstance(one, str) else one.run_id


def _clock(now: int | None) -> int:
    return time.time_ns() // 1000 if now is None else now
