"""PostgresStore: the contract on a PostgreSQL database, through asyncpg.

A verb is carried to the event loop of the store's connections (`connections`) and answered from there. What holders write often
(records, ends, sleeps) and what begins runs goes through batchers, where one statement serves all that arrived while the one
before it was under way; a loop that writes much has batchers of its own (`loop_connections`). What a caller passes in is copied
before the verb is handed over, since it may be looked at much later.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from perdure.backends.base.batching import Batcher, Request
from perdure.backends.base.leases import lease_microseconds, new_token
from perdure.backends.base.loop_connections import LoopBatchers, LoopConnections
from perdure.backends.base.new_runs import checked_inbox, checked_journal, checked_start
from perdure.backends.base.server_store import ServerStore
from perdure.backends.postgres import claims, inbox, reading, recording, runs, schedules
from perdure.backends.postgres.address import PostgresAddress, parse_address
from perdure.backends.postgres.connections import PostgresConnections
from perdure.backends.postgres.errors import driver
from perdure.backends.postgres.lanes import Lanes
from perdure.backends.postgres.rows import identity
from perdure.backends.postgres.schema import Session, Tables
from perdure.backends.postgres.transaction import PostgresTransaction
from perdure.backends.postgres.watching import POLL_EVERY, Listener
from perdure.model.durations import microseconds
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
from perdure.store import STANDARD_PARTS, Capability

P = ParamSpec("P")
T = TypeVar("T")
Q = TypeVar("Q", bound=Request)
A = TypeVar("A")


class PostgresStore(ServerStore[PostgresConnections]):
    """A store in a PostgreSQL database, for any number of processes and machines.

    It opens up to `pool_size` connections by the DSN, and as many again for an event loop that writes much, or uses the asyncpg
    `pool` that is passed in and leaves it open. `table` begins the names of the tables, `prefix` keeps runs of several users of
    the same tables apart.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        pool: Any | None = None,
        table: str = "perdure",
        prefix: str = "",
        auto_migrate: bool = True,
        pool_size: int = 10,
    ) -> None:
        if (url is None) == (pool is None):
            raise ValueError("a PostgreSQL store takes a url or a pool, one of them")
        driver()
        place = PostgresAddress(f"pool {id(pool)}", "", "", None) if url is None else parse_address(url)
        connections = PostgresConnections(place, Tables(table), dsn=url, pool=pool, pool_size=pool_size)
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    def _on_attach(self) -> None:
        self._listener = Listener(self._connections, self._lifecycle)
        self._lanes = Lanes(self._connections, self._namespace)
        self._loop_connections = LoopConnections(partial(_loop_pool, self._connections, self._namespace))
        weakref.finalize(self, self._loop_connections.abandon).atexit = False

    async def close(self) -> None:
        """Wait for what was submitted, and close the connections unless they were borrowed."""
        await super().close()
        await self._loop_connections.close()

    def _reopen_in_child(self) -> None:
        self._loop_connections.leak_after_fork()
        super()._reopen_in_child()

    def _write(self, batcher: Callable[[Lanes], Batcher[Q, A]], request: Q) -> Awaitable[A]:
        """The answer of a batcher: one on the caller's loop if that has any, otherwise one on the connections loop."""
        is_possible = self._connections.is_ready and not self._connections.is_borrowed and self._process == os.getpid()
        near = self._loop_connections.here() if is_possible else None
        if near is None:
            return self._enqueue(lambda: batcher(self._lanes), request)
        return self._enter_or_fail() or batcher(near).put(request, self._lifecycle.leave)

    def _make_closer(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return partial(_close, self._connections, self._listener)

    def __repr__(self) -> str:
        return f"PostgresStore('{self._connections.place.hosts}/{self._connections.place.database}')"

    @property
    def key(self) -> tuple[str, ...]:
        """Host and port, database, search path, table stem and prefix."""
        place = self._connections.place
        return ("postgresql", place.hosts, place.database, place.search_path, self._connections.tables.stem, self._namespace)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All there are."""
        return STANDARD_PARTS | {"shared", "durable", "transaction"}

    def create(
        self,
        run: NewRun,
        *,
        ttl: float | None = None,
        entries: Sequence[Entry] = (),
        inbox: Sequence[Signal] = (),
        created_at: int | None = None,
        now: int | None = None,
    ) -> Awaitable[Created]:
        """Insert the run with its first entries and signals, or find it; with `ttl` a new one is leased at once."""
        length = None if ttl is None else lease_microseconds(ttl)
        journal, rows = checked_journal(entries), checked_inbox(inbox)
        begin = runs.Begin(checked_start(run), length, new_token(), self._owner, journal, rows, created_at, now)
        return self._write(lambda batchers: batchers.beginnings, begin)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        await self._do(runs.restore, run, checked_journal(entries), checked_inbox(inbox), now)

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[str],
        queues: Collection[str] | None = None,
        *,
        now: int | None = None,
    ) -> Claims:
        """Lease due runs, and load what they recorded."""
        wanted = claims.Wanted.of(limit, lease_microseconds(ttl), self._owner, workflows, queues, now)
        return await self._submit(lambda: self._claim(wanted))

    async def _claim(self, wanted: claims.Wanted) -> Claims:
        took = await self._connections.perform(self._namespace, lambda db, _: claims.claim(db, wanted))
        loaded = await self._load(took.taken)
        return Claims(claims=loaded, next_wake_at=took.next_wake_at)

    async def _load(self, taken: Sequence[claims.Taken]) -> builtins.list[Claim]:
        return await self._connections.perform(self._namespace, lambda db, _: claims.load(db, taken)) if taken else []

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, and load what it recorded."""
        length = lease_microseconds(ttl)
        return await self._submit(lambda: self._acquire(run_id, length, now, due_only=due_only))

    async def _acquire(self, run_id: str, length: int, now: int | None, *, due_only: bool) -> Claim | None:
        token = new_token()  # the same for every attempt, so that one whose reply was lost is recognised
        taken = await self._connections.perform(
            self._namespace, lambda db, _: claims.acquire(db, run_id, length, self._owner, token, now, due_only=due_only)
        )
        return None if taken is None else (await self._load([taken]))[0]

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one statement."""
        given, length = tuple(leases), lease_microseconds(ttl)
        return await self._submit_renewal(
            ttl, lambda: self._connections.perform(self._namespace, lambda db, _: claims.renew(db, given, length, now))
        )

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        """Give the run back, due at once."""
        await self._submit(
            lambda: self._connections.perform(
                self._namespace, lambda db, again: claims.release(db, lease, now, is_repeated=again)
            )
        )

    def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Awaitable[Pulse]:
        """Append to the journal: a share of one statement, which is one round trip and one commit."""
        write = recording.record(lease, entries, consume, items)
        return self._write(lambda batchers: batchers.records, write)

    def suspend(
        self,
        lease: Lease,
        *,
        wake_at: int | None,
        waiting_for: Collection[Awaited] = (),
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> Awaitable[builtins.list[Signal]]:
        """Record and give up the lease, unless something awaited is there."""
        write = recording.suspend(lease, wake_at, waiting_for, entries, consume, now)
        return self._write(lambda batchers: batchers.closings, write)

    def finish(
        self,
        lease: Lease,
        status: EndStatus,
        outcome: bytes,
        *,
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> Awaitable[object]:
        """Record, end the run and tell its parent."""
        write = recording.finish(lease, status, outcome, entries, consume, now)
        return self._write(lambda batchers: batchers.closings, write)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        await self._do(runs.reopen, run_id, tuple(drop), now)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        return await self._do(inbox.signal, run_id, name, payload, dedupe, identity(name, dedupe), now)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._do(runs.cancel, run_id, now)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._do(runs.hold, run_id, held=True)

    async def unhold(self, run_id: str) -> None:
        """Undo `hold`."""
        await self._do(runs.hold, run_id, held=False)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._do(recording.report, lease, progress)

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._do(runs.get, run_id)

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        return await self._do(reading.journal, run_id, after)

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return await self._do(inbox.unconsumed, run_id, after)

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""
        return await self._do(reading.items, run_id, stream, after, limit)

    async def list(
        self,
        *,
        prefix: str = "",
        status: Status | None = None,
        workflow: str | None = None,
        before: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> builtins.list[RunInfo]:
        """Runs, last changed first."""
        return await self._do(reading.list_runs, prefix, status, workflow, before, limit)

    async def count(self, *, prefix: str = "", status: Status | None = None, workflow: str | None = None) -> int:
        """How many runs there are."""
        return await self._do(reading.count, prefix, status, workflow)

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._do(reading.due, limit, now)

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._do(runs.delete, run_id)

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        """Delete ended runs, oldest first."""
        return await self._do(runs.purge, microseconds(older_than, what="older_than"), limit, now)

    async def watch(self, timeout: float) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        self._reopen_if_forked()
        watcher = self._lifecycle.watch()  # from here on closing the store ends the wait
        try:
            if self._listener.is_live:
                await asyncio.wait([watcher.future], timeout=max(0.0, timeout))
                return
            # Whatever happened before there was a connection to hear of it may be what the caller waits for.
            starting = asyncio.ensure_future(self._submit(self._listener.start))
            starting.add_done_callback(_noted)
            await asyncio.wait([starting], timeout=max(0.0, timeout))
            if not self._listener.is_live:
                await asyncio.wait([watcher.future], timeout=max(0.0, min(timeout, POLL_EVERY)))
        finally:
            self._lifecycle.unwatch(watcher)

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._do(schedules.put_schedule, schedule)

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        return await self._do(schedules.schedules)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._do(schedules.drop_schedule, schedule_id)

    async def fire(self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun, now: int | None = None) -> bool:
        """Move the schedule on and create its run, once."""
        return await self._do(schedules.fire, schedule_id, expected_at, next_at, checked_start(run), now)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""
        await self._do(schedules.limit_queue, queue, limits)

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return await self._do(schedules.queue_limits)

    @asynccontextmanager
    async def transaction(self, lease: Lease) -> AsyncIterator[PostgresTransaction]:
        """A fenced transaction on a connection of its own; while it is open nobody takes the run over."""
        self._enter()
        try:
            await self._connections.run(self._connections.ensure_open(allowed=self._auto_migrate))
            under_way = PostgresTransaction(self._connections, self._namespace, lease)
            try:
                await under_way.begin()
                yield under_way
                await under_way.commit()
            finally:
                await under_way.end()
        finally:
            self._lifecycle.leave()

    async def _do(self, verb: Callable[Concatenate[Session, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._submit(lambda: self._connections.perform(self._namespace, lambda db, _: verb(db, *args, **kwargs)))


async def _loop_pool(connections: PostgresConnections, namespace: str) -> LoopBatchers[Lanes]:
    with connections.map_errors():
        loop_pool = await connections.loop_pool()
    return LoopBatchers(Lanes(loop_pool, namespace, max_in_flight=2), loop_pool.close)


async def _close(connections: PostgresConnections, listener: Listener) -> None:
    await listener.close()
    await connections.close()


def _noted(task: asyncio.Task[None]) -> None:
    """The watcher meets the error, if there was one, at its next verb."""
    if not task.cancelled():
        task.exception()
