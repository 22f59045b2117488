"""SqlStore: the contract on an SQL database with a server.

A verb runs on the event loop of the store's connections, in one transaction. The frequent writes of lease holders (records, ends,
sleeps) and the creations of runs go through batchers, where one transaction serves all requests that arrived while the one before
it was in flight. The arguments of a verb are copied before it is handed over.
"""

from __future__ import annotations

import asyncio
import builtins
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from perdure.backends.base.batching import Batcher, Reply, Request
from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.base.leases import Release, lease_microseconds, new_token, steps_by_lease
from perdure.backends.base.loop_connections import LoopBatchers, LoopConnections
from perdure.backends.base.new_runs import check_inbox, check_journal, check_start
from perdure.backends.base.server_store import ServerStore
from perdure.backends.sql import claims, closing, inbox, reading, recording, runs
from perdure.backends.sql.recording import Write
from perdure.backends.sql.rows import identity
from perdure.backends.sql.session import Channel, Session, SqlConnections
from perdure.backends.sql.transaction import SqlOutbox, SqlTransaction, open_fenced, unwrap
from perdure.backends.sql.verbs import SqlVerbs, Verb
from perdure.errors import PersistenceError
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
    RunRow,
    Signal,
    WorkflowVersion,
)

T = TypeVar("T")
H = TypeVar("H", bound=SqlConnections)
Q = TypeVar("Q", bound=Request)
A = TypeVar("A")

# Seconds after which a watch ends, since nothing notifies it of changes by other processes: its caller looks for itself. Up to a
# tenth less at random, so that the workers of a fleet spread out.
POLL_EVERY: Final = 0.8


class Batchers(NamedTuple):
    """The batchers of records, of ends and sleeps, and of new runs: each writes many in one transaction."""

    records: Batcher[Write, Pulse]
    closings: Batcher[Write, list[Signal]]
    creations: Batcher[runs.RunCreation, Created]


