"""Leases on runs: claim, acquire, release, renew.

A claim locks the rows of the runs it leases and skips rows that another transaction has locked. Where a queue has a limit, a
claim locks the row of the queue before it counts, so that claims count one after the other. `acquire` locks its run before the
queue: a claim that holds the queue skips that run, so neither waits for the other.

A renewal waits for no lock. An open `transaction()` may keep its run's row locked for as long as its step takes; a renewal of
many leases that waited for this one would lose them all. So it skips locked rows and tries them again a few times. The reply for
a row that stays locked is its present pulse, and its lease is not prolonged: while the lock is held no other worker can take the
run over, and the next heartbeat tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from perdure.backends.base.claim_rules import ClaimRequest, QueueCounter, SuspectCounter, earliest
from perdure.backends.base.damaged_runs import FETCH_FAILURES, DamagedRun, problem_of, raise_damage, set_aside
from perdure.backends.base.leases import Release, new_token, refuse_leased
from perdure.backends.sql import reading
from perdure.backends.sql.dialect import Statement, chunks
from perdure.backends.sql.due_order import DueGroup, DueOrder, due_groups, next_wake_at
from perdure.backends.sql.recording import fences_from, is_current
from perdure.backends.sql.rows import NO_LEASE_SQL, RUN_COLUMNS, RUN_FIELDS, Row, lease_of, run_from
from perdure.backends.sql.runs import time
from perdure.backends.sql.schedules import LIMIT_COLUMNS, limits_from
from perdure.backends.sql.session import Parameters, Result, Session, SqlConnections
from perdure.errors import LeaseHeld, LeaseLost, RunNotFound, SnapshotCorrupt
from perdure.model.records import Claim, Lease, Pulse, RunRow

_LOCK_RUN: Final = f"SELECT {RUN_COLUMNS}, lease_token, $clock FROM $runs WHERE namespace = ?1 AND id = ?2 $for_update"
# As above, with whether the run's queue has limits.
_LOCK_TO_ACQUIRE: Final = f"""
    SELECT {RUN_COLUMNS},
        (SELECT count(*) FROM $queues AS limited WHERE limited.namespace = ?1 AND limited.queue = run.queue), lease_token, $clock
    FROM $runs AS run WHERE namespace = ?1 AND id = ?2 $for_update
"""
_SET_LAST_START: Final = "UPDATE $queues SET last_start_at = ?3 WHERE namespace = ?1 AND queue = ?2"
_LEASE: Final = """
    UPDATE $runs SET status = 'running', waiting_for = '[]', epoch = ?3, lease_token = ?4, lease_owner = ?5, lease_until = ?6,
        wake_at = ?6, updated_at = ?7, attempts = ?8, journal_length = ?9, running_steps = NULL
    WHERE namespace = ?1 AND id = ?2
"""
_EARLIEST: Final = """
    SELECT $clock, (SELECT wake_at FROM $runs WHERE $due_namespace = ?1 AND $may_wake ORDER BY wake_at LIMIT 1)
"""
_RELEASE: Final = f"""
    UPDATE $runs SET status = 'pending', updated_at = ?3, wake_at = ?4, attempts = ?5, problem = ?6, problem_at = ?7,
        problem_count = ?8, {NO_LEASE_SQL}
    WHERE namespace = ?1 AND id = ?2
"""


# A problem is stored without reading anything else of the row. ?4 is when it is due again, ?3 the present.
_SET_ASIDE: Final = f"""
    UPDATE $runs SET status = 'pending', updated_at = ?3, wake_at = ?4, problem = ?5, problem_at = ?3,
        problem_count = CASE WHEN problem_count BETWEEN 0 AND 1000000 THEN problem_count + 1 ELSE 1 END,
        {NO_LEASE_SQL}
    WHERE namespace = ?1 AND id = ?2
"""
# The same for a run that was leased with token ?6, whose attempt does not count.
_SET_LEASED_ASIDE: Final = f"""
    UPDATE $runs SET status = 'pending', updated_at = ?3, wake_at = ?4, problem = ?5, problem_at = ?3,
        problem_count = CASE WHEN problem_count BETWEEN 0 AND 1000000 THEN problem_count + 1 ELSE 1 END,
        attempts = CASE WHEN attempts > 0 THEN attempts - 1 ELSE 0 END,
        {NO_LEASE_SQL}
    WHERE namespace = ?1 AND id = ?2 AND lease_token = ?6
