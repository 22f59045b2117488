"""A store over anything that keeps whole states: `StatePersistence`, or a snapshot store with `save`, `load` and `delete`.

Runs are driven in memory, and every change of a run is saved as a whole before it counts as done. Leases are known in this
process only, so two processes must not use the same keeper at a time; a later process goes on from what an earlier one saved.
While a run is driven here, memory decides; otherwise the saved state is loaded each time, so a state that was deleted is no
longer found.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from perdure.aio.named_locks import NamedLocks
from perdure.aio.pending_write import await_reply
from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.base.leases import store_time
from perdure.backends.base.new_runs import row_after_restore
from perdure.backends.memory.store import MemoryStore
from perdure.backends.user_defined.extra_columns import ExtraColumns, number_after
from perdure.errors import PerdureError, PersistenceError, SnapshotFormatError, StoreCapabilityError, ValueNotStorable
from perdure.kv.protocol import maybe_await
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Claim, Created, EndStatus, Item, Lease, NewInput, NewRun, Pulse, RunRow, Signal
from perdure.snapshots.consistent_view import View
from perdure.snapshots.importer import read_state
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.save_load import run_rows
from perdure.snapshots.snapshot import Snapshot
from perdure.store import MISSING_PART, Capability

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# How many runs that are not driven stay in memory; the others are loaded again when they are needed.
REMEMBERED: Final = 100


class StateStore(MemoryStore):
    """A `Store` for one process. Its runs are saved elsewhere, each as a whole."""

    def __init__(self, keeper: Any) -> None:
        super().__init__()
        self._keeper = keeper
        # What was last loaded, by run: a run whose saved state is the same is not decoded again.
        self._loaded: dict[str, Snapshot | ResumeState] = {}
        # Each is held from a change in memory until it is saved, so that an older state never replaces a newer one.
        self._run_locks = NamedLocks()
        # The LRU of runs in memory that are not driven, the last used at the end. Guarded by the database's lock.
        self._idle: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"StateStore({self._keeper!r})"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Operators alone: schedules, queue limits and streams are no part of a run's state, so they could not be kept."""
        return frozenset({"operators"})

    def sibling(self) -> MemoryStore:
        # For renewing leases, which are not saved.
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
        async with self._lock_and_refresh(run.id):
            before = self._row(run.id)
            created = await super().create(run, ttl=ttl, entries=entries, inbox=inbox, created_at=created_at, now=now)
            if created.run is not before:
                await self._save_or_forget(run.id)
            return created

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        async with self._change(run.id):
            await super().restore(run, entries, inbox, now=now)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        async with self._lock_and_refresh(run_id):
            return await super().acquire(run_id, ttl, due_only=due_only, now=now)

    async def release(
        self,
        lease: Lease,
        *,
        wake_at: int | None = None,
        problem: str | None = None,
        counts_attempt: bool = False,
        now: int | None = None,
    ) -> None:
        async with self._write(lease):
            await super().release(lease, wake_at=wake_at, problem=problem, counts_attempt=counts_attempt, now=now)

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
            raise StoreCapabilityError(type(self._keeper).__name__, MISSING_PART["streams"])
        async with self._write(lease):
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
        async with self._write(lease):
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
        async with self._write(lease):
            await super().finish(lease, status, outcome, entries=entries, consume=consume, now=now)

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        async with self._write(lease):
            await super().continue_as(lease, new, now=now)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        async with self._change(run_id):
            await super().reopen(run_id, drop, now=now)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        async with self._change(run_id):
            return await super().signal(run_id, name, payload, dedupe=dedupe, now=now)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        async with self._change(run_id):
            await super().cancel(run_id, now=now)

    async def hold(self, run_id: str) -> None:
        async with self._change(run_id):
            await super().hold(run_id)

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        async with self._change(run_id):
            await super().unhold(run_id, now=now)

    async def report(self, lease: Lease, progress: bytes) -> None:
        async with self._write(lease):
            await super().report(lease, progress)

    async def get(self, run_id: str) -> RunRow | None:
        async with self._lock_and_refresh(run_id):
            return await super().get(run_id)

    async def journal(self, run_id: str, *, after: int = 0) -> list[Entry]:
        async with self._lock_and_refresh(run_id):
            return await super().journal(run_id, after=after)

    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        async with self._lock_and_refresh(run_id):
            return await super().inbox(run_id, after=after)

    async def delete(self, run_id: str) -> None:
        async with self._lock_run(run_id):
            await call_user_method(self._keeper.delete, run_id, trouble=f"the state of run {run_id!r} could not be deleted")
            self._forget(run_id)

    @asynccontextmanager
    async def _change(self, run_id: str) -> AsyncIterator[None]:
        """Around a change: the saved state is loaded before it, and the changed run saved after it."""
        async with self._lock_and_refresh(run_id):
            before = self._copy_run(run_id)
            yield
            await self._save_or_put_back(run_id, before)

    def _write(self, lease: Lease) -> AbstractAsyncContextManager[None]:
        """Around a change by the holder of this lease."""
        return self._change(lease.run_id)

    @asynccontextmanager
    async def _lock_and_refresh(self, run_id: str) -> AsyncIterator[None]:
        async with self._lock_run(run_id):
            await self._refresh(run_id)
            yield

    @asynccontextmanager
    async def _lock_run(self, run_id: str) -> AsyncIterator[None]:
        async with self._run_locks.hold(run_id):
            try:
                yield
            finally:
                self._update_idle(run_id)
        self._evict_idle()

    def _row(self, run_id: str) -> RunRow | None:
        """The row that is in memory."""
        with self._lock() as namespace:
            known = namespace.runs.get(run_id)
            return None if known is None else known.row

    def _is_driven(self, run_id: str) -> bool:
        """Whether memory decides about the run, not its saved state."""
        with self._lock() as namespace:
            known = namespace.runs.get(run_id)
            return known is not None and known.token is not None

    async def _load(self, run_id: str) -> Any:
        return await call_user_method(self._keeper.load, run_id, trouble=f"the state of run {run_id!r} could not be loaded")

    async def _save(self, row: RunRow, snapshot: Snapshot) -> None:
        trouble = f"the state of run {row.id!r} could not be saved"
        await call_user_method(self._keeper.save, row.id, snapshot, trouble=trouble)

    async def _refresh(self, run_id: str) -> None:
        """Load the saved state into memory, unless the run is driven here or its state is the same as before.

        Watchers are not woken: whatever waits for the run loads its state too.
        """
        if self._is_driven(run_id):
            return
        saved = await self._load(run_id)
        if saved is None:
            self._forget(run_id)
            return
        with _name_run(run_id):
            state, known = read_state(saved), self._row(run_id)
            if known is not None and self._loaded.get(run_id) == state:
                return
            (row, entries, inbox), extra = run_rows(run_id, state), ExtraColumns.read(state)
        consumed = extra.consumed_signals()
        waiting = number_after(consumed, inbox)
        row = extra.apply_to(row_after_restore(row, waiting, known, store_time(None)))
        with self._lock() as namespace:
            namespace.put(row, entries, [*consumed, *waiting]).claimed_length = extra.claimed_length
        self._loaded[run_id] = state

    async def _save_run(self, run_id: str) -> None:
        with self._lock() as namespace:
            run = namespace.runs[run_id]
            view = View(run.row, journal := run.journal(), len(journal), run.unconsumed())
            extra = ExtraColumns.of(run)
        self._loaded.pop(run_id, None)
        # Shielded from cancellation: a save that goes on by itself could replace a later one.
        await await_reply(self._save(view.row, extra.add_to(view.snapshot())))

    async def _save_or_forget(self, run_id: str) -> None:
        """Save a run that was just created or leased. If that fails the caller gets no lease, so none may stay in memory."""
        try:
            await self._save_run(run_id)
        except BaseException:
            self._forget(run_id)
            raise

    def _copy_run(self, run_id: str) -> InMemoryRun | None:
        with self._lock() as namespace:
            known = namespace.runs.get(run_id)
            return None if known is None else replace(known, entries=dict(known.entries), inbox=dict(known.inbox))

    async def _save_or_put_back(self, run_id: str, before: InMemoryRun | None) -> None:
        """Save a run that was changed. After `ValueNotStorable` it is as before: its writer tries again with another value."""
        try:
            await self._save_run(run_id)
        except ValueNotStorable:
            with self._lock() as namespace:
                namespace.remove(run_id)
                if before is not None:
                    namespace.runs[run_id] = before
                    if not before.row.ended:
                        namespace.live.add(run_id)
            raise

    def _forget(self, run_id: str) -> None:
        """Remove the run from memory. A worker that drives it loses its lease."""
        self._loaded.pop(run_id, None)
        with self._lock() as namespace:
            was_known = run_id in namespace.runs
            namespace.remove(run_id)
        if was_known:
            self._database.wake_watchers()

    def _update_idle(self, run_id: str) -> None:
        """Update the LRU of idle runs."""
        with self._lock() as namespace:
            self._idle.pop(run_id, None)
            run = namespace.runs.get(run_id)
            if run is not None and run.token is None:
                self._idle[run_id] = None

    def _evict_idle(self) -> None:
        """Remove the idle runs that were not used for longest, so that memory stays bounded."""
        with self._lock():
            surplus = list(self._idle)[: max(0, len(self._idle) - REMEMBERED)]
        for run_id in surplus:
            with self._run_locks.hold_if_free(run_id) as is_free, self._lock() as namespace:
                if is_free and run_id in self._idle:
                    del self._idle[run_id]
                    namespace.remove(run_id)
                    self._loaded.pop(run_id, None)


