"""Which runs a worker gets.

Due runs are found by their due keys; the run's document decides. Where a queue has a limit, claims are made one at a time, so
that they keep to the limit together. The lock for that expires, so a worker that is stopped for longer may exceed the limit. It
cannot exceed a rate: a start is one compare-and-swap on the document of starts, before the lease. Limits and runs are different
documents, so a run that is being created while its queue gets its first limit may still be leased.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import msgspec

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest, QueueCounter, SuspectCounter, earliest
from perdure.backends.base.damaged_runs import problem_of, set_aside
from perdure.backends.base.leases import is_due, is_leased, store_time
from perdure.backends.key_value import verbs
from perdure.backends.key_value.editable_run import EditableRun, LeaseGrant
from perdure.backends.key_value.keys import DueKey, DuePartition, new_nonce, run_name, short_hash
from perdure.backends.key_value.lookup import KeyedRun, RunLookup
from perdure.backends.key_value.namespace import KeyValueNamespace, map_concurrently
from perdure.backends.key_value.run_writer import RunWriter
from perdure.backends.key_value.schedules import Schedules
from perdure.backends.key_value.settings_document import NoncedDocument, SwappedDocument
from perdure.errors import PerdureError, SnapshotCorrupt
from perdure.model.records import ENDED, Claim, Claims, QueueLimits, RunRow

_LOCK_SECONDS: Final = 10
_RETRY_AFTER: Final = 0.02
_AT_ONCE: Final = 16


class ClaimLock(NoncedDocument, kw_only=True):
    """The token of the claim that is under way, and until when, by the clocks of the processes that claim."""

    token: str = ""
    until: float = 0.0

    def acquire(self, token: str) -> bool:
        """Whether this token has the lock now."""
        now = time.time()
        # A lock that ends later than any can was taken by a clock that is far ahead.
        if self.token and now < self.until < now + 2 * _LOCK_SECONDS:
            return self.token == token
        self.token, self.until = token, now + _LOCK_SECONDS
        return True

    def release(self, token: str) -> None:
        """Give up the lock, if this token has it."""
        if self.token == token:
            self.token = ""


class Starts(NoncedDocument, kw_only=True):
    """When a run last started in each queue that has a rate."""

    last: dict[str, int] = msgspec.field(default_factory=dict)

    def spend(self, queue: str, interval: int, now: int) -> bool:
        """Whether a run of this queue may start now; then this is its last start."""
        if queue in self.last and now < self.last[queue] + interval:
            return False
        self.last[queue] = now
        return True


class Claimer:
    """Finds and leases the due runs of one namespace."""

    def __init__(self, namespace: KeyValueNamespace, writer: RunWriter, schedules: Schedules) -> None:
        self._namespace = namespace
        self._writer = writer
        self._schedules = schedules
        self.lookup = RunLookup(namespace, writer)
        self._shared_lock = SwappedDocument(namespace.backend, f"{namespace.root}/turn", ClaimLock)
        self._starts = SwappedDocument(namespace.backend, f"{namespace.root}/starts", Starts)
        # Held by a claim under limits, before it asks for the lock that other processes see.
        self._local_lock = asyncio.Lock()

    async def claim(self, request: ClaimRequest) -> Claims:
        """Lease up to `request.limit` due runs."""
        now = store_time(request.now)
        settings = await self._schedules.read()
        await self._schedules.create_fired(settings.fired)
        limits = settings.limits
        due, later = await self._list_timed(now)
        next_wake_at = min((due_key.wake_at for due_key in _matching_keys(request.filter, later)), default=None)
        matching = _matching_keys(request.filter, due)
        if request.limit < 1 or not matching:
            return Claims(claims=[], next_wake_at=next_wake_at, now=now)
        if limits:
            grants, next_start_at = await self._lease_within(limits, request, now)
            next_wake_at = earliest(next_wake_at, next_start_at)
        else:
            grants = await self._lease_many(matching, request, now)
        claims = await map_concurrently(partial(self._load_readable, now=now), grants)
        return Claims(claims=[claim for claim in claims if claim is not None], next_wake_at=next_wake_at, now=now)

    async def _load_readable(self, grant: LeaseGrant, now: int) -> Claim | None:
        """The claim, or None when the run cannot be read: it is set aside, and must not hold up the others."""
        with suppress(SnapshotCorrupt):
            return await self.load_claim(grant, now)
        return None

    async def list_due(self, now: int, limit: int) -> list[str]:
        """Ids of the runs that may be claimed now, longest due first."""
        await self._schedules.create_fired((await self._schedules.read()).fired)
        due_keys, _ = await self._list_timed(now)
        found: list[str] = []
        async for keyed in self.lookup.in_order(due_keys, lambda due_key: due_key.wake_at):
            if len(found) >= limit:
                break
            if _may_be_claimed(keyed.row, now):
                found.append(keyed.row.id)
        return found

    async def _list_timed(self, now: int) -> tuple[list[DueKey], list[DueKey]]:
        """The due keys of what is due and of what comes next, once every parent was notified of its children's ends."""
        due, later = await self.lookup.list_timed(now)
        owing = [due_key for due_key in (*due, *later) if due_key.status in ENDED]
        async for keyed in self.lookup.in_order(owing, lambda due_key: due_key.wake_at):
            with suppress(SnapshotCorrupt):  # reading the run in question raises this
                await self._writer.notify_parent(keyed.row.id)
        if owing:
            due, later = await self.lookup.list_timed(now)
        return [due_key for due_key in due if due_key.status not in ENDED], [key for key in later if key.status not in ENDED]

    async def _lease_many(self, due: list[DueKey], request: ClaimRequest, now: int) -> list[LeaseGrant]:
        """Lease due runs, several at a time."""
        grants: list[LeaseGrant] = []
        batch: list[KeyedRun] = []
        suspects = SuspectCounter(request.suspects)
        async for keyed in self.lookup.in_order(due, _by_priority):
            if not suspects.take(is_suspect=keyed.row.is_suspect):
                continue
            batch.append(keyed)
            if len(batch) == min(_AT_ONCE, request.limit - len(grants)):
                grants += await self._lease_batch(batch, request, now)
                batch = []
            if len(grants) == request.limit:
                return grants
        return grants + await self._lease_batch(batch, request, now)

    async def _lease_batch(self, batch: list[KeyedRun], request: ClaimRequest, now: int) -> list[LeaseGrant]:
        results = await asyncio.gather(*(self._lease(keyed, request, now) for keyed in batch), return_exceptions=True)
        grants = [result for result in results if isinstance(result, LeaseGrant)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and not grants:
            raise errors[0]
        return grants  # what was leased must reach its worker

    async def _lease(self, keyed: KeyedRun, request: ClaimRequest, now: int) -> LeaseGrant | None:
        """The lease, if the run still is as its due key said."""

        def lease(run: EditableRun) -> LeaseGrant | None:
            if not run.exists or not _may_be_claimed(run.row, now):
                return None
            if not request.filter.matches(run.row) or run.row.has_started is not keyed.row.has_started:
                return None
            return run.grant_lease(request.length, request.owner, now)

        return await self._writer.change(keyed.row.id, lease)

    async def _lease_within(
        self, limits: dict[str, QueueLimits], request: ClaimRequest, now: int
    ) -> tuple[list[LeaseGrant], int | None]:
        """Lease due runs one by one, as far as their queues have room, while no other process does.

        Also the instant at which a run may start that a rate has held back.
        """
        async with self._lock_claims():
            due, _ = await self._list_timed(now)
            counter = await self._count_leased(limits, now)
            grants: list[LeaseGrant] = []
            suspects = SuspectCounter(request.suspects)
            async for keyed in self.lookup.in_order(_matching_keys(request.filter, due), _by_priority):
                row = keyed.row
                if len(grants) == request.limit:
                    break
                if not suspects.take(is_suspect=row.is_suspect):
                    continue
                grant = None
                if await self._take_room(counter, limits, row, now):
                    grant = await self._lease(keyed, request, now)
                    if grant is None:
                        counter.give_back(row.queue, row.limit_key, is_start=not row.has_started)
                if grant is not None:
                    grants.append(grant)
                else:
                    suspects.give_back(is_suspect=row.is_suspect)
            return grants, counter.next_start_at()

    async def _take_room(self, counter: QueueCounter, limits: dict[str, QueueLimits], row: RunRow, now: int) -> bool:
        """Whether the limits of its queue let the run in; a start has then been spent."""
        is_start = not row.has_started
        if not counter.take(row.queue, row.limit_key, is_start=is_start):
            return False
        interval = limits[row.queue].interval if row.queue in limits else None
        if not is_start or interval is None:
            return True
        if await self._starts.change(lambda starts: starts.spend(row.queue, interval, now)):
            return True
        counter.give_back(row.queue, row.limit_key, is_start=True)  # a process whose lock had expired was faster
        return False

    async def _count_leased(self, limits: dict[str, QueueLimits], now: int) -> QueueCounter:
        has_rate = any(one.interval is not None for one in limits.values())
        last_starts = (await self._starts.read()).last if has_rate else None
        counter, queues = QueueCounter(limits, last_starts=last_starts, now=now), {short_hash(queue) for queue in limits}
        keys = await self.lookup.list_partition(DuePartition.LEASED)
        leased = [due_key for due_key in keys if due_key.queue in queues and due_key.wake_at > now]
        async for keyed in self.lookup.in_order(leased, lambda due_key: due_key.wake_at):
            if is_leased(keyed.row, now):
                counter.add(keyed.row.queue, keyed.row.limit_key)
        return counter

    async def is_limited(self, queue: str) -> bool:
        """Whether the queue has limits, so that `create` gives no lease."""
        return queue in (await self._schedules.read()).limits

    async def acquire(self, run_id: str, length: int, owner: str, now: int, *, due_only: bool) -> Claim | None:
        """Lease this run, if its queue has room."""
        limits = (await self._schedules.read()).limits
        row = await self._namespace.read_row(run_id) if limits else None
        lease = partial(verbs.acquire, length=length, owner=owner, now=now, due_only=due_only)
        if row is None or row.queue not in limits:
            grant = await self._writer.change(run_id, lease)
        else:
            find = partial(verbs.find_acquirable, now=now, due_only=due_only)
            grant = await self._acquire_within(limits, run_id, find, lease, now)
        return None if grant is None else await self.load_claim(grant, now)

    async def _acquire_within(
        self,
        limits: dict[str, QueueLimits],
        run_id: str,
        find: Callable[[EditableRun], RunRow | None],
        lease: Callable[[EditableRun], LeaseGrant | None],
        now: int,
    ) -> LeaseGrant | None:
        async with self._lock_claims():
            row = await self._writer.change(run_id, find)
            if row is None or not await self._take_room(await self._count_leased(limits, now), limits, row, now):
                return None
            return await self._writer.change(run_id, lease)

    @asynccontextmanager
    async def _lock_claims(self) -> AsyncIterator[None]:
        async with self._local_lock:
            token, is_shared = new_nonce(), self._namespace.is_shared
            while is_shared and not await self._shared_lock.change(lambda lock: lock.acquire(token)):  # noqa: ASYNC110 - others
                await asyncio.sleep(_RETRY_AFTER)
            try:
                yield
            finally:
                if is_shared:
                    await self._shared_lock.change(lambda lock: lock.release(token))

    async def load_claim(self, grant: LeaseGrant, now: int) -> Claim | None:
        """The claim, or None when the run was deleted before its worker got it.

        A run that cannot be read is set aside, and `SnapshotCorrupt` is raised.
        """
        run_id = grant.lease.run_id
        try:
            return await self._namespace.load_claim(grant)
        except (SnapshotCorrupt, MemoryError) as reason:
            stored = await self._namespace.load_document(run_name(run_id), run_id)
            if stored is None or stored.document.incarnation != grant.incarnation:
                return None
            problem = problem_of(run_id, "the journal or the inbox", reason)
            release = partial(verbs.release, lease=grant.lease, release=set_aside(problem, now), now=now)
            with suppress(PerdureError):  # then its lease expires by itself; the others must reach their worker
                await self._writer.change(run_id, release)
            raise problem from reason


def _matching_keys(wanted: ClaimFilter, due_keys: Iterable[DueKey]) -> list[DueKey]:
    """The due keys of runs that seem to match: a due key has only hashes of workflow and queue, or nothing."""
    workflows = {(short_hash(name), version) for name, version in wanted.workflows} | {("", 0)}
    queues = None if wanted.queues is None else {short_hash(name) for name in wanted.queues} | {""}
    return [key for key in due_keys if (key.workflow, key.version) in workflows and (queues is None or key.queue in queues)]


def _may_be_claimed(row: RunRow, now: int) -> bool:
    return not row.ended and not row.held and not row.lacks_input and is_due(row, now)


def _by_priority(due_key: DueKey) -> tuple[int, int]:
    return (-due_key.priority, due_key.wake_at)
