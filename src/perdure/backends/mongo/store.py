"""MongoStore: the contract on a MongoDB replica set, through pymongo's asynchronous client.

A verb runs on the event loop of the store's client (`connections`). Records, ends, suspensions and new runs, of which there are
many, go through batchers: one bulk of updates writes all that arrived while the one before it was under way. What a caller passes
in is copied before the verb is handed over, since the other loop may read it much later.
"""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

from perdure.backends.base.batching import Batcher, Reply
from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.base.leases import Release, lease_microseconds, new_token, steps_by_lease
from perdure.backends.base.new_runs import check_inbox, check_journal, check_start
from perdure.backends.base.server_store import ServerStore
from perdure.backends.mongo import claims, inbox, queues, reading, recording, runs, schedules, writes
from perdure.backends.mongo.address import address_of, check_source
from perdure.backends.mongo.change_stream import ChangeStream
from perdure.backends.mongo.connections import MongoConnections
from perdure.backends.mongo.errors import driver
from perdure.backends.mongo.schema import VERSION, Collections, check_stem
from perdure.errors import StoreCapabilityError
from perdure.model.durations import microseconds
from perdure.model.journal import Entry
from perdure.model.records import (
    END_STATUSES,
    Awaited,
    Claim,
    Claims,
    Created,
    EndStatus,
    Item,
    Lease,
    NewInput,
    NewRun,
    Pulse,
    QueueLimits,
    RunInfo,
    RunRow,
    Schedule,
    Signal,
    WorkerRow,
    WorkflowVersion,
    check_positive,
)
from perdure.model.run_filter import EVERY_RUN, RunFilter
from perdure.store import MISSING_PART, STANDARD_PARTS, Capability, Transaction

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient

P = ParamSpec("P")
T = TypeVar("T")