"""
# A statement takes so many values, and a packet so many bytes.
_RENEWED_TOGETHER: Final = 500
_RENEWAL_PAUSES: Final = (0.0, 0.01, 0.03, 0.1, 0.2)  # seconds before each attempt

Pulses: TypeAlias = dict[Lease, Pulse]


class LeasedRun(NamedTuple):
    """A run just leased; its journal is loaded after the commit."""

    lease: Lease
    run: RunRow
    inbox_seq: int


class ClaimResult(NamedTuple):
    """The runs that a claim leased, when the next one comes due, the time of the claim, and the runs whose row cannot be read."""

    leased: list[LeasedRun]
    next_wake_at: int | None
    now: int
    damaged: list[DamagedRun]


LeaseVerb: TypeAlias = Callable[[Session, Sequence[str], ClaimRequest, ClaimResult], Awaitable[None]]


class LoadedRuns(NamedTuple):
    """The claims for leased runs, and those of them whose journal or inbox cannot be read."""

    claims: list[Claim]
    damaged: list[DamagedRun]

    def one(self) -> Claim:
        """The claim for the only run. Raises `SnapshotCorrupt`."""
        for damaged in self.damaged:
            raise damaged.problem
        return self.claims[0]


async def lease_each(db: Session, ids: Sequence[str], request: ClaimRequest, result: ClaimResult) -> None:
    """Lease runs that are locked, with one statement for each. Those that cannot be read are set aside."""
    result.leased.extend(await _lease(db, ids, request.owner, result.now, request.length))


async def claim(db: Session, request: ClaimRequest, lease: LeaseVerb = lease_each) -> ClaimResult:
    """Lease due runs; `lease` leases those that were locked and adds them to the result."""
    if request.filter.is_empty:
        return ClaimResult([], None, await time(db, request.now), [])
    at, groups, counter = await _find_groups(db, request)
    soon = await next_wake_at(db, groups, at)
    suspects = SuspectCounter(request.suspects)
    order = DueOrder(db, groups, counter, suspects, at, request.limit)
    ids = await _lock_due_runs(db, order, counter, suspects, request.limit, at)
    result = ClaimResult([], earliest(soon, _next_start_at(groups, counter)), at, [])
    if ids:
        await lease(db, ids, request, result)
        await _set_last_starts(db, counter, at)
    return result


async def see_nothing_due(db: Session, request: ClaimRequest) -> ClaimResult | None:
    """As `find_nothing_due`, with one statement that looks at the runs of all workflows: by an index of all that may come due."""
    row = await db.one(_EARLIEST)
    at = request.now if request.now is not None or row is None else int(row[0])
    earliest = None if row is None else row[1]
    if at is None or (earliest is not None and int(earliest) <= at):
        return None
    return ClaimResult([], earliest, at, [])


async def find_nothing_due(db: Session, request: ClaimRequest) -> ClaimResult | None:
    """The empty result of a claim for which nothing is due, found by reading alone; None when there is something to lease."""
    if request.filter.is_empty:
        return ClaimResult([], None, await time(db, request.now), [])
    at, groups, counter = await _find_groups(db, request)
    if await DueOrder(db, groups, counter, SuspectCounter(request.suspects), at, 1).next(min(request.limit, 1)):
        return None
    return ClaimResult([], earliest(await next_wake_at(db, groups, at), _next_start_at(groups, counter)), at, [])


async def _find_groups(db: Session, request: ClaimRequest) -> tuple[int, list[DueGroup], QueueCounter]:
    """The time of the claim, the groups that it looks at, and how many runs their queues still let in."""
    limits = await _lock_limits(db, request.filter.queues)  # before the clock is read: another claim may have them for some time
    at = await time(db, request.now)
    groups = await due_groups(db, request.filter)
    return at, groups, await _count_leased(db, limits, at)


async def _lock_limits(db: Session, queues: Sequence[str] | None) -> Sequence[Row]:
    """The limits of these queues, or of all, and when a run last started there, locked until the transaction ends."""
    params = Parameters()
    among = "" if queues is None else f"AND queue IN ({params.many(queues)})"
    template = f"SELECT {LIMIT_COLUMNS}, last_start_at FROM $queues WHERE namespace = ?1 {among} ORDER BY queue $for_update"
    return await db.all(template, *params.values)


def _next_start_at(groups: Sequence[DueGroup], counter: QueueCounter) -> int | None:
    """When the rate of a queue lets the next run start, if it holds one back. Whether that one is due is not looked up."""
    for group in groups:
        if not group.is_started and not counter.may_start(group.queue):
            counter.hold_back(group.queue)
    return counter.next_start_at()


async def _set_last_starts(db: Session, counter: QueueCounter, at: int) -> None:
    await db.send([db.statement(_SET_LAST_START, queue, at) for queue in sorted(counter.started)])


async def _count_leased(db: Session, limit_rows: Sequence[Row], now: int) -> QueueCounter:
    """What the limits, as `_lock_limits` has read them, still let in."""
    limits = limits_from(db, [row[:-1] for row in limit_rows])
    leased = await _leased_numbers(db, sorted(limits), now) if limits else []
    last_starts = {queue: int(row[-1]) for queue, row in zip(limits, limit_rows, strict=True) if row[-1] is not None}
    return QueueCounter(limits, leased, last_starts=last_starts, now=now)


async def _leased_numbers(db: Session, queues: Sequence[str], now: int) -> list[tuple[str, str | None, int]]:
    """How many runs are leased of each of these queues and each limit key."""
    params = Parameters()
    template = f"""
        SELECT queue, limit_key, count(*) FROM $runs
        WHERE $indexed_namespace = ?1 AND queue IN ({params.many(queues)}) AND lease_until > {params.one(now)}
        GROUP BY queue, limit_key
    """
    name = db.tables.values.name_from
    return [(name(queue), key and name(key), int(number)) for queue, key, number in await db.all(template, *params.values)]


async def _lock_due_runs(
    db: Session, order: DueOrder, counter: QueueCounter, suspects: SuspectCounter, limit: int, now: int
) -> list[str]:
    """The ids of due runs that are now locked, first the ones that are to be driven first."""
    ids: list[str] = []
    while due := await order.next(limit - len(ids)):
        locked = await _lock_if_due(db, [run.id for run in due], now)
        for run in due:
            if run.id in locked:
                ids.append(run.id)
            else:
                counter.give_back(run.queue, run.limit_key, is_start=run.is_start)
                suspects.give_back(is_suspect=run.is_suspect)
    return ids


async def _lock_if_due(db: Session, ids: Sequence[str], now: int) -> set[str]:
    params = Parameters()
    places = params.many(sorted(ids))
    # held + 0: by their ids, not by the index of what may wake.
    template = f"""
        SELECT id FROM $runs WHERE namespace = ?1 AND id IN ({places}) AND wake_at <= {params.one(now)} AND held + 0 = 0
        ORDER BY id $for_update $skip_locked
    """
    return {db.tables.values.name_from(row[0]) for row in await db.all(template, *params.values)}


async def _lease(db: Session, ids: Sequence[str], owner: str, at: int, length: int, token: str = "") -> list[LeasedRun]:
    """Lease runs that are locked. One that cannot be read is set aside."""
    if not ids:
        return []
    leased: list[LeasedRun] = []
    statements: list[Statement] = []
    for row in await _read_rows(db, ids):
        try:
            if isinstance(row, SnapshotCorrupt):
                raise row
            run, statement = _lease_row(db, row, owner, at, length, token or new_token())
        except SnapshotCorrupt as problem:
            if token:  # `acquire` raises it
                raise
            statement = _set_aside(db, problem, at)
        else:
            leased.append(run)
        statements.append(statement)
    await db.send(statements)
    return sorted(leased, key=lambda leased: ids.index(leased.run.id))


async def _read_rows(db: Session, ids: Sequence[str]) -> Sequence[Row | SnapshotCorrupt]:
    """The rows of these runs. If the driver cannot read them together, each is read alone: one that it cannot read is damaged."""
    params = db.parameters()
    template = f"""
        SELECT {RUN_COLUMNS}, inbox_seq, journal_length,
            (SELECT max(step.seq) FROM $steps AS step WHERE step.namespace = ?1 AND step.run_id = run.id)
        FROM $runs AS run WHERE namespace = ?1 AND {params.among("id", ids)}
    """
    try:
        return await db.all(template, *params.values)
    except FETCH_FAILURES as reason:
        if len(ids) == 1:
            return [problem_of(ids[0], "the row", reason)]
    return [row for run_id in ids for row in await _read_rows(db, [run_id])]


def _set_aside(db: Session, problem: SnapshotCorrupt, at: int) -> Statement:
    """The statement that sets a run aside which could not be leased."""
    release = set_aside(problem, at)
    return db.statement(_SET_ASIDE, problem.args[0], at, release.wake_at, release.problem)


async def set_aside_leased(db: Session, damaged: Sequence[DamagedRun], now: int | None) -> None:
    """Set leased runs aside whose data cannot be read."""
    at = await time(db, now)
    for lease, problem in damaged:
        release = set_aside(problem, at)
        await db.run(_SET_LEASED_ASIDE, lease.run_id, at, release.wake_at, release.problem, lease.token)


def _lease_row(db: Session, row: Row, owner: str, at: int, length: int, token: str) -> tuple[LeasedRun, Statement]:
    """The run as the lease leaves it, and the statement that leases it."""
    run = run_from(row, db.tables.values)
    with raise_damage(run.id, "the length of the inbox or the journal"):
        inbox_seq, seen, journal_length = (int(value or 0) for value in row[len(RUN_FIELDS) :])
    until = at + length
    run = msgspec.structs.replace(
        run,
        status="running",
        waiting_for=(),
        epoch=max(run.epoch + 1, at),
        lease_owner=owner,
        lease_until=until,
        running_steps=None,
        wake_at=until,
        updated_at=at,
        attempts=1 if seen < journal_length else run.attempts + 1,
    )
    statement = db.statement(_LEASE, run.id, run.epoch, token, owner, until, at, run.attempts, journal_length)
    return LeasedRun(lease_of(run, token), run, inbox_seq), statement


async def acquire(
    db: Session, run_id: str, length: int, owner: str, token: str, now: int | None, *, due_only: bool
) -> LeasedRun | None:
    """Lease this run, or None when it has ended, lacks its input, has no room in its queue or (with `due_only`) is not due."""
    row = await db.one(_LOCK_TO_ACQUIRE, run_id)
    if row is None:
        raise RunNotFound(run_id)
    run, at = run_from(row, db.tables.values), int(row[-1]) if now is None else now
    if row[-2] is not None and db.tables.values.name_from(row[-2]) == token:
        return await _find_lease(db, run, token)  # the lease of an attempt whose reply was lost
    if run.ended:
        return None
    if run.held:
        raise LeaseHeld.by_operator(run_id)
    refuse_leased(run, at)
    is_due = run.wake_at is not None and run.wake_at <= at
    if run.lacks_input or (due_only and not is_due):
        return None
    if int(row[-3]) and not await _take_place(db, run, at):
        return None
    return (await _lease(db, [run_id], owner, at, length, token))[0]


async def _take_place(db: Session, run: RunRow, at: int) -> bool:
    """Whether the limits of its queue let the run in; a start is entered there."""
    counter = await _count_leased(db, await _lock_limits(db, [run.queue]), at)
    if not counter.take(run.queue, run.limit_key, is_start=not run.has_started):
        return False
    await _set_last_starts(db, counter, at)
    return True


async def _find_lease(db: Session, run: RunRow, token: str) -> LeasedRun:
    row = await db.one("SELECT inbox_seq FROM $runs WHERE namespace = ?1 AND id = ?2", run.id)
    return LeasedRun(lease_of(run, token), run, 0 if row is None else int(row[0]))


async def release(db: Session, lease: Lease, release: Release, now: int | None, *, is_repeated: bool = False) -> None:
    """Give up the lease."""
    row = await db.one(_LOCK_RUN, lease.run_id)
    if row is None:
        raise LeaseLost(lease.run_id, lease.epoch)
    run, token = run_from(row, db.tables.values), row[-2] and db.tables.values.name_from(row[-2])
    if is_repeated and (run.status, run.epoch, token) == ("pending", lease.epoch, None):
        return  # an attempt whose reply was lost has released it
    if (run.epoch, token) != (lease.epoch, lease.token):
        raise LeaseLost(lease.run_id, lease.epoch)
    at = int(row[-1]) if now is None else now
    await db.run(_RELEASE, lease.run_id, at, *release.columns(run, at).values())


class _CurrentLeases(NamedTuple):
    pulses: Pulses
    at: int


async def renew(
    connections: SqlConnections,
    namespace: str,
    leases: Sequence[Lease],
    length: int,
    running_steps: Mapping[Lease, bytes],
    now: int | None,
) -> list[Pulse | None]:
    """Prolong each lease that is still current to `length` microseconds from now; None for each other."""

    async def attempt(leases: Sequence[Lease]) -> tuple[Pulses, Pulses]:
        return await connections.perform(namespace, lambda db, _: renew_unlocked(db, leases, length, running_steps, now))

    pulses: Pulses = {}
    remaining = list(leases)
    for pause in _RENEWAL_PAUSES:
        if not remaining:
            break
        await asyncio.sleep(pause)
        renewed, locked = await attempt(remaining)
        pulses |= renewed | locked
        remaining = list(locked)
    return [pulses.get(lease) for lease in leases]


async def renew_unlocked(
    db: Session,
    leases: Sequence[Lease],
    length: int,
    running_steps: Mapping[Lease, bytes],
    now: int | None,
    owner: str | None = None,
) -> tuple[Pulses, Pulses]:
    """The leases that were prolonged, and those that are current but locked. With `owner` they become this owner's."""
    free = await _read_current(db, leases, "$for_change $skip_locked")
    if free.pulses:
        at = free.at if now is None else now
        for chunk in chunks(list(free.pulses), _RENEWED_TOGETHER):
            steps = {lease.run_id: running_steps.get(lease) for lease in chunk}
            await _prolong(db, steps, at, at + length, owner)
    others = [lease for lease in leases if lease not in free.pulses]
    return free.pulses, (await _read_current(db, others)).pulses if others else {}


