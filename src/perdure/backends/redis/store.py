"""RedisStore: the contract on a Redis or Valkey server, as Lua scripts.

Every verb is one script. The server runs one script at a time, so a script checks the fence and writes in one atomic step. This
class says which script with which arguments, and what its reply means; see `keys` for where runs lie, `connections` for how
scripts are sent, and `scripts/prelude.lua` for what they share. All scripts go through one batcher: what arrives while a pipeline
is under way is sent in the next, so a thousand runs that record at once pay for a handful of round trips.
"""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, Final

from perdure.backends.base.batching import Batcher
from perdure.backends.base.claim_rules import ClaimFilter
from perdure.backends.base.damaged_runs import raise_damage, report, set_aside
from perdure.backends.base.duplicate_records import unique_entries, unique_items
from perdure.backends.base.leases import lease_microseconds, new_token, steps_by_lease, store_time
from perdure.backends.base.new_runs import check_inbox, check_journal, check_start, row_after_create
from perdure.backends.base.server_store import ServerStore
from perdure.backends.redis import rows
from perdure.backends.redis.address import address_of_client, check_source, parse_address
from perdure.backends.redis.connections import RedisConnections
from perdure.backends.redis.driver import driver
from perdure.backends.redis.keys import Keys
from perdure.backends.redis.replies import (
    LINE_ARGS,
    ListPage,
    arrived_signals_from,
    check_holder,
    check_reply,
    page_from,
    pulse_from,
    row_from,
    to_restore,
)
from perdure.backends.redis.rows import Arg, as_list, as_lists, filter_args, optional
from perdure.backends.redis.scripts import SCRIPTS, ScriptCall
from perdure.backends.redis.subscription import RedisSubscription
from perdure.errors import PerdureError, SnapshotCorrupt, StoreCapabilityError
from perdure.model.durations import microseconds
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import (
    END_STATUSES,
    SUSPECT_ATTEMPTS,
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

# The parts of a run that a record touches.
# How many runs one call looks at for their metadata: a script keeps the server from everything else.
_METADATA_PAGE: Final = 1000
_RECORDED: Final = ("run", "steps", "inbox", "consumed")


class RedisStore(ServerStore[RedisConnections]):
    """A store on a Redis or Valkey server, for any number of processes and machines.

    It takes a URL, or a `client` of `redis.asyncio` that stays the caller's: it is used on the event loop that runs when the
    store is made (or first used), and not closed. `table` begins the names of all keys, `prefix` keeps several users of one
    server apart. With `cluster=True` the URL is that of any node of a cluster; all of one table and prefix lies on one of them.
    With `appendonly yes` and `appendfsync always` what was acknowledged survives power loss.
    """

    def __init__(
        self, url: str | None = None, *, client: Any = None, table: str = "perdure", prefix: str = "", cluster: bool = False
    ) -> None:
        driver()
        check_source(url, client, cluster=cluster)
        keys = Keys(table, prefix)
        address = address_of_client(client) if url is None else parse_address(url)
        connections = RedisConnections(address, keys, url=url, client=client, cluster=cluster)
        # Nothing has to be created first, so only an explicit `setup` asks the server again.
        super().__init__(connections, prefix=prefix, auto_migrate=False)

    def _on_attach(self) -> None:
        self._keys = self._connections.keys
        self._subscription = RedisSubscription(self._connections, self._lifecycle)
        self._scripts: Batcher[ScriptCall, Any] = Batcher(self._connections.execute, self._connections.is_caused_by_one_request)

    def _make_closer(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return partial(_close, self._connections, self._subscription)

    def __repr__(self) -> str:
        return f"RedisStore({self._connections.label!r}, table={self._keys.stem!r}, prefix={self._keys.prefix!r})"

    @property
    def key(self) -> tuple[str, ...]:
        """Host, port, database, table stem and prefix."""
        return ("redis", *self._connections.address, self._keys.stem, self._keys.prefix)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Everything but transactions; `durable` once the server said that it has an append-only file."""
        info = self._connections.server_info
        is_durable = info is not None and info.append_only
        return STANDARD_PARTS | ({"shared", "durable"} if is_durable else {"shared"})

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
        """Insert the run with its first entries and signals, or find it; `ttl` leases a new one whose queue has no limits."""
        new, journal, signals = check_start(run), check_journal(entries), check_inbox(inbox)
        length = None if ttl is None else lease_microseconds(ttl)
        token = new_token()
        args = [optional(now), new.id, optional(length), token, self._owner, optional(created_at)]
        lists = [rows.columns_of(new), rows.entries_of(journal), rows.inbox_of(signals), rows.dedupes_of(signals)]
        kind, whole = await self._call("create", self._keys.of(new.id), [*args, *as_lists(lists)])
        row = row_from(whole[0])
        if kind == b"found":
            return Created(run=row_after_create(row, new, row.updated_at), is_new=False)
        return Created(run=row, is_new=True, claim=rows.claim_from(whole) if rows.is_leased_with(token, whole[0]) else None)

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        journal, signals = check_journal(entries), check_inbox(inbox)
        row, wake = to_restore(run, signals)
        lists = [rows.columns_of(row), rows.entries_of(journal), rows.inbox_of(signals), rows.dedupes_of(signals)]
        await self._change_once("restore", run.id, [optional(now)], [wake, *as_lists(lists)])

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
        """Lease due runs, with everything of each, in one script."""
        token = new_token()
        args: builtins.list[Arg] = [optional(now), max(limit, 0), lease_microseconds(ttl), token, self._owner]
        args += [optional(suspects), SUSPECT_ATTEMPTS]
        wanted = ClaimFilter.of(workflows, queues)
        versions: builtins.list[Arg] = [part for workflow in wanted.workflows for part in workflow]
        names = [*as_list(versions), "" if wanted.queues is None else 1, *as_list([*(wanted.queues or ())])]
        at, next_wake_at, taken, passed_over = await self._call("claim", [self._keys.mark(token)], [*args, *names])
        for run_id in passed_over:
            report(SnapshotCorrupt(run_id.decode(errors="replace"), "the row", "its columns are not those of the index"))
        claims: builtins.list[Claim] = []
        for whole in taken:
            with suppress(SnapshotCorrupt):
                claims.append(await self._claim_of(whole, now))
        return Claims(claims=claims, next_wake_at=int(next_wake_at) if next_wake_at else None, now=int(at))

    async def _claim_of(self, whole: Sequence[Any], now: int | None) -> Claim:
        """The claim on a leased run. One that cannot be read is set aside, and `SnapshotCorrupt` is raised."""
        try:
            return rows.claim_from(whole)
        except SnapshotCorrupt as problem:
            release = set_aside(problem, store_time(now))
            with suppress(PerdureError):  # then its lease expires by itself; the others must reach their worker
                await self.release(rows.lease_from(whole[0]), wake_at=release.wake_at, problem=release.problem, now=now)
            raise

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run."""
        args = [optional(now), run_id, lease_microseconds(ttl), new_token(), self._owner, int(due_only)]
        reply = check_reply(await self._call("acquire", self._keys.of(run_id), args), run_id)
        return await self._claim_of(reply[1], now) if reply[0] == b"ok" else None

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one script."""
        length, mine = lease_microseconds(ttl), tuple(leases)
        keys = [key for lease in mine for key in self._keys.of(lease.run_id, "run")]
        steps = steps_by_lease(mine, running_steps)
        flat: builtins.list[Arg] = [
            part for lease in mine for part in (lease.run_id, lease.epoch, lease.token, steps.get(lease, b""))
        ]
        call = self._script("renew", keys, [optional(now), length, *as_list(flat)])
        replies = await self._submit_renewal(ttl, lambda: self._scripts.put(call))
        return [pulse_from(reply) if reply[0] == b"ok" else None for reply in replies]

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
        args: builtins.list[Arg] = [optional(wake_at), optional(problem), int(counts_attempt)]
        call = self._holders_call("release", lease, [optional(now), new_token()], args, ["run"])
        await self._run(call)

    def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Awaitable[Pulse]:
        """Append to the journal: one round trip, shared with whatever else is recorded at the time."""
        lists: builtins.list[Sequence[Arg]] = [
            rows.entries_of(unique_entries(lease.run_id, entries)),
            [*consume],
            rows.items_of(unique_items(lease.run_id, items)),
        ]
        parts = ["run", "steps", *(["inbox", "consumed"] if consume else []), *(["items", "streams"] if items else [])]
        call = self._holders_call("record", lease, [], as_lists(lists), parts, pulse_from)
        return self._enqueue(lambda: self._scripts, call)

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
        lists = as_lists([rows.entries_of(unique_entries(lease.run_id, entries)), [*consume]])
        args = [optional(wake_at), rows.awaited_bytes(waiting_for), *lists]
        call = self._holders_call("suspend", lease, [optional(now), new_token()], args, _RECORDED, arrived_signals_from)
        return self._enqueue(lambda: self._scripts, call)

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
        """Record, end the run and notify its parent, which is in the same slot."""
        args = [status, outcome, *as_lists([rows.entries_of(unique_entries(lease.run_id, entries)), [*consume]])]
        call = self._holders_call("finish", lease, [optional(now), new_token()], args, _RECORDED)
        return self._enqueue(lambda: self._scripts, call)

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        """Let the run start over with another input."""
        args = [new.input, new.input_hash, new.seed, optional(new.definition_hash), optional(new.deadline)]
        parts = ("run", "steps", "consumed", "inbox")
        await self._run(self._holders_call("continue_as", lease, [optional(now), new_token()], args, parts))

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        rest = rows.entry_rest(drop_entry(0, drop, 0, 0))
        await self._change_once("reopen", run_id, [optional(now)], [rest], "run", "steps")

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        args: builtins.list[Arg] = [name, payload, int(dedupe is not None), optional(dedupe)]
        reply = await self._change_once("signal", run_id, [optional(now)], args, "run", "inbox", "dedupes")
        return int(reply[1])

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._change_once("cancel", run_id, [optional(now)], [], "run")

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        check_reply(await self._call("hold", self._keys.of(run_id, "run"), ["", run_id, 1]), run_id)

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        """Undo `hold`."""
        check_reply(await self._call("hold", self._keys.of(run_id, "run"), [optional(now), run_id, 0]), run_id)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._run(self._holders_call("report", lease, [], [progress], ["run"]))

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return rows.run_from(await self._call("get", self._keys.of(run_id, "run"), [run_id]))

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        stored = await self._call("journal", self._keys.of(run_id, "steps"), [run_id, after])
        with raise_damage(run_id, "the journal"):
            return [rows.entry_from(entry) for entry in stored]

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        stored = await self._call("inbox", self._keys.of(run_id, "inbox"), [run_id, after])
        with raise_damage(run_id, "the inbox"):
            return [rows.signal_from(row) for row in stored]

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""
        args: builtins.list[Arg] = [run_id, stream, after, limit]
        return [rows.item_from(stream, item) for item in await self._call("items", self._keys.of(run_id, "items"), args)]

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> builtins.list[RunInfo]:
        """Runs, last changed first."""
        wanted = wanted.within(prefix)
        check_positive(limit, "limit")
        found: builtins.list[RunInfo] = []
        while len(found) < limit:
            size = limit if wanted.metadata is None else _METADATA_PAGE
            page = await self._page(wanted, before, size)
            found += [line.info for line in page.lines if wanted.has_metadata(line.metadata)]
            before = page.last
            if wanted.metadata is None or before is None:
                break
        return found[:limit]

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        """How many runs there are."""
        if wanted.metadata is None:
            return int(await self._call("count", (), filter_args(wanted)))
        total, before = 0, None
        while True:
            page = await self._page(wanted, before, _METADATA_PAGE)
            total += sum(wanted.has_metadata(line.metadata) for line in page.lines)
            before = page.last
            if before is None:
                return total

    async def _page(self, wanted: RunFilter, before: tuple[int, str] | None, size: int) -> ListPage:
        """The next `size` runs of a list, without those whose metadata cannot match."""
        seen: tuple[Arg, Arg] = ("", "") if before is None else before
        args = [*filter_args(wanted), *seen, size, *LINE_ARGS]
        return page_from(await self._call("list", (), args), size)

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return [run_id.decode() for run_id in await self._call("due", (), [optional(now), max(limit, 0)])]

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._change_once("delete", run_id, [], [])

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
        args = [optional(now), age, max(limit, 0), len(status), *status, int(workflow is not None), optional(workflow)]
        return int(await self._call("purge", (), args))

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        self._reopen_if_forked()
        await self._watch(self._subscription, timeout, items=items)

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        """Insert or replace the worker, seen now."""
        await self._call("put_worker", [self._keys.workers], [optional(now), worker_id, info])

    async def workers(self) -> Sequence[WorkerRow]:
        """All workers, by id."""
        stored = await self._call("workers", [self._keys.workers], [])
        return [rows.worker_from(worker_id, data) for worker_id, data in sorted(rows.pairs(stored))]

    async def drop_worker(self, worker_id: str) -> None:
        """Remove the worker."""
        await self._call("drop_worker", [self._keys.workers], [worker_id])

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._call("put_schedule", [self._keys.schedules], [schedule.id, rows.schedule_bytes(schedule)])

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        stored = await self._call("schedules", [self._keys.schedules], [])
        return [rows.schedule_from(schedule_id, data) for schedule_id, data in sorted(rows.pairs(stored))]

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        call = new_token()
        return bool(await self._call("drop_schedule", [self._keys.schedules, self._keys.mark(call)], [call, schedule_id]))

    async def fire(
        self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None = None
    ) -> bool:
        """Move the schedule on and create its run, once."""
        call, keys = new_token(), [self._keys.schedules]
        args: builtins.list[Arg] = [optional(now), call, schedule_id, expected_at, optional(next_at)]
        if run is None:
            args += ["", *as_list([])]
            keys += [self._keys.mark(call)]
        else:
            new = check_start(run)
            args += [new.id, *as_list(rows.columns_of(new))]
            keys += [self._keys.mark(call), *self._keys.of(new.id)]
        reply = await self._call("fire", keys, args)
        return bool(reply[0] == b"ok")

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Replace the limits of a queue."""
        await self._call("limit_queue", [self._keys.limits, self._keys.starts], [queue, rows.limits_text(limits)])

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        stored = await self._call("queue_limits", [self._keys.limits], [])
        return {queue.decode(): rows.limits_from(limits) for queue, limits in rows.pairs(stored)}

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        """Refused: what a step writes elsewhere cannot be one with a script."""
        raise StoreCapabilityError("redis", MISSING_PART["transaction"])

    async def _change_once(
        self, verb: str, run_id: str, before: Sequence[Arg], after: Sequence[Arg], *parts: str
    ) -> builtins.list[Any]:
        """A verb that needs no lease. It leaves a mark, so that a repetition does nothing."""
        token = new_token()
        keys = [self._keys.mark(token), *self._keys.of(run_id, *parts)]
        return check_reply(await self._call(verb, keys, [*before, token, run_id, *after]), run_id)

    def _holders_call(
        self,
        verb: str,
        lease: Lease,
        before: Sequence[Arg],
        after: Sequence[Arg],
        parts: Sequence[str],
        read: Callable[[builtins.list[Any]], object] = lambda _: None,
    ) -> ScriptCall:
        """A call for the holder of the lease; `read` makes its result of the reply. Raises `LeaseLost` where that is lost."""
        args = [*before, lease.run_id, lease.epoch, lease.token, *after]
        return self._script(verb, self._keys.of(lease.run_id, *parts), args, lambda reply: read(check_holder(reply, lease)))

    def _script(
        self, verb: str, keys: Sequence[str], args: Sequence[Arg], read: Callable[[Any], Any] = lambda reply: reply
    ) -> ScriptCall:
        return ScriptCall(SCRIPTS[verb], [self._keys.root, *keys], args, read)

    async def _call(self, verb: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        return await self._run(self._script(verb, keys, args))

    async def _run(self, call: ScriptCall) -> Any:
        """The result of the call. A caller that is cancelled stops waiting; the script runs all the same."""
        return await self._submit(lambda: _result_of(self._scripts, call))


async def _result_of(scripts: Batcher[ScriptCall, Any], call: ScriptCall) -> Any:
    return await scripts.put(call)


async def _close(connections: RedisConnections, subscription: RedisSubscription) -> None:
    await subscription.close()
    await connections.close()