class MongoStore(ServerStore[MongoConnections]):
    """A store in a MongoDB database, for any number of processes and machines. It needs a replica set; one member is enough.

    It opens a client by the URL, or uses the `client` that is passed in, on that client's own event loop, and leaves it open. The
    database is the option, else the URL's path, else `perdure`. `collection` begins the names of the collections, `prefix` keeps
    runs of several users of the same collections apart.
    """

    # Of the collections: the store refuses those of another version when it opens them.
    schema_version: ClassVar[int] = VERSION

    def __init__(
        self,
        url: str | None = None,
        *,
        client: AsyncMongoClient[Any] | None = None,
        database: str | None = None,
        collection: str = "perdure",
        prefix: str = "",
        auto_migrate: bool = True,
    ) -> None:
        driver()
        check_source(url, client)
        address = address_of(url, client, database)
        connections = MongoConnections(address, check_stem(collection), url=url, client=client)
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    # Whether the last claim found nothing due, so that the next one probably does not either.
    _found_nothing = False

    def _on_attach(self) -> None:
        culprit = self._connections.is_caused_by_one_request
        self._change_stream = ChangeStream(self._connections, self._lifecycle)
        self._records: Batcher[writes.RunUpdate, Pulse] = Batcher(self._record_all, culprit)
        self._closings: Batcher[writes.RunUpdate, builtins.list[Signal]] = Batcher(self._close_all, culprit)
        self._inserts: Batcher[runs.RunInsert, Created | None] = Batcher(self._create_all, culprit)

    def _make_closer(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return partial(_close, self._connections, self._change_stream)

    def __repr__(self) -> str:
        return f"MongoStore('{self._connections.address.hosts}/{self._connections.address.database}')"

    @property
    def key(self) -> tuple[str, ...]:
        """Hosts, database, stem of the collections and prefix."""
        address = self._connections.address
        return ("mongodb", address.hosts, address.database, self._connections.stem, self._namespace)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Everything but transactions."""
        return STANDARD_PARTS | {"shared", "durable"}

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
        """Insert the run with its first entries and signals, or find it; with `ttl` a new one is leased at once."""
        length = None if ttl is None else lease_microseconds(ttl)
        journal, rows = check_journal(entries), check_inbox(inbox)
        insert = runs.run_insert(check_start(run), length, self._owner, journal, rows, created_at, now)
        return await self._submit(lambda: self._create(insert))

    async def _create(self, insert: runs.RunInsert) -> Created:
        while True:
            created = await self._inserts.put(insert)
            created = created or await self._connections.perform(self._namespace, lambda db, _: runs.find(db, insert))
            if created is not None:  # else it was there and was deleted meanwhile: once more
                return created

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        await self._do(runs.restore, run, check_journal(entries), check_inbox(inbox), now)

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
        request = ClaimRequest(ClaimFilter.of(workflows, queues), limit, lease_microseconds(ttl), self._owner, now, suspects)
        # A worker with nothing to do asks with one query.
        claimed: Claims | None = await self._do(claims.see_nothing_due, request) if self._found_nothing else None
        if claimed is None:
            claimed = await self._do(claims.claim, request)
        self._found_nothing = not claimed.claims
        return claimed

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, and load what it recorded."""
        length, secret = lease_microseconds(ttl), new_token()
        return await self._do(claims.acquire, run_id, length, self._owner, secret, now, due_only=due_only)

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one bulk. With a borrowed client that waits for its event loop, and says so."""
        current, length, steps = tuple(leases), lease_microseconds(ttl), steps_by_lease(leases, running_steps)
        return await self._submit_renewal(
            ttl, lambda: self._connections.perform(self._namespace, lambda db, _: claims.renew(db, current, length, steps, now))
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
        await self._do(claims.release, lease, Release(wake_at, problem, counts_attempt), now, new_token())

    def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Awaitable[Pulse]:
        """Append to the journal: one fenced update of the run's document, alone or in a bulk."""
        write = writes.record(lease, entries, consume, items)
        return self._enqueue(lambda: self._records, write)

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
        write = writes.suspend(lease, wake_at, waiting_for, entries, consume, now)
        return self._enqueue(lambda: self._closings, write)

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
        write = writes.finish(lease, status, outcome, entries, consume, now)
        return self._enqueue(lambda: self._closings, write)

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        """Let the run start over with another input."""
        await self._do(recording.continue_as, lease, new, now)

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        await self._do(runs.reopen, run_id, tuple(drop), now, new_token())

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        delivery = inbox.InboxDelivery(Signal(seq=0, name=name, payload=payload, dedupe=dedupe), new_token(), now)
        return await self._do_again(lambda db, again: inbox.signal(db, run_id, delivery, is_repeated=again))

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._do(runs.cancel, run_id, now)

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._do(runs.hold, run_id)

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        """Undo `hold`."""
        await self._do(runs.unhold, run_id, now)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._do(recording.report, lease, progress)

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._do(reading.get, run_id)

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        return await self._do(reading.journal, run_id, after)

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return await self._do(reading.inbox, run_id, after)

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""
        return await self._do(reading.items, run_id, stream, after, limit)

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> builtins.list[RunInfo]:
        """Runs, last changed first."""
        wanted = wanted.within(prefix)
        check_positive(limit, "limit")
        return await self._do(reading.list_runs, wanted, before, limit)

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        """How many runs there are."""
        return await self._do(reading.count, wanted)

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return await self._do(reading.due, limit, now)

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._do(runs.delete, run_id)

    async def purge(
        self,
        older_than: float,
        *,
        status: Collection[EndStatus] = END_STATUSES,
        workflow: str | None = None,
        limit: int = 1000,
        now: int | None = None,
    ) -> int:
        """Delete ended runs, oldest first."""
        age = microseconds(older_than, what="older_than")
        return await self._do(runs.purge, age, status, workflow, limit, now)

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        self._reopen_if_forked()
        await self._watch(self._change_stream, timeout, items=items)

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        """Insert or replace the worker, seen now."""
        await self._do(schedules.put_worker, worker_id, info, now)

    async def workers(self) -> Sequence[WorkerRow]:
        """All workers, by id."""
        return await self._do(schedules.workers)

    async def drop_worker(self, worker_id: str) -> None:
        """Remove the worker."""
        await self._do(schedules.drop_worker, worker_id)

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._do(schedules.put_schedule, schedule)

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        return await self._do(schedules.schedules)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._do_again(lambda db, again: schedules.drop_schedule(db, schedule_id, is_repeated=again))

    async def fire(
        self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None = None
    ) -> bool:
        """Move the schedule on and create its run, once."""
        if run is None:
            return await self._do(schedules.pass_over, schedule_id, expected_at, next_at, new_token())
        insert = runs.run_insert(check_start(run), None, self._owner, (), (), None, now)
        return await self._do(schedules.fire, schedule_id, expected_at, next_at, insert)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""
        is_news = await self._do_again(lambda db, again: queues.limit_queue(db, queue, limits, is_repeated=again))
        if is_news:
            await queues.until_it_is_known()

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return await self._do(queues.queue_limits)

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        """Refused: a step's own writes would be SQL."""
        raise StoreCapabilityError("mongodb", MISSING_PART["transaction"])

    async def _do(self, verb: Callable[Concatenate[Collections, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._do_again(lambda db, _: verb(db, *args, **kwargs))

    async def _do_again(self, verb: Callable[[Collections, bool], Awaitable[T]]) -> T:
        """As `_do`, for a verb that has to know whether it may have been done before."""
        return await self._submit(lambda: self._connections.perform(self._namespace, verb))

    async def _record_all(self, updates: Sequence[writes.RunUpdate]) -> Sequence[Reply[Pulse]]:
        return await self._connections.perform(self._namespace, lambda db, _: recording.record_all(db, updates))

    async def _close_all(self, updates: Sequence[writes.RunUpdate]) -> Sequence[Reply[builtins.list[Signal]]]:
        return await self._connections.perform(self._namespace, lambda db, _: recording.close_all(db, updates))

    async def _create_all(self, inserts: Sequence[runs.RunInsert]) -> Sequence[Reply[Created | None]]:
        return await self._connections.perform(self._namespace, lambda db, _: runs.create_all(db, inserts))


async def _close(connections: MongoConnections, change_stream: ChangeStream) -> None:
    await change_stream.close()
    await connections.close()