async def _read_current(db: Session, leases: Sequence[Lease], lock: str = "") -> _CurrentLeases:
    """Of these leases those that are current, with their pulses, and the time."""
    params = db.parameters()
    template = f"""
        SELECT id, epoch, lease_token, inbox_seq, cancel_requested, $clock FROM $runs
        WHERE namespace = ?1 AND {params.among("id", sorted({lease.run_id for lease in leases}))} ORDER BY id {lock}
    """
    (result,) = await db.send([db.statement(template, *params.values)])
    fences = fences_from(db.tables, Result([row[:-1] for row in result.rows], 0))
    pulses = {lease: fences[lease.run_id][2] for lease in leases if is_current(fences, lease)}
    return _CurrentLeases(pulses, int(result.rows[0][-1]) if result.rows else 0)


async def _prolong(db: Session, running_steps: Mapping[str, bytes | None], at: int, until: int, owner: str | None) -> None:
    """Prolong the leases of these runs, with the running steps of each."""
    params = db.parameters()
    end, changed = params.one(until), params.one(at)
    owned = "" if owner is None else f", lease_owner = {params.one(owner)}"
    template = f"""
        UPDATE $runs SET lease_until = {end}, wake_at = {end}, updated_at = {changed}{owned},
            running_steps = {params.by_id("running_steps", running_steps)}
        WHERE namespace = ?1 AND {params.among("id", running_steps)}
    """
    await db.run(template, *params.values)


