"""A store over anything that keeps whole states: `StatePersistence`, or a snapshot store with `save`, `load` and `delete`.

Runs are driven in memory, and every change to one is saved as a whole before it counts as done. Who drives a run is known in this
process only, so two processes must not share such a place; what one left there the next one goes on from. While a run is driven
here, memory has the word; otherwise what is kept is looked at each time, so that a state somebody deleted is gone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from perdure.aio.pending_write import answered
from perdure.backends.base.named_locks import NamedLocks
from perdure.backends.base.new_runs import restored_row
from perdure.backends.memory.store import MemoryStore
from perdure.backends.user_defined.state_besides import Besides, after
from perdure.errors import PerdureError, PersistenceError, SnapshotFormatError, StoreCapabilityError
from perdure.kv.protocol import settled
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Claim, Created, EndStatus, Item, Lease, NewRun, Pulse, RunRow, Signal
from perdure.snapshots.importer import read_state
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.save_load import rows_of
from perdure.snapshots.snapshot import Snapshot
from perdure.snapshots.view import View
from perdure.store import Capability

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# How many runs that are not driven are remembered; the others are read in again when somebody asks.
REMEMBERED: Final = 100


class StateStore(MemoryStore):
    """A `Store` for one process whose runs are kept elsewhere, whole."""

    def __init__(self, keeper: Any) -> None:
        super().__init__()
        self._keeper = keeper
        # What was last seen there, so that a run that nobody changed is not read in again.
        self._seen: dict[str, Snapshot | ResumeState] = {}
        # Had from a change in memory until it is kept, on whichever loop, so that an older state never replaces a newer one.
        self._turns = NamedLocks()
        # The runs in memory that are not driven, the one that was last asked for at the end. Guarded by the database's lock.
        self._idle: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"StateStore({self._keeper!r})"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Operators alone: schedules, queue limits and streams are no part of a run's state, so they could not be kept."""
        return frozenset({"operators"})

    def sibling(self) -> MemoryStore:
        # For renewing leases, which nobody keeps.
        return MemoryStore(self._database)

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
        async with self._fresh(run.id):
            before = self._row(run.id)
            created = await super().create(run, ttl=ttl, entries=entries, inbox=inbox, created_at=created_at, now=now)
            if created.run is not before:
                await self._keep_given(run.id)
            return created

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        async with self._changing(run.id):
            await super().restore(run, entries, inbox, now=now)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        async with self._fresh(run_id):
            return await super().acquire(run_id, ttl, due_only=due_only, now=now)

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        async with self._writing(lease):
            await super().release(lease, now=now)

    async def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,
    ) -> Pulse:
        if items:
            raise StoreCapabilityError(type(self._keeper).__name__, "streams of items")
        async with self._writing(lease):
            return await super().record(lease, entries, consume=consume, items=items, now=now)

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
        async with self._writing(lease):
            return await super().suspend(
                lease, wake_at=wake_at, waiting_for=waiting_for, entries=entries, consume=consume, now=now
            )

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
        async with self._writing(lease):
            await super().finish(lease, status, outcome, entries=entries, consume=consume, now=now)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        async with self._changing(run_id):
            await super().reopen(run_id, drop, now=now)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        async with self._changing(run_id):
            return await super().signal(run_id, name, payload, dedupe=dedupe, now=now)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        async with self._changing(run_id):
            await super().cancel(run_id, now=now)

    async def hold(self, run_id: str) -> None:
        async with self._changing(run_id):
            await super().hold(run_id)

    async def unhold(self, run_id: str) -> None:
        async with self._changing(run_id):
            await super().unhold(run_id)

    async def report(self, lease: Lease, progress: bytes) -> None:
        async with self._writing(lease):
            await super().report(lease, progress)

    async def get(self, run_id: str) -> RunRow | None:
        async with self._fresh(run_id):
            return await super().get(run_id)

    async def journal(self, run_id: str, *, after: int = 0) -> list[Entry]:
        async with self._fresh(run_id):
            return await super().journal(run_id, after=after)

    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        async with self._fresh(run_id):
            return await super().inbox(run_id, after=after)

    async def delete(self, run_id: str) -> None:
        async with self._turn(run_id):
            await asked(self._keeper.delete, run_id, trouble=f"the state of run {run_id!r} could not be deleted")
            self._forget(run_id)

    @asynccontextmanager
    async def _changing(self, run_id: str) -> AsyncIterator[None]:
        """Around a change: what is kept is looked at before, and how it stands after it is kept."""
        async with self._fresh(run_id):
            yield
            await self._keep(run_id)

    def _writing(self, lease: Lease) -> AbstractAsyncContextManager[None]:
        """Around a change by whoever drives the run."""
        return self._changing(lease.run_id)

    @asynccontextmanager
    async def _fresh(self, run_id: str) -> AsyncIterator[None]:
        async with self._turn(run_id):
            await self._look(run_id)
            yield

    @asynccontextmanager
    async def _turn(self, run_id: str) -> AsyncIterator[None]:
        async with self._turns.taken(run_id):
            try:
                yield
            finally:
                self._note(run_id)
        self._forget_some()

    def _row(self, run_id: str) -> RunRow | None:
        """What memory has."""
        with self._locked() as namespace:
            known = namespace.runs.get(run_id)
            return None if known is None else known.row

    def _is_driven(self, run_id: str) -> bool:
        """Whether memory has the word."""
        with self._locked() as namespace:
            known = namespace.runs.get(run_id)
            return known is not None and known.token is not None

    async def _load(self, run_id: str) -> Any:
        return await asked(self._keeper.load, run_id, trouble=f"the state of run {run_id!r} could not be loaded")

    async def _save(self, row: RunRow, snapshot: Snapshot) -> None:
        await asked(self._keeper.save, row.id, snapshot, trouble=f"the state of run {row.id!r} could not be saved")

    async def _look(self, run_id: str) -> None:
        """Take in what is kept, unless the run is driven here or nothing has changed. Nobody is woken: who waits looks too."""
        if self._is_driven(run_id):
            return
        kept = await self._load(run_id)
        if kept is None:
            self._forget(run_id)
            return
        with _naming(run_id):
            state, known = read_state(kept), self._row(run_id)
            if known is not None and self._seen.get(run_id) == state:
                return
            (row, entries, inbox), besides = rows_of(run_id, state), Besides.in_state(state)
        consumed = besides.consumed()
        waiting = after(consumed, inbox)
        row = besides.put_back(restored_row(row, waiting, known, time.time_ns() // 1000))
        with self._locked() as namespace:
            namespace.put(row, entries, [*consumed, *waiting]).claimed_length = besides.claimed_length
        self._seen[run_id] = state

    async def _keep(self, run_id: str) -> None:
        with self._locked() as namespace:
            run = namespace.runs[run_id]
            view = View(run.row, journal := run.journal(), len(journal), run.unconsumed())
            besides = Besides.of(run)
        self._seen.pop(run_id, None)
        # Also when whoever asked is cancelled: a save that goes on by itself could come after a later one.
        await answered(self._save(view.row, besides.added_to(view.snapshot())))

    async def _keep_given(self, run_id: str) -> None:
        """Keep a run that was just leased, or made. If that fails nobody is told of it, so nobody would give it back."""
        try:
            await self._keep(run_id)
        except BaseException:
            self._forget(run_id)
            raise

    def _forget(self, run_id: str) -> None:
        """Have nothing of this run in memory. Whoever drives it loses its lease."""
        self._seen.pop(run_id, None)
        with self._locked() as namespace:
            was_known = run_id in namespace.runs
            namespace.remove(run_id)
        if was_known:
            self._database.wake_watchers()

    def _note(self, run_id: str) -> None:
        """Know the run as one that may be forgotten, or not any more."""
        with self._locked() as namespace:
            self._idle.pop(run_id, None)
            run = namespace.runs.get(run_id)
            if run is not None and run.token is None:
                self._idle[run_id] = None

    def _forget_some(self) -> None:
        """Let memory not grow with every run that there ever was."""
        with self._locked():
            surplus = list(self._idle)[: max(0, len(self._idle) - REMEMBERED)]
        for run_id in surplus:
            with self._turns.taken_if_free(run_id) as is_free, self._locked() as namespace:
                if is_free and run_id in self._idle:
                    del self._idle[run_id]
                    namespace.remove(run_id)
                    self._seen.pop(run_id, None)


@contextmanager
def _naming(run_id: str) -> Iterator[None]:
    """Let what cannot be read say whose it is."""
    try:
        yield
    except SnapshotFormatError as error:
        raise SnapshotFormatError(error.errors, f"the state that is kept of run {run_id!r}") from error


async def asked(method: Callable[..., Any], *args: Any, trouble: str) -> Any:
    """What a method of somebody else's gives, plain or async. Whatever it raises is a `PersistenceError`."""
    try:
        return await settled(method(*args))
    except PerdureError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PersistenceError(trouble, repr(error)) from error  # nobody cancelled this: it comes from within the keeper
    except Exception as error:
        raise PersistenceError(trouble, repr(error)) from error


# By the identity of the place, which a store keeps alive: while somebody works on one, others join; then it is forgotten.
_stores: WeakValueDictionary[Hashable, StateStore] = WeakValueDictionary()
# Held while one is looked up or made: two for one place would both drive its runs.
_making: Final = threading.Lock()


def keeps_states(keeper: Any) -> bool:
    """Whether this object keeps whole states, rather than being a store."""
    return not isinstance(keeper, type) and all(callable(getattr(keeper, name, None)) for name in ("save", "load", "delete"))


def state_store(keeper: Any) -> StateStore:
    """The one store of this process over this place."""
    return the_one_over(keeper, StateStore)


def the_one_over(keeper: Any, make: Callable[[Any], StateStore]) -> StateStore:
    """The store of this process over this place, made if there is none."""
    place = _place(keeper)
    with _making:
        store = _stores.get(place)
        if store is None:
            store = _stores[place] = make(keeper)
        return store


def _place(keeper: Any) -> Hashable:
    """What tells where states are kept: a `StatePersistence` made anew over the same key-value store is the same place."""
    place: Hashable = getattr(keeper, "perdure_place", None)
    return id(keeper) if place is None else place