@contextmanager
def _name_run(run_id: str) -> Iterator[None]:
    """Name the run in the error of a state that cannot be read."""
    try:
        yield
    except SnapshotFormatError as error:
        raise SnapshotFormatError(error.errors, f"the state that is kept of run {run_id!r}") from error


async def call_user_method(method: Callable[..., Any], *args: Any, trouble: str) -> Any:
    """What a method of the user's object returns, plain or async. Whatever it raises becomes a `PersistenceError`."""
    try:
        return await maybe_await(method(*args))
    except PerdureError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PersistenceError(trouble, repr(error)) from error  # this task was not cancelled: the keeper raised it by itself
    except Exception as error:
        raise PersistenceError(trouble, repr(error)) from error


# By the identity of the keeper, which its store keeps alive: all users of a keeper share one store until the last drops it.
_stores: WeakValueDictionary[Hashable, StateStore] = WeakValueDictionary()
# Held while a store is looked up or made: two stores over one keeper would both drive its runs.
_making: Final = threading.Lock()


def is_state_keeper(keeper: Any) -> bool:
    """Whether this object keeps whole states, rather than being a store."""
    return not isinstance(keeper, type) and all(callable(getattr(keeper, name, None)) for name in ("save", "load", "delete"))


def state_store(keeper: Any) -> StateStore:
    """The one store of this process over this keeper."""
    return shared_store(keeper, StateStore)


def shared_store(keeper: Any, make: Callable[[Any], StateStore]) -> StateStore:
    """The store of this process over this keeper, made if there is none."""
    identity = _identity(keeper)
    with _making:
        store = _stores.get(identity)
        if store is None:
            store = _stores[identity] = make(keeper)
        return store


def _identity(keeper: Any) -> Hashable:
    """What is equal for keepers of the same states, such as two `StatePersistence` over one key-value store."""
    place: Hashable = getattr(keeper, "perdure_place", None)
    return id(keeper) if place is None else place
