"""SQLiteStore: the contract on one file, with nothing but the standard library.

Every verb is one function of a connection, run on the database's writer thread (inside a transaction it shares with whatever
else arrived meanwhile) or on its reader thread. The store itself holds no connection and belongs to no event loop. What a
caller passes in is copied before the verb is handed over, since the thread may look at it much later.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Concatenate, Literal, NoReturn, ParamSpec, TypeVar

from perdure.backends.base.leases import lease_microseconds
from perdure.backends.base.new_runs import checked_inbox, checked_journal, checked_start
from perdure.backends.base.process_owner import Owners
from perdure.backends.sqlite import claims, inbox, reading, recording, restoring, runs, schedules
from perdure.backends.sqlite.calls import Call, Watcher
from perdure.backends.sqlite.database import Database, database_at
from perdure.backends.sqlite.gate import Gate
from perdure.backends.sqlite.link import Link
from perdure.backends.sqlite.schema import Session, Tables, set_up
from perdure.backends.sqlite.transaction import SQLiteTransaction, transaction
from perdure.backends.sqlite.worker import Worker
from perdure.errors import PersistenceError
from perdure.model.durations import microseconds
from perdure.model.ids import check_namespace
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
from perdure.snapshots.save_load import SavesSnapshots
from perdure.store import STANDARD_PARTS, Capability, Durability

P = ParamSpec("P")
T = TypeVar("T")

_FULL = 2  # what PRAGMA synchronous answers for FULL


class SQLiteStore(SavesSnapshots):
    """A store in one SQLite file, for all processes of one machine.

    With `synchronous="full"` what was acknowledged survives power loss; with "normal" a power loss may take the last moments
    of it. `table` begins the names of the tables, `prefix` keeps runs of several users of the same tables apart.
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
        self._tables = Tables(table)
        self._namespace = check_namespace(prefix)
        self._auto_migrate = auto_migrate
        self._use(database_at(_checked_path(path), full=synchronous == "full"))

    def _use(self, database: Database) -> None:
        self._database = database
        # The real path, the table stem (SQLite folds its case) and the prefix.
        self.key = ("sqlite", database.file.path, self._tables.stem.lower(), self._namespace)
        self._is_ready = False
        self._owners = Owners()
        self._gate = Gate(database.file.path)
        # Also a store that is only dropped gives its share of the threads back.
        self._release = weakref.finalize(self, database.abandon)
        self._release.atexit = False

    def __repr__(self) -> str:
        return f"SQLiteStore({self._database.file.path!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SQLiteStore cannot be pickled: send its path, and open a store on it in the other process")

    @property
    def durability(self) -> Durability:
        """Whether every commit waits for the disk."""
        entries_in_force = self._database.writer.synchronous
        full = self._database.file.full if entries_in_force is None else entries_in_force >= _FULL
        return "disk" if full else "process"

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All there are."""
        return STANDARD_PARTS | {"shared", "durable", "transaction"}

    async def setup(self) -> None:
        """Create or upgrade the schema, also with `auto_migrate=False`."""
        with self._gate:
            await self._set_up(allowed=True)
            self._is_ready = True

    async def close(self) -> None:
        """Wait for what was submitted, and let go of the file if no other store of this process uses it."""
        empty = Watcher()
        if not self._gate.close(empty) or self._release.detach() is None:
            return
        try:
            await empty.future
            await self._database.writer.answered()
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
        length, start = None if ttl is None else lease_microseconds(ttl), checked_start(run)
        begun = runs.Begun(checked_journal(entries), checked_inbox(inbox), created_at)
        create = self._bound(runs.create, start, length, self._owners, now, begun)
        return self._driven(Call(create, wakes=True, is_certain=True, keeps_fences=True))

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there. A lease whose process is gone keeps nobody from that."""
        await self._change(restoring.restore, run, checked_journal(entries), checked_inbox(inbox), self._owners, now)

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[str],
        queues: Collection[str] | None = None,
        *,
        now: int | None = None,
    ) -> Claims:
        """Lease due runs. When nothing is due this is a read and takes no lock."""
        wanted = claims.Wanted.of(workflows, queues)
        call = Call(
            self._bound(claims.claim, limit, lease_microseconds(ttl), wanted, self._owners, now),
            probe=self._bound(claims.nothing_to_claim, limit, wanted, self._owners, now),
        )
        with self._gate:
            took = await self._answer(self._database.writer, call)
            return Claims(claims=await self._load(took.taken), next_wake_at=took.next_wake_at)

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run."""
        call = Call(self._bound(claims.acquire, run_id, lease_microseconds(ttl), self._owners, now, due_only=due_only))
        with self._gate:
            taken = await self._answer(self._database.writer, call)
            return None if taken is None else (await self._load([taken]))[0]

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one transaction."""
        return await self._write(claims.renew, tuple(leases), lease_microseconds(ttl), self._owners, now)

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        """Give the run back, due at once."""
        await self._change(claims.release, lease, now)

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
        return self._driven(Call(record, is_certain=True, keeps_fences=True))

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
        awaited = frozenset(waiting_for)
        suspend = self._bound(recording.suspend, lease, wake_at, awaited, tuple(entries), tuple(consume), now)
        return self._driven(Call(suspend, wakes=True, is_certain=True))

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
        """Record, end the run and tell its parent."""
        finish = self._bound(recording.finish, lease, status, outcome, tuple(entries), tuple(consume), now)
        return self._driven(Call(finish, wakes=True, is_certain=True, keeps_fences=True))

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        await self._change(runs.reopen, run_id, tuple(drop), now)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        return await self._change(inbox.signal, run_id, name, payload, dedupe, now)

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._change(runs.cancel, run_id, now)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._write(runs.hold, run_id, held=True)

    async def unhold(self, run_id: str) -> None:
        """Undo `hold`."""
        await self._change(runs.hold, run_id, held=False)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._write(recording.report, lease, progress)

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._read(runs.get, run_id)

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        return await self._read(reading.journal, run_id, after)

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return await self._read(inbox.unconsumed, run_id, after)

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
        return await self._read(reading.at_one_moment, reading.list_runs, prefix, status, workflow, before, limit)

    async def count(self, *, prefix: str = "", status: Status | None = None, workflow: str | None = None) -> int:
        """How many runs there are."""
        return await self._read(reading.at_one_moment, reading.count, prefix, status, workflow)

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._read(reading.at_one_moment, reading.due, limit, self._owners, now)

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._change(runs.delete, run_id)

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        """Delete ended runs, oldest first."""
        return await self._write(reading.purge, microseconds(older_than, what="older_than"), limit, now)

    async def watch(self, timeout: float) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        watcher = Watcher()
        try:
            with self._gate:
                self._gate.watchers.add(watcher)  # from here on closing the store ends the wait
                if not self._is_ready:
                    await self._be_ready()
                    return  # whatever happened during set-up may be what the caller waits for
                self._database.writer.put(watcher)
            await asyncio.wait([watcher.future], timeout=max(0.0, timeout))
        finally:
            watcher.left = True
            self._gate.watchers.discard(watcher)

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._change(schedules.put_schedule, schedule)

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        return await self._read(schedules.schedules)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._write(schedules.drop_schedule, schedule_id)

    async def fire(self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun, now: int | None = None) -> bool:
        """Move the schedule on and create its run, once."""
        return await self._change(schedules.fire, schedule_id, expected_at, next_at, checked_start(run), now)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""
        await self._change(schedules.limit_queue, queue, limits)

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return await self._read(schedules.queue_limits)

    @asynccontextmanager
    async def transaction(self, lease: Lease) -> AsyncIterator[SQLiteTransaction]:
        """A fenced transaction on a connection of its own; while it is open every other write to the file waits."""
        with self._gate:
            await self._be_ready()
            async with transaction(self._database, self._session, lease) as under_way:
                yield under_way

    def _session(self, link: Link) -> Session:
        return Session(link, self._tables, self._namespace)

    def _bound(self, verb: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> Callable[[Link], T]:
        return lambda link: verb(Session(link, self._tables, self._namespace), *args, **kwargs)

    async def _write(self, verb: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._gate:
            return await self._answer(self._database.writer, Call(self._bound(verb, *args, **kwargs)))

    async def _change(self, verb: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A write after which something may be due or ended: it wakes those who watch."""
        with self._gate:
            return await self._answer(self._database.writer, Call(self._bound(verb, *args, **kwargs), wakes=True))

    def _driven(self, call: Call[T]) -> Awaitable[T]:
        """The answer to whoever drives a run: just a future without a coroutine around it, as every step waits for one."""
        if not self._is_ready:
            return self._written_when_ready(call)
        try:
            self._gate.hand_over(self._database.writer.put, call)
        except PersistenceError as closed:
            call.set_exception(closed)
        return call

    async def _written_when_ready(self, call: Call[T]) -> T:
        with self._gate:
            return await self._answer(self._database.writer, call)

    async def _read(self, verb: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._gate:
            return await self._answer(self._database.reader, Call(self._bound(verb, *args, **kwargs)))

    async def _load(self, taken: Sequence[claims.Taken]) -> builtins.list[Claim]:
        if not taken:
            return []
        return await self._answer(self._database.reader, Call(self._bound(reading.at_one_moment, reading.load, taken)))

    async def _answer(self, worker: Worker, call: Call[T]) -> T:
        if not self._is_ready:
            await self._be_ready()
        worker.put(call)
        return await call

    async def _be_ready(self) -> None:
        if self._tables.stem not in self._database.ready:
            await self._set_up(allowed=self._auto_migrate)
        self._is_ready = True

    async def _set_up(self, *, allowed: bool) -> None:
        database = self._database
        database.file.may_create |= allowed
        call = Call(partial(set_up, tables=self._tables, path=database.file.path, allowed=allowed), alone=True)
        database.writer.put(call)
        await call
        database.ready.add(self._tables.stem)


def _checked_path(path: str | Path) -> str:
    text = os.fspath(path)
    if not isinstance(text, str) or not text or text == ":memory:" or "\0" in text:
        raise ValueError(f"path {path!r} must name a file; for a store without one use stores.memory()")
    return os.path.realpath(text)