class SqlStore(ServerStore[H], SqlVerbs):
    """A store on an SQL server. A subclass has `key` and `__repr__`, and may override the batches (`_record_all` etc.)."""

    # Whether the last claim found nothing due, so that the next one probably does not either.
    _found_nothing = False

    def _attach(self, connections: H) -> None:
        super()._attach(connections)
        self._loop_copies = LoopConnections(partial(_copy_for_loop, connections))
        weakref.finalize(self, self._loop_copies.abandon).atexit = False

    async def close(self) -> None:
        """Wait for what was submitted, and close the connections unless they were borrowed."""
        await super().close()
        await self._loop_copies.close()

    def _reopen_in_child(self) -> None:
        self._loop_copies.leak_after_fork()
        super()._reopen_in_child()

    def _on_attach(self) -> None:
        culprit = self._connections.is_caused_by_one_request
        self._batchers = Batchers(
            Batcher(self._record_and_wake, culprit),
            Batcher(self._close_and_wake, culprit),
            Batcher(self._create_or_find, culprit),
        )

    def _batch(self, batcher: Callable[[Batchers], Batcher[Q, A]], request: Q) -> Awaitable[A]:
        """The reply of one of the batchers."""
        return self._enqueue(lambda: batcher(self._batchers), request)

    def _wake_watchers(self) -> None:
        """Called after each change that may have made a run due or ended it."""
        self._lifecycle.wake()

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
        journal, rows = check_journal(entries), check_inbox(inbox)
        start = check_start(run)
        creation = runs.RunCreation(start, length, new_token(), self._owner, journal, rows, created_at, now)
        return self._batch(lambda batchers: batchers.creations, creation)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        journal, rows = check_journal(entries), check_inbox(inbox)
        while not await self._change(lambda db: runs.restore(db, run, journal, rows, now)):
            pass

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
        """Lease due runs, and load what they recorded."""
        length = lease_microseconds(ttl)
        request = ClaimRequest(ClaimFilter.of(workflows, queues), max(limit, 0), length, self._owner, now, suspects)
        return await self._submit(lambda: self._claim(request))

    async def _claim(self, request: ClaimRequest) -> Claims:
        result = None
        if self._found_nothing:  # a worker with nothing to do asks with one statement
            result = await self._connections.read(self._namespace, lambda db: claims.see_nothing_due(db, request))
        if result is None:
            result = await self._connections.perform(self._namespace, lambda db, _: claims.claim(db, request))
        self._found_nothing = not result.leased and not self._connections.tables.dialect.has_few_indexes
        loaded = await self._load(result, request.now)
        return Claims(claims=loaded.claims, next_wake_at=result.next_wake_at, now=result.now)

    async def _load(self, result: claims.ClaimResult, now: int | None) -> claims.LoadedRuns:
        """The claims for leased runs. Those that cannot be read are set aside."""
        loaded = claims.LoadedRuns([], [])
        if result.leased:
            loaded = await self._connections.read(self._namespace, lambda db: claims.load(db, result.leased))
        damaged = [*result.damaged, *loaded.damaged]
        if damaged:
            with suppress(PersistenceError):  # then their leases expire by themselves; the others must reach their worker
                await self._connections.perform(self._namespace, lambda db, _: claims.set_aside_leased(db, damaged, now))
        return claims.LoadedRuns(loaded.claims, damaged)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, and load what it recorded."""
        length = lease_microseconds(ttl)
        return await self._submit(lambda: self._acquire(run_id, length, now, due_only=due_only))

    async def _acquire(self, run_id: str, length: int, now: int | None, *, due_only: bool) -> Claim | None:
        token = new_token()  # the same for every attempt, so that one whose reply was lost is recognised
        leased = await self._connections.perform(
            self._namespace, lambda db, _: claims.acquire(db, run_id, length, self._owner, token, now, due_only=due_only)
        )
        if leased is None:
            return None
        return (await self._load(claims.ClaimResult([leased], None, leased.run.updated_at, []), now)).one()

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one transaction. It waits for no lock."""
        renewed, length, steps = tuple(leases), lease_microseconds(ttl), steps_by_lease(leases, running_steps)
        return await self._submit_renewal(
            ttl, lambda: claims.renew(self._connections, self._namespace, renewed, length, steps, now)
        )

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
        await self._submit(
            lambda: self._connections.perform(
                self._namespace, lambda db, again: claims.release(db, lease, release, now, is_repeated=again), notify=True
            )
        )
        self._wake_watchers()

    def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Awaitable[Pulse]:
        """Append to the journal: a share of one transaction."""
        write = Write.record(lease, entries, consume, items)
        return self._batch(lambda batchers: batchers.records, write)

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
        """Record and give up the lease, unless something awaited has arrived."""
        write = Write.suspend(lease, wake_at, waiting_for, entries, consume, now)
        return self._batch(lambda batchers: batchers.closings, write)

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
        """Record, end the run and notify its parent."""
        write = Write.finish(lease, status, outcome, entries, consume, now)
        return self._batch(lambda batchers: batchers.closings, write)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        of_signal = identity(name, dedupe)  # the same for every attempt, so that one whose reply was lost is recognised
        return await self._change(lambda db: inbox.signal(db, run_id, name, payload, dedupe, of_signal, now))

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._read(lambda db: reading.due(db, limit, now))

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this handle changed what may be due, after `timeout` seconds, or after `POLL_EVERY`: others may have."""
        self._reopen_if_forked()
        watcher = self._lifecycle.watch(items=items)  # from here on closing the store ends the wait
        try:
            pause = POLL_EVERY * random.uniform(0.9, 1.0)  # noqa: S311 - to spread out, not to hide
            await asyncio.wait([watcher.future], timeout=max(0.0, min(timeout, pause)))
        finally:
            self._lifecycle.unwatch(watcher)

    @asynccontextmanager
    async def transaction(self, lease: Lease) -> AsyncIterator[SqlTransaction]:
        """A fenced transaction; while it is open no other worker takes the run over."""
        self._enter()
        try:
            await self._connections.run(self._connections.ensure_open(allowed=self._auto_migrate))
            connections = self._connections
            if connections.has_loop_copies and not connections.is_borrowed:
                connections = await self._loop_copies.connect()
            async with open_fenced(self._new_transaction(connections, lease)) as transaction:
                yield transaction
        finally:
            self._lifecycle.leave()

    async def outbox(self, connection: Any) -> SqlOutbox:
        """The verbs for a transaction that is open on this connection of the store's driver, on the caller's event loop."""
        await self._submit(_do_nothing)  # but set the store up, if it was not yet
        caller = await unwrap(connection)
        channel = await self._connections.callers_channel(caller)
        return SqlOutbox(Session(channel, self._connections.tables, self._namespace), notify=self._notify_on(channel))

    def _notify_on(self, channel: Channel) -> Callable[[], Awaitable[object]] | None:
        """What notifies other processes when the transaction on this channel is committed, where the database can."""
        del channel
        return None

    def _new_transaction(self, connections: H, lease: Lease) -> SqlTransaction:
        return SqlTransaction(connections, self._namespace, lease)

    async def _read(self, verb: Verb[T]) -> T:
        return await self._submit(lambda: self._connections.read(self._namespace, verb))

    async def _write(self, verb: Verb[T]) -> T:
        return await self._submit(lambda: self._connections.perform(self._namespace, lambda db, _: verb(db)))

    async def _change(self, verb: Verb[T]) -> T:
        result = await self._submit(lambda: self._connections.perform(self._namespace, lambda db, _: verb(db), notify=True))
        self._wake_watchers()
        return result

    async def _record_and_wake(self, writes: Sequence[Write]) -> Sequence[Reply[Pulse]]:
        replies = await self._record_all(writes)
        if any(write.items for write in writes):
            self._lifecycle.wake(only_items=True)
        return replies

    async def _record_all(self, writes: Sequence[Write]) -> Sequence[Reply[Pulse]]:
        return await self._connections.perform(self._namespace, lambda db, _: recording.record_all(db, writes))

    async def _close_all(self, writes: Sequence[Write]) -> Sequence[Reply[builtins.list[Signal]]]:
        return await self._connections.perform(
            self._namespace, lambda db, is_repeated: closing.close_once(db, writes, is_repeated=is_repeated), notify=True
        )

    async def _close_and_wake(self, writes: Sequence[Write]) -> Sequence[Reply[builtins.list[Signal]]]:
        replies = await self._close_all(writes)
        self._wake_watchers()
        return replies

    async def _create_all(self, creations: Sequence[runs.RunCreation]) -> Sequence[Reply[Created | None]]:
        return await self._connections.perform(self._namespace, lambda db, _: runs.create_all(db, creations), notify=True)

    async def _create_or_find(self, creations: Sequence[runs.RunCreation]) -> Sequence[Reply[Created]]:
        new = await self._create_all(creations)
        replies = await runs.find_others(self._connections, self._namespace, creations, new)
        self._wake_watchers()
        return replies


async def _copy_for_loop(connections: H) -> LoopBatchers[H]:
    copy = await connections.copy_for_loop()
    copy.settle_here()
    return LoopBatchers(copy, copy.close)


async def _do_nothing() -> None:
    pass
