"""SQLiteStore: the contract on one file, with nothing but the standard library.

A verb runs on the database's writer thread, in a transaction that it shares with everything else that arrived meanwhile, or on
its reader thread. Most verbs are those of the SQL core (`SqlVerbs`); the ones that every step needs have SQL of their own
(`recording`, `creating`). The store itself holds no connection and belongs to no event loop. The arguments of a verb are copied
before it is handed over, since the thread may read them much later.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeAlias, TypeVar

from perdure.backends.base.address import path_text
from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.base.leases import Release, lease_microseconds, steps_by_lease, store_time
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.base.new_runs import check_inbox, check_journal, check_start
from perdure.backends.sql import claims, inbox
from perdure.backends.sql.dialect import SYNCHRONOUS_FULL
from perdure.backends.sql.rows import identity
from perdure.backends.sql.transaction import SqlOutbox
from perdure.backends.sql.verbs import SqlVerbs
from perdure.backends.sqlite import creating, process_leases, recording
from perdure.backends.sqlite.connection_thread import ConnectionThread
from perdure.backends.sqlite.database import Database, database_at
from perdure.backends.sqlite.outbox import open_outbox
from perdure.backends.sqlite.pending_call import PendingCall
from perdure.backends.sqlite.session import SqliteSession, SqliteTables, run_at_one_moment, run_verb, set_up_tables
from perdure.backends.sqlite.transaction import SQLiteTransaction, transaction
from perdure.backends.sqlite.writer_connection import WriterConnection
from perdure.errors import PersistenceError
from perdure.model.ids import check_namespace
from perdure.model.journal import Entry
from perdure.model.process_owner import Owners
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
from perdure.snapshots.save_load import SavesSnapshots
from perdure.store import Durability

P = ParamSpec("P")
T = TypeVar("T")
SqliteVerb: TypeAlias = Callable[[SqliteSession], Coroutine[Any, Any, T]]


class SQLiteStore(SqlVerbs, SavesSnapshots):
    """A store in one SQLite file, for all processes of one machine.

    With `synchronous="full"` what was acknowledged survives power loss; with "normal" a power loss may undo the last commits.
    `table` begins the names of the tables, `prefix` keeps runs of several users of the same tables apart.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        table: str = "perdure",
        prefix: str = "",
        synchronous: Literal["full", "normal"] = "full",
        auto_migrate: bool = True,
    ) -> None:
        if synchronous not in ("full", "normal"):
            raise ValueError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        self._tables = SqliteTables(table)
        self._namespace = check_namespace(prefix)
        self._auto_migrate = auto_migrate
        self._use(database_at(_check_path(path), full=synchronous == "full"))

    def _use(self, database: Database) -> None:
        self._database = database
        # The real path, the table stem (SQLite folds its case) and the prefix.
        self.key = ("sqlite", database.file.path, self._tables.stem.lower(), self._namespace)
        self._is_ready = False
        self._owners = Owners()
        self._lifecycle = Lifecycle(self._label)
        # A store that is dropped without being closed still releases the threads.
        self._release = weakref.finalize(self, database.abandon)
        self._release.atexit = False

    @property
    def _label(self) -> str:
        return f"SQLite store {self._database.file.path!r}"

    def __repr__(self) -> str:
        return f"SQLiteStore({self._database.file.path!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SQLiteStore cannot be pickled: send its path, and open a store on it in the other process")

    @property
    def durability(self) -> Durability:
        """Whether every commit waits for the disk."""
        in_force = self._database.writer.synchronous
        full = self._database.file.full if in_force is None else in_force >= SYNCHRONOUS_FULL
        return "disk" if full else "process"

    async def setup(self) -> None:
        """Create or upgrade the schema, also with `auto_migrate=False`."""
        with self._lifecycle:
            await self._set_up(allowed=True)
            self._is_ready = True

    async def close(self) -> None:
        """Wait for what was submitted, and close the file if no other store of this process uses it."""
        empty = self._lifecycle.close()
        if empty is None or self._release.detach() is None:
            return
        try:
            await asyncio.wrap_future(empty)
            await self._database.writer.drain()
        except asyncio.CancelledError:
            self._database.abandon()
            raise
        await self._database.close()

    def sibling(self) -> SQLiteStore:
        """Another handle on the same threads. Like this one it depends on no event loop."""
        sibling = object.__new__(type(self))
        sibling._tables = self._tables
        sibling._namespace = self._namespace
        sibling._auto_migrate = self._auto_migrate
        sibling._use(database_at(self._database.file.path, full=self._database.file.full))
        return sibling

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
        length, start = None if ttl is None else lease_microseconds(ttl), check_start(run)
        journal, rows = check_journal(entries), check_inbox(inbox)
        create = self._bind(creating.create, start, length, self._owners, now, journal, rows, created_at)
        return self._hand_over(PendingCall(create, wakes=True, is_certain=True, keeps_fences=True))

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there. The lease of a process that has ended does not prevent it."""
        journal, rows = check_journal(entries), check_inbox(inbox)
        await self._change(lambda db: process_leases.restore(db, run, journal, rows, self._owners, now))

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
        """Lease due runs. When nothing is due this is a read and takes no lock."""
        wanted = ClaimFilter.of(workflows, queues)
        request = ClaimRequest(wanted, max(limit, 0), lease_microseconds(ttl), "", now, suspects)
        owners = self._owners
        call = PendingCall(
            self._bind_verb(lambda db: process_leases.claim(db, request, owners)),
            probe=self._bind(run_at_one_moment, lambda db: process_leases.find_nothing_due(db, request, owners)),
        )
        with self._lifecycle:
            self._database.reader.start()  # first, as what was leased must be loaded
            result = await self._run(self._database.writer, call)
            loaded = await self._load(result.leased, now)
            return Claims(claims=loaded.claims, next_wake_at=result.next_wake_at, now=result.now)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run."""
        length = lease_microseconds(ttl)
        acquire = self._bind_verb(lambda db: process_leases.acquire(db, run_id, length, self._owners, now, due_only=due_only))
        with self._lifecycle:
            self._database.reader.start()
            leased = await self._run(self._database.writer, PendingCall(acquire))
            return None if leased is None else (await self._load([leased], now)).one()

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one transaction."""
        renewed, length, steps = tuple(leases), lease_microseconds(ttl), steps_by_lease(leases, running_steps)
        return await self._write(lambda db: process_leases.renew(db, renewed, length, steps, self._owners, now))

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
        await self._change(lambda db: claims.release(db, lease, release, self._time(now)))

    def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Awaitable[Pulse]:
        """Append to the journal: one fence, one insert per row, and a share of one commit."""
        record = recording.Record(self._tables, self._namespace, lease, tuple(entries), tuple(consume), tuple(items))
        return self._hand_over(PendingCall(record, wakes="items" if items else False, is_certain=True, keeps_fences=True))

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
        awaited = frozenset(waiting_for)
        suspend = self._bind(recording.suspend, lease, wake_at, awaited, tuple(entries), tuple(consume), now)
        return self._hand_over(PendingCall(suspend, wakes=True, is_certain=True))

    def finish(
        self,
        lease: Lease,
        status: EndStatus,
        outcome: bytes,
        *,
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> Awaitable[None]:
        """Record, end the run and notify its parent."""
        finish = self._bind(recording.finish, lease, status, outcome, tuple(entries), tuple(consume), now)
        return self._hand_over(PendingCall(finish, wakes=True, is_certain=True, keeps_fences=True))

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        of_signal = None if dedupe is None else identity(name, dedupe)  # no reply is lost here: only a dedupe marks a repetition
        return await self._change(lambda db: inbox.signal(db, run_id, name, payload, dedupe, of_signal, self._time(now)))

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._read_at_one_moment(lambda db: process_leases.due(db, limit, self._owners, now))

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        watcher = self._lifecycle.watch(items=items)  # from here on closing the store ends the wait
        try:
            with self._lifecycle:
                if not self._is_ready:
                    await self._be_ready()
                    return  # what happened during set-up may be what the caller waits for
                self._database.writer.put(watcher)
            await asyncio.wait([watcher.future], timeout=max(0.0, timeout))
        finally:
            watcher.future.cancel()  # by which the writer knows that it need not look for changes any more
            self._lifecycle.unwatch(watcher)

    @asynccontextmanager
    async def transaction(self, lease: Lease) -> AsyncIterator[SQLiteTransaction]:
        """A fenced transaction on a connection of its own; while it is open every other write to the file waits."""
        with self._lifecycle:
            await self._be_ready()
            async with transaction(self._database, self._session, lease) as opened:
                yield opened

    async def outbox(self, connection: Any) -> SqlOutbox:
        """The verbs for a transaction that is open on this connection of sqlite3 or aiosqlite to the same file."""
        with self._lifecycle:
            await self._be_ready()
            return await open_outbox(connection, self._tables, self._namespace, self._database.file.path)

    def _session(self, connection: WriterConnection) -> SqliteSession:
        return SqliteSession(connection, self._tables, self._namespace)

    def _bind(
        self, verb: Callable[Concatenate[SqliteSession, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[WriterConnection], T]:
        """The verb as a function of the connection that the thread gives it."""
        return lambda connection: verb(SqliteSession(connection, self._tables, self._namespace), *args, **kwargs)

    def _bind_verb(self, verb: SqliteVerb[T]) -> Callable[[WriterConnection], T]:
        """As `_bind`, for a verb of the SQL core."""
        return lambda connection: run_verb(verb(self._session(connection)))

    def _time(self, now: int | None) -> int:
        # The clock of this process: SQLite's own has only milliseconds.
        return store_time(now)

    async def _write(self, verb: SqliteVerb[T]) -> T:
        with self._lifecycle:
            return await self._run(self._database.writer, PendingCall(self._bind_verb(verb)))

    async def _change(self, verb: SqliteVerb[T]) -> T:
        with self._lifecycle:
            return await self._run(self._database.writer, PendingCall(self._bind_verb(verb), wakes=True))

    async def _read(self, verb: SqliteVerb[T]) -> T:
        with self._lifecycle:
            return await self._run(self._database.reader, PendingCall(self._bind_verb(verb)))

    async def _read_at_one_moment(self, verb: SqliteVerb[T]) -> T:
        """As `_read`, for verbs of several statements: a run that changes between them could be missed, or met twice."""
        with self._lifecycle:
            return await self._run(self._database.reader, PendingCall(self._bind(run_at_one_moment, verb)))

    async def _load(self, leased: Sequence[claims.LeasedRun], now: int | None) -> claims.LoadedRuns:
        """The claims for leased runs. Those that cannot be read are set aside."""
        if not leased:
            return claims.LoadedRuns([], [])
        loaded = await self._read_at_one_moment(lambda db: claims.load(db, leased))
        if loaded.damaged:
            with suppress(PersistenceError):  # then their leases expire by themselves; the others must reach their worker
                await self._write(lambda db: claims.set_aside_leased(db, loaded.damaged, self._time(now)))
        return loaded

    def _hand_over(self, call: PendingCall[T]) -> Awaitable[T]:
        """The result of a write of a run's driver: no coroutine around the call, as every step awaits one of these."""
        if not self._is_ready:
            return self._write_when_ready(call)
        try:
            self._lifecycle.hand_over(self._database.writer.put, call)
        except PersistenceError as closed:
            call.set_exception(closed)
        return call

    async def _write_when_ready(self, call: PendingCall[T]) -> T:
        with self._lifecycle:
            return await self._run(self._database.writer, call)

    async def _run(self, thread: ConnectionThread, call: PendingCall[T]) -> T:
        if not self._is_ready:
            await self._be_ready()
        thread.put(call)
        return await call

    async def _be_ready(self) -> None:
        if self._tables.stem not in self._database.ready:
            await self._set_up(allowed=self._auto_migrate)
        self._is_ready = True

    async def _set_up(self, *, allowed: bool) -> None:
        database = self._database
        database.file.may_create |= allowed
        call = PendingCall(partial(set_up_tables, tables=self._tables, label=self._label, allowed=allowed), alone=True)
        database.writer.put(call)
        await call
        database.ready.add(self._tables.stem)


def _check_path(path: str | Path) -> str:
    text = path_text(path, 'an SQLite store takes the path of a file, such as "app.db"')
    if not text or text == ":memory:" or "\0" in text:
        raise ValueError(f"path {path!r} must name a file; for a store without one use stores.memory()")
    return os.path.realpath(text)
