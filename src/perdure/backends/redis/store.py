"""RedisStore: the contract on a Redis or Valkey server, as Lua scripts.

Every verb is one script, which runs alone on the server: it looks at the fence and writes in one step, and nobody sees half of
it. This class says which script with which arguments, and what its reply means; see `keys` for where runs lie, `lane` for how
scripts get there, and `scripts/prelude.lua` for what they share.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import socket
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, NoReturn

from perdure.backends.base.leases import lease_microseconds, new_token
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.base.new_runs import checked_inbox, checked_journal, checked_start, found_row
from perdure.backends.redis import rows
from perdure.backends.redis.calls import Call
from perdure.backends.redis.changes import Changes
from perdure.backends.redis.client_loop import OURS, CallersLoop
from perdure.backends.redis.driver import address_of_client, driver, open_client, parse_address
from perdure.backends.redis.keys import Keys
from perdure.backends.redis.lane import Batcher
from perdure.backends.redis.replies import checked, line_from, pulse_from, row_from, to_restore
from perdure.backends.redis.rows import Arg, all_counted, counted, optional
from perdure.backends.redis.scripts import SCRIPTS
from perdure.backends.redis.server_info import FORMAT, ServerInfo, check, fsync_policy, server_info_from
from perdure.errors import LeaseLost, StoreCapabilityError
from perdure.model.durations import microseconds
from perdure.model.journal import Entry, drop_entry
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
from perdure.store import STANDARD_PARTS, Capability, Durability, Transaction

_HOST: Final = socket.gethostname()


class RedisStore(SavesSnapshots):
    """A store on a Redis or Valkey server, for any number of processes and machines.

    It takes a URL, or a `client` of `redis.asyncio` that stays the caller's: it is used on the event loop that runs when the
    store is made (or first used), and not closed. `table` begins the names of all keys, `prefix` keeps several users of one
    server apart. With `cluster=True` the URL is that of any node of a cluster; all of one table and prefix lies on one of them.
    With `appendonly yes` and `appendfsync always` what was acknowledged survives power loss.
    """

    def __init__(
        self, url: str | None = None, *, client: Any = None, table: str = "perdure", prefix: str = "", cluster: bool = False
    ) -> None:
        if (url is None) == (client is None):
            raise ValueError("pass either the URL of a Redis server or client=")
        driver()
        keys = Keys(table, prefix)
        if url is None:
            self._use(keys, Batcher(lambda: client, CallersLoop(), address_of_client(client), owned=False))
        else:
            make = partial(open_client, url, cluster=cluster)
            self._use(keys, Batcher(make, OURS, parse_address(url), owned=True))

    def _use(self, keys: Keys, lane: Batcher) -> None:
        self._keys = keys
        self._place = lane.where
        self._lane = lane
        self._changes = Changes(lane, keys.channel)
        self._lifecycle = Lifecycle(str(lane.where))
        self._facts: ServerInfo | None = None
        # Also a store that is only dropped gives its connections back.
        self._release = weakref.finalize(self, lane.abandon, self._changes.close)
        self._release.atexit = False

    def __repr__(self) -> str:
        return f"RedisStore({str(self._place)!r}, table={self._keys.stem!r}, prefix={self._keys.prefix!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RedisStore cannot be pickled: send its URL, and open a store on it in the other process")

    @property
    def key(self) -> tuple[str, ...]:
        """Host, port, database, table stem and prefix."""
        return ("redis", *self._place, self._keys.stem, self._keys.prefix)

    @property
    def durability(self) -> Durability:
        """`disk` once the server said that it syncs every write; until then, and otherwise, `process`."""
        return "process" if self._facts is None else self._facts.durability

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Everything but transactions, `durable` once the server said that it has an append-only file."""
        is_durable = self._facts is not None and self._facts.append_only
        return STANDARD_PARTS | ({"shared", "durable"} if is_durable else {"shared"})

    async def setup(self) -> None:
        """Find out what the server does with what it is given. Warns without an append-only file.

        Raises `PersistenceError` when it throws runs away as memory fills, or has them in a layout that is not known here.
        """
        with self._lifecycle:
            await self._set_up()

    async def close(self) -> None:
        """Wait for what was submitted, and close the connections that are ours."""
        empty = self._lifecycle.close()
        if empty is None:
            return
        self._changes.close()
        try:
            await asyncio.shield(asyncio.wrap_future(empty))
        finally:
            if self._release.detach() is not None:
                await self._lane.close()

    def sibling(self) -> RedisStore:
        """Another handle with connections of its own; with a borrowed client, on the loop of that client."""
        sibling = object.__new__(type(self))
        sibling._use(self._keys, self._lane.another())
        sibling._facts = self._facts
        return sibling

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
        new, journal, signals = checked_start(run), checked_journal(entries), checked_inbox(inbox)
        length = None if ttl is None else lease_microseconds(ttl)
        args = [optional(now), new.id, optional(length), new_token(), _owner(), optional(created_at)]
        lists = [rows.columns_of(new), rows.entries_of(journal), rows.inbox_of(signals), rows.dedupes_of(signals)]
        kind, whole = await self._call("create", self._keys.of(new.id), [*args, *all_counted(lists)])
        row = row_from(whole[0])
        if kind == b"found":
            return Created(run=found_row(row, new, row.updated_at), is_new=False)
        return Created(run=row, is_new=True, claim=None if length is None else rows.claim_from(whole))

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there."""
        journal, signals = checked_journal(entries), checked_inbox(inbox)
        row, wake = to_restore(run, signals)
        lists = [rows.columns_of(row), rows.entries_of(journal), rows.inbox_of(signals), rows.dedupes_of(signals)]
        await self._ask_once("restore", run.id, [optional(now)], [wake, *all_counted(lists)])

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[str],
        queues: Collection[str] | None = None,
        *,
        now: int | None = None,
    ) -> Claims:
        """Lease due runs, with everything of each, in one script."""
        token = new_token()
        args: builtins.list[Arg] = [optional(now), max(limit, 0), lease_microseconds(ttl), token, _owner()]
        names = [*counted([*workflows]), "" if queues is None else 1, *counted([*(queues or ())])]
        next_wake_at, taken = await self._call("claim", [self._keys.mark(token)], [*args, *names])
        return Claims(
            claims=[rows.claim_from(whole) for whole in taken], next_wake_at=int(next_wake_at) if next_wake_at else None
        )

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run."""
        args = [optional(now), run_id, lease_microseconds(ttl), new_token(), _owner(), int(due_only)]
        reply = checked(await self._call("acquire", self._keys.of(run_id), args), run_id)
        return rows.claim_from(reply[1]) if reply[0] == b"ok" else None

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> builtins.list[Pulse | None]:
        """Prolong leases, all in one script."""
        length, mine = lease_microseconds(ttl), tuple(leases)
        keys = [key for lease in mine for key in self._keys.of(lease.run_id, "run")]
        flat: builtins.list[Arg] = [part for lease in mine for part in (lease.run_id, lease.epoch, lease.token)]
        replies = await self._call("renew", keys, [optional(now), length, *counted(flat)])
        return [pulse_from(reply) if reply[0] == b"ok" else None for reply in replies]

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        """Give the run back, due at once."""
        await self._drive("release", lease, [optional(now), new_token()], [], "run")

    async def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,  # noqa: ARG002 - a record leaves no instant on the row
    ) -> Pulse:
        """Append to the journal: one round trip, shared with whatever else is recorded at the time."""
        lists: builtins.list[Sequence[Arg]] = [rows.entries_of(entries), [*consume], rows.items_of(items)]
        parts = ["run", "steps", *(["inbox", "consumed"] if consume else []), *(["items", "streams"] if items else [])]
        return pulse_from(await self._drive("record", lease, [], all_counted(lists), *parts))

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
        lists = all_counted([rows.entries_of(entries), [*consume]])
        args = [optional(wake_at), rows.awaited_bytes(waiting_for), *lists]
        reply = await self._drive("suspend", lease, [optional(now), new_token()], args, "run", "steps", "inbox", "consumed")
        return [rows.signal_from(stored) for stored in reply[1]] if reply[0] == b"arrived" else []

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
        """Record, end the run and tell its parent, which is in the same slot."""
        args = [status, outcome, *all_counted([rows.entries_of(entries), [*consume]])]
        await self._drive("finish", lease, [optional(now), new_token()], args, "run", "steps", "inbox", "consumed")

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        rest = rows.entry_rest(drop_entry(0, drop, 0, 0))
        await self._ask_once("reopen", run_id, [optional(now)], [rest], "run", "steps")

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        args: builtins.list[Arg] = [name, payload, int(dedupe is not None), optional(dedupe)]
        reply = await self._ask_once("signal", run_id, [optional(now)], args, "run", "inbox", "dedupes")
        return int(reply[1])

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._ask_once("cancel", run_id, [optional(now)], [], "run")

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        checked(await self._call("hold", self._keys.of(run_id, "run"), [run_id, 1]), run_id)

    async def unhold(self, run_id: str) -> None:
        """Undo `hold`."""
        checked(await self._call("hold", self._keys.of(run_id, "run"), [run_id, 0]), run_id)

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._drive("report", lease, [], [progress], "run")

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return rows.run_from(await self._call("get", self._keys.of(run_id, "run"), [run_id]))

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        return [rows.entry_from(entry) for entry in await self._call("journal", self._keys.of(run_id, "steps"), [run_id, after])]

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return [rows.signal_from(row) for row in await self._call("inbox", self._keys.of(run_id, "inbox"), [run_id, after])]

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""
        args: builtins.list[Arg] = [run_id, stream, after, max(limit, 0)]
        return [rows.item_from(stream, item) for item in await self._call("items", self._keys.of(run_id, "items"), args)]

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
        seen: tuple[Arg, Arg] = ("", "") if before is None else before
        args = [prefix, optional(status), int(workflow is not None), optional(workflow), *seen, max(limit, 0)]
        return [line_from(line) for line in await self._call("list", (), args)]

    async def count(self, *, prefix: str = "", status: Status | None = None, workflow: str | None = None) -> int:
        """How many runs there are."""
        return int(await self._call("count", (), [prefix, optional(status), int(workflow is not None), optional(workflow)]))

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now."""
        return [run_id.decode() for run_id in await self._call("due", (), [optional(now), max(limit, 0)])]

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._ask_once("delete", run_id, [], [])

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        """Delete ended runs, oldest first."""
        age = microseconds(older_than, what="older_than")
        return int(await self._call("purge", (), [optional(now), age, max(limit, 0)]))

    async def watch(self, timeout: float) -> None:
        """Return when this or another process changed what may be due, at the latest after `timeout` seconds."""
        with self._lifecycle:
            if self._facts is None:
                await self._set_up()
        await self._changes.watch(timeout)

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

    async def fire(self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun, now: int | None = None) -> bool:
        """Move the schedule on and create its run, once."""
        new, call = checked_start(run), new_token()
        args = [optional(now), call, schedule_id, expected_at, optional(next_at), new.id, *counted(rows.columns_of(new))]
        reply = await self._call("fire", [self._keys.schedules, self._keys.mark(call), *self._keys.of(new.id)], args)
        return bool(reply[0] == b"ok")

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""
        await self._call("limit_queue", [self._keys.limits], [queue, rows.limits_text(limits)])

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        stored = await self._call("queue_limits", [self._keys.limits], [])
        return {queue.decode(): rows.limits_from(limits) for queue, limits in rows.pairs(stored)}

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:  # noqa: ARG002 - always refused
        """Refused: what a step writes elsewhere cannot be one with a script."""
        raise StoreCapabilityError("redis", "transactions")

    async def _drive(
        self, verb: str, lease: Lease, before: Sequence[Arg], after: Sequence[Arg], *parts: str
    ) -> builtins.list[Any]:
        """A verb of the lease's holder."""
        args = [*before, lease.run_id, lease.epoch, lease.token, *after]
        reply: builtins.list[Any] = await self._call(verb, self._keys.of(lease.run_id, *parts), args)
        if reply[0] == b"lost":
            raise LeaseLost(lease.run_id, lease.epoch)
        return checked(reply, lease.run_id)

    async def _ask_once(
        self, verb: str, run_id: str, before: Sequence[Arg], after: Sequence[Arg], *parts: str
    ) -> builtins.list[Any]:
        """A verb from outside, which leaves a mark so that it does nothing when it comes a second time."""
        call = new_token()
        keys = [self._keys.mark(call), *self._keys.of(run_id, *parts)]
        return checked(await self._call(verb, keys, [*before, call, run_id, *after]), run_id)

    async def _call(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        with self._lifecycle:
            if self._facts is None:
                await self._set_up()
            return await self._ask(script, keys, args)

    async def _ask(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        call = Call(SCRIPTS[script], [self._keys.root, *keys], args)
        self._lane.put(call)
        return await call.future

    async def _set_up(self) -> None:
        format_, info = await self._ask("setup", (), [FORMAT])
        fsync = await self._lane.ask(fsync_policy)
        server_info = server_info_from(format_, info, fsync)
        check(server_info, self._place)
        self._facts = server_info


def _owner() -> str:
    return f"process {os.getpid()} on host {_HOST}"
