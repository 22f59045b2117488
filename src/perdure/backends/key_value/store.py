"""The store over a key-value store: what each verb of the contract asks of the engine.

Over an object store with conditional writes (S3, Google Cloud Storage, Azure) any number of processes may use it. Over anything
else it serves one process: it refuses to be carried into another, and to be opened where another process of this machine has it.

Key-value stores have no clock that a lease could go by, so leases go by the clocks of the processes. A process whose clock is
ahead takes a run over too early; the one it was taken from is then refused, as after any takeover, and nothing is recorded twice.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from perdure.backends.base.leases import lease_microseconds
from perdure.backends.base.new_runs import checked_inbox, checked_journal, checked_start, new_row
from perdure.backends.base.server_store import ServerStore
from perdure.backends.key_value import listing, verbs
from perdure.backends.key_value.adapters import trait_of
from perdure.backends.key_value.claims import Wanted
from perdure.backends.key_value.connections import STORE, KeyValueConnections
from perdure.backends.key_value.document import Document
from perdure.backends.key_value.engine import Engine, room_of
from perdure.backends.key_value.listing import Filter
from perdure.backends.key_value.run import Given, Run
from perdure.backends.key_value.verbs import Beginning, Writing, clock
from perdure.errors import LeaseLost, PersistenceError, StoreCapabilityError
from perdure.model.ids import checked_namespace
from perdure.model.journal import Entry
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
from perdure.store import STANDARD_PARTS, Capability, Durability, Transaction

T = TypeVar("T")

# How often it is asked whether another process said something, in seconds.
_POLL_EVERY: Final = 1.0


class KeyValueRunStore(ServerStore[KeyValueConnections]):
    """Runs over a `KeyValueStore`, a store of py-key-value, or an object store of obstore, which stays the caller's."""

    def __init__(self, kv: Any, *, prefix: str = "") -> None:
        room = room_of(kv, trait_of(kv), checked_namespace(prefix))
        super().__init__(KeyValueConnections(room), prefix=prefix, auto_migrate=True)

    def _on_attach(self) -> None:
        self._room = self._connections.room
        self._room.enter(self._lifecycle)

    def __repr__(self) -> str:
        return f"KeyValueRunStore({type(self._room.kv).__name__}, prefix={self._namespace!r})"

    def __reduce__(self) -> NoReturn:
        if self._room.trait.is_shared:
            raise TypeError("a KeyValueRunStore cannot be pickled: make one over the same bucket in the other process")
        raise StoreCapabilityError(STORE, "way into another process over a store without compare-and-swap")

    def _reopen_in_child(self) -> NoReturn:
        """In a forked child: what is kept in memory is the parent's, and so is the way to the store."""
        if self._room.trait.is_shared:
            raise PersistenceError(self._connections.label, "it cannot be used in a forked process; make another store there")
        raise StoreCapabilityError(STORE, "way into a forked process over a store without compare-and-swap")

    @property
    def key(self) -> tuple[str, ...]:
        """Which store it is, and the prefix."""
        return (STORE, *self._room.trait.place, self._namespace)

    @property
    def durability(self) -> Durability:
        """What the key-value store is known to survive, or says itself."""
        return self._room.trait.durability

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Shared where there is compare-and-swap between processes, durable where something is known to survive."""
        shared: set[Capability] = {"shared"} if self._room.trait.is_shared else set()
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
        """Begin the run with its first entries and signals, or find it; with `ttl` a new one is leased at once."""
        if ttl is not None:
            lease_microseconds(ttl)
        at = clock(now)
        begun = Beginning.of(new_row(checked_start(run), at, created_at), checked_journal(entries), checked_inbox(inbox))
        verb = partial(verbs.create, new=run, begun=begun, ttl=ttl, owner=self._owner, now=at)

        async def create(engine: Engine) -> Created:
            is_new, made = await engine.lanes.change(run.id, verb)
            if isinstance(made, Given):
                claim = await engine.place.claim(made)
                return Created(run=claim.run, is_new=True, claim=claim)
            row = await engine.place.look(run.id, lambda document, row: engine.place.whole_row(row, document.incarnation))
            return Created(run=made if row is None else row, is_new=is_new)

        return await self._do(create, wakes=True)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        journal, rows = checked_journal(entries), checked_inbox(inbox)
        await self._change(run.id, partial(verbs.restore, row=run, entries=journal, inbox=rows, now=clock(now)), wakes=True)

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[str],
        queues: Collection[str] | None = None,
        *,
        now: int | None = None,
    ) -> Claims:
        """Lease due runs, which are found by their cards. When nothing is due this writes nothing."""
        lease_microseconds(ttl)
        wanted = Wanted.of(workflows, queues)
        return await self._do(lambda engine: engine.claimer.claim(limit, ttl, wanted, self._owner, clock(now)))

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run."""
        lease_microseconds(ttl)
        verb = partial(verbs.acquire, ttl=ttl, owner=self._owner, now=clock(now), due_only=due_only)

        async def acquire(engine: Engine) -> Claim | None:
            given = await engine.lanes.change(run_id, verb)
            return None if given is None else await engine.claimer.filled(given)

        return await self._do(acquire)

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> builtins.list[Pulse | None]:
        """Prolong leases, each in the document of its run."""
        lease_microseconds(ttl)
        asked = list(leases)

        async def renew() -> builtins.list[Pulse | None]:
            lanes, at = self._connections.engine.lanes, clock(now)
            calls = [lanes.change(lease.run_id, partial(verbs.renew, lease=lease, ttl=ttl, now=at)) for lease in asked]
            with self._connections.map_errors():
                return list(await asyncio.gather(*calls))

        return await self._submit_renewal(ttl, renew)

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        """Give the run back, due at once."""
        await self._change(lease.run_id, partial(verbs.release, lease=lease, now=clock(now)), wakes=True)

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
        writing = Writing.of(entries, consume, items)
        return await self._change(lease.run_id, partial(verbs.record, lease=lease, writing=writing))

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
        """Record and give up the lease, unless something awaited is there."""
        verb = partial(
            verbs.suspend,
            lease=lease,
            wake_at=wake_at,
            waiting_for=tuple(waiting_for),
            writing=Writing.of(entries, consume),
            now=clock(now),
        )

        async def suspend(engine: Engine) -> builtins.list[Signal]:
            arrived = await engine.lanes.change(lease.run_id, verb)
            if not arrived:
                return []
            place = engine.place
            whole = await place.look(lease.run_id, lambda document, _: place.whole(lease.run_id, document.incarnation, arrived))
            if whole is None:  # deleted since
                raise LeaseLost(lease.run_id, lease.epoch)
            return whole

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
        """Record and end the run, then tell its parent; after a crash in between whoever claims next tells it."""
        writing = Writing.of(entries, consume)
        verb = partial(verbs.finish, lease=lease, status=status, outcome=outcome, writing=writing, now=clock(now))

        async def finish(engine: Engine) -> None:
            if await engine.lanes.change(lease.run_id, verb):
                await engine.teller.tell_parent(lease.run_id)

        await self._do(finish, wakes=True)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        await self._change(run_id, partial(verbs.reopen, drop=tuple(drop), now=clock(now)), wakes=True)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox, which is in its document: it waits, or the run is awake."""
        sent = Signal(seq=0, name=name, payload=payload, dedupe=dedupe)
        return await self._change(run_id, partial(verbs.signal, sent=sent, now=clock(now)), wakes=True)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._change(run_id, partial(verbs.cancel, now=clock(now)), wakes=True)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._change(run_id, partial(verbs.hold, held=True))

    async def unhold(self, run_id: str) -> None:
        """Undo `hold`."""
        await self._change(run_id, partial(verbs.hold, held=False), wakes=True)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._change(lease.run_id, partial(verbs.report, lease=lease, progress=progress))

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._do(
            lambda engine: engine.place.look(run_id, lambda document, row: engine.place.whole_row(row, document.incarnation))
        )

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""

        async def journal(engine: Engine) -> builtins.list[Entry]:
            place = engine.place
            return await place.look(run_id, lambda document, _: place.entries(run_id, document, after)) or []

        return await self._do(journal)

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return await self._do(lambda engine: self._inbox(engine, run_id, after))

    async def _inbox(self, engine: Engine, run_id: str, after: int) -> builtins.list[Signal]:
        async def look(document: Document, _: RunRow) -> builtins.list[Signal]:
            rows = [arrival.row for arrival in document.inbox if arrival.row.seq > after]
            return await engine.place.whole(run_id, document.incarnation, rows)

        return await engine.place.look(run_id, look) or []

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""

        async def items(engine: Engine) -> builtins.list[Item]:
            place = engine.place
            return await place.look(run_id, lambda document, _: place.items(run_id, document, stream, after, limit)) or []

        return await self._do(items)

    async def list(
        self,
        *,
        prefix: str = "",
        status: Status | None = None,
        workflow: str | None = None,
        before: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> builtins.list[RunInfo]:
        """Runs, last changed first. All cards are listed, and only the documents of the runs that are given are read."""
        wanted = Filter(prefix, status, workflow)
        return await self._do(lambda engine: listing.list_runs(engine.claimer.finder, wanted, before, limit))

    async def count(self, *, prefix: str = "", status: Status | None = None, workflow: str | None = None) -> int:
        """How many runs there are, by their cards: one whose creation a crash cut short counts until a worker looked at it."""
        wanted = Filter(prefix, status, workflow)
        return await self._do(lambda engine: listing.count(engine.claimer.finder, wanted))

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._do(lambda engine: engine.claimer.due(clock(now), limit))

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it. Where several processes write, a document that says nothing stays."""
        await self._change(run_id, verbs.delete, wakes=True)

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        """Delete ended runs, oldest first."""
        at = clock(now)
        return await self._do(lambda engine: listing.purge(engine.claimer.finder, engine.lanes, older_than, limit, at))

    async def watch(self, timeout: float) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        self._reopen_if_forked()
        watcher = self._lifecycle.watch()
        ends_at = time.monotonic() + timeout
        try:
            while (left := ends_at - time.monotonic()) > 0:
                await asyncio.wait([watcher.future], timeout=left if self._room.is_alone else min(left, _POLL_EVERY))
                if watcher.future.done() or self._lifecycle.is_closed or self._room.is_alone:
                    return
                await self._do(Engine.listen)
        finally:
            self._lifecycle.unwatch(watcher)

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._do(lambda engine: engine.settings.put_schedule(schedule), wakes=True)

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        settings = await self._do(lambda engine: engine.settings.read())
        return [settings.schedules[schedule_id] for schedule_id in sorted(settings.schedules)]

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._do(lambda engine: engine.settings.drop_schedule(schedule_id))

    async def fire(self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun, now: int | None = None) -> bool:
        """Move the schedule on and create its run, once."""
        row = new_row(checked_start(run), clock(now))
        return await self._do(lambda engine: engine.settings.fire(schedule_id, expected_at, next_at, row), wakes=True)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""
        await self._do(lambda engine: engine.settings.limit_queue(queue, limits), wakes=True)

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return (await self._do(lambda engine: engine.settings.read())).limits

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        """Refused: key-value stores have no transactions that a step's own writes could be part of."""
        raise StoreCapabilityError(STORE, "transactions")

    async def _change(self, run_id: str, verb: Callable[[Run], T], *, wakes: bool = False) -> T:
        return await self._do(lambda engine: engine.lanes.change(run_id, verb), wakes=wakes)

    async def _do(self, work: Callable[[Engine], Awaitable[T]], *, wakes: bool = False) -> T:
        """What the work gives, done on the connections loop."""

        async def done() -> T:
            engine = self._connections.engine
            with self._connections.map_errors():
                answer = await work(engine)
            if wakes:
                engine.wake()
            return answer

        return await self._submit(done)
