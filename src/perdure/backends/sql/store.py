"""SqlStore: the contract over statements, whoever carries them to which database.

A verb is carried to the event loop of the store's connections (`connections`) and answered from there, in one transaction. What
holders write often (records, ends, sleeps) and what begins runs goes through batchers, where one transaction serves all that
arrived while the one before it was under way. What a caller passes in is copied before the verb is handed over.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from perdure.backends.base.batching import Batcher, Reply, Request
from perdure.backends.base.claim_filter import ClaimFilter, ClaimRequest
from perdure.backends.base.leases import lease_microseconds, new_token
from perdure.backends.base.new_runs import checked_inbox, checked_journal, checked_start
from perdure.backends.base.server_store import ServerStore
from perdure.backends.sql import claims, closing, inbox, reading, recording, runs, schedules
from perdure.backends.sql.recording import Write
from perdure.backends.sql.rows import identity
from perdure.backends.sql.session import Session, SqlConnections
from perdure.backends.sql.transaction import SqlTransaction, open_fenced
from perdure.model.durations import microseconds
from perdure.model.ids import check_id
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
H = TypeVar("H", bound=SqlConnections)
Q = TypeVar("Q", bound=Request)
A = TypeVar("A")

POLL_EVERY: Final = 1.0  # seconds; nobody tells of what other processes do, so a watch ends and its caller looks for itself


class Batchers(NamedTuple):
    """What writes records, ends and sleeps, and new runs: each many in one transaction."""

    records: Batcher[Write, Pulse]
    closings: Batcher[Write, list[Signal]]
    creations: Batcher[runs.RunCreation, Created]


class SqlStore(ServerStore[H]):
    """A store in an SQL database. A subclass says what it is called and which it is: `key`, `__repr__`."""

    def _on_attach(self) -> None:
        culprit = self._connections.is_caused_by_one_request
        self._batchers = Batchers(
            Batcher(self._record_all, culprit), Batcher(self._close_and_wake, culprit), Batcher(self._create_or_find, culprit)
        )

    def _write(self, batcher: Callable[[Batchers], Batcher[Q, A]], request: Q) -> Awaitable[A]:
        """The answer of one of the batchers."""
        return self._enqueue(lambda: batcher(self._batchers), request)

    def _wake_watchers(self) -> None:
        """Called after each change that may have made a run due or ended it."""
        self._lifecycle.wake()

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
        start = runs.check_names(checked_start(run))
        creation = runs.RunCreation(start, length, new_token(), self._owner, journal, rows, created_at, now)
        return self._write(lambda batchers: batchers.creations, creation)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        runs.check_names(run)
        journal, rows = checked_journal(entries), checked_inbox(inbox)
        while not await self._change(runs.restore, run, journal, rows, now):
            pass

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
        length = lease_microseconds(ttl)
        request = ClaimRequest(ClaimFilter.of(workflows, queues), max(limit, 0), length, self._owner, now)
        return await self._submit(lambda: self._claim(request))

    async def _claim(self, request: ClaimRequest) -> Claims:
        result = await self._connections.perform(self._namespace, lambda db, _: claims.claim(db, request))
        return Claims(claims=await self._load(result.leased), next_wake_at=result.next_wake_at)

    async def _load(self, leased: Sequence[claims.LeasedRun]) -> builtins.list[Claim]:
        return await self._connections.read(self._namespace, lambda db: claims.load(db, leased)) if leased else []

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, and load what it recorded."""
        length = lease_microseconds(ttl)
        return await self._submit(lambda: self._acquire(run_id, length, now, due_only=due_only))

    async def _acquire(self, run_id: str, length: int, now: int | None, *, due_only: bool) -> Claim | None:
        token = new_token()  # the same for every attempt, so that one whose reply was lost is recognised
        leased = await self._connections.perform(
            self._namespace, lambda db, _: claims.acquire(db, run_id, length, self._owner, token, now, due_only=due_only)
        )
        return None if leased is None else (await self._load([leased]))[0]

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one transaction. It waits for no other."""
        given, length = tuple(leases), lease_microseconds(ttl)
        return await self._submit_renewal(ttl, lambda: claims.renew(self._connections, self._namespace, given, length, now))

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        """Give the run back, due at once."""
        await self._submit(
            lambda: self._connections.perform(
                self._namespace, lambda db, again: claims.release(db, lease, now, is_repeated=again), notify=True
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
        write = Write.suspend(lease, wake_at, waiting_for, entries, consume, now)
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
        write = Write.finish(lease, status, outcome, entries, consume, now)
        return self._write(lambda batchers: batchers.closings, write)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        await self._change(runs.reopen, run_id, tuple(drop), now)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        return await self._change(inbox.signal, run_id, name, payload, dedupe, identity(name, dedupe), now)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._change(runs.cancel, run_id, now)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._change(runs.hold, run_id, held=True)

    async def unhold(self, run_id: str) -> None:
        """Undo `hold`."""
        await self._change(runs.hold, run_id, held=False)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._do(recording.report, lease, progress)

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._read(runs.get, run_id)

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        return await self._read(reading.journal, run_id, after)

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return await self._read(inbox.read, run_id, after)

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""
        return await self._read(reading.items, run_id, stream, after, limit)

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
        return await self._read(reading.list_runs, prefix, status, workflow, before, limit)

    async def count(self, *, prefix: str = "", status: Status | None = None, workflow: str | None = None) -> int:
        """How many runs there are."""
        return await self._read(reading.count, prefix, status, workflow)

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._read(reading.due, limit, now)

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._change(runs.delete, run_id)

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        """Delete ended runs, oldest first."""
        return await self._do(runs.purge, microseconds(older_than, what="older_than"), limit, now)

    async def watch(self, timeout: float) -> None:
        """Return when this handle changed what may be due, after `timeout` seconds, or after `POLL_EVERY`: others may have."""
        self._reopen_if_forked()
        watcher = self._lifecycle.watch()  # from here on closing the store ends the wait
        try:
            await asyncio.wait([watcher.future], timeout=max(0.0, min(timeout, POLL_EVERY)))
        finally:
            self._lifecycle.unwatch(watcher)

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        check_id(schedule.id, "a schedule's id")
        await self._change(schedules.put_schedule, schedule)

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        return await self._read(schedules.schedules)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._do(schedules.drop_schedule, schedule_id)

    async def fire(self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun, now: int | None = None) -> bool:
        """Move the schedule on and create its run, once."""
        start = runs.check_names(checked_start(run))
        return await self._change(schedules.fire, schedule_id, expected_at, next_at, start, now)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""
        await self._change(schedules.limit_queue, check_id(queue, "a queue's name"), limits)

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return await self._read(schedules.queue_limits)

    @asynccontextmanager
    async def transaction(self, lease: Lease) -> AsyncIterator[SqlTransaction]:
        """A fenced transaction; while it is open nobody takes the run over."""
        self._enter()
        try:
            await self._connections.run(self._connections.ensure_open(allowed=self._auto_migrate))
            async with open_fenced(self._new_transaction(lease)) as transaction:
                yield transaction
        finally:
            self._lifecycle.leave()

    def _new_transaction(self, lease: Lease) -> SqlTransaction:
        return SqlTransaction(self._connections, self._namespace, lease)

    async def _do(self, verb: Callable[Concatenate[Session, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._submit(lambda: self._connections.perform(self._namespace, lambda db, _: verb(db, *args, **kwargs)))

    async def _change(self, verb: Callable[Concatenate[Session, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `_do`, for what may make a run due or end it: it wakes those who watch."""
        given = await self._submit(
            lambda: self._connections.perform(self._namespace, lambda db, _: verb(db, *args, **kwargs), notify=True)
        )
        self._wake_watchers()
        return given

    async def _read(self, verb: Callable[Concatenate[Session, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._submit(lambda: self._connections.read(self._namespace, lambda db: verb(db, *args, **kwargs)))

    async def _record_all(self, asked: Sequence[Write]) -> Sequence[Reply[Pulse]]:
        return await self._connections.perform(self._namespace, lambda db, _: recording.record_all(db, asked))

    async def _close_all(self, asked: Sequence[Write]) -> Sequence[Reply[builtins.list[Signal]]]:
        return await self._connections.perform(
            self._namespace, lambda db, is_repeated: closing.close_once(db, asked, is_repeated=is_repeated), notify=True
        )

    async def _close_and_wake(self, asked: Sequence[Write]) -> Sequence[Reply[builtins.list[Signal]]]:
        answers = await self._close_all(asked)
        self._wake_watchers()
        return answers

    async def _create_all(self, creations: Sequence[runs.RunCreation]) -> Sequence[Reply[Created | None]]:
        return await self._connections.perform(self._namespace, lambda db, _: runs.create_all(db, creations), notify=True)

    async def _create_or_find(self, creations: Sequence[runs.RunCreation]) -> Sequence[Reply[Created]]:
        made = await self._create_all(creations)
        created = await runs.find_others(self._connections, self._namespace, creations, made)
        self._wake_watchers()
        return created