async def load(db: Session, leased: Sequence[LeasedRun]) -> LoadedRuns:
    """What the leased runs recorded. Call it after the commit: from then on only the lease holder appends to them.

    All are read together. If that fails, each is read alone, so that one which is damaged or too large fails alone.
    """
    try:
        parts = await reading.parts(db, [run.run.id for run in leased])
        return LoadedRuns([_claim_of(run, parts) for run in leased], [])
    except (SnapshotCorrupt, *FETCH_FAILURES) as reason:
        if len(leased) == 1:
            problem = problem_of(leased[0].run.id, "the journal or the inbox", reason)
            return LoadedRuns([], [DamagedRun(leased[0].lease, problem)])
    each = [await load(db, [run]) for run in leased]
    return LoadedRuns([claim for one in each for claim in one.claims], [damaged for one in each for damaged in one.damaged])


def _claim_of(leased: LeasedRun, parts: reading.Parts) -> Claim:
    inbox = parts.inboxes.get(leased.run.id, [])
    return Claim(
        lease=leased.lease,
        run=leased.run,
        journal=parts.journals.get(leased.run.id, []),
        inbox=inbox,
        # Rows that came after the lease was taken are in the list, so they count as seen.
        inbox_seq=max(leased.inbox_seq, inbox[-1].seq if inbox else 0),
        item_counts=parts.item_counts.get(leased.run.id, {}),
    )
