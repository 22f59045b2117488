"""Who drives which run: claim, acquire, renew, release.

Runs that may come due lie in one index by (workflow, queue, priority, wake_at). A claim visits each distinct (workflow, queue,
priority) with one seek, and from each only as many due rows as it could use, so its cost does not depend on how many runs sleep,
belong to other workflows or wait behind a queue's limit. It locks what it takes, one row after the other in the order of their
turn, and passes over what others have locked; a row that changed meanwhile is looked at again in its newest version.

Where a queue has a limit, claims wait for each other at the queue's row before they count. So a claim is one statement that says
when a limit is in its way, and only then a transaction of two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from perdure.backends.postgres import reading
from perdure.backends.postgres.rows import ENDED_SQL, RUN_COLUMNS, RUN_FIELDS, columns, lease_of, run_from
from perdure.backends.postgres.schema import CLOCK, Session
from perdure.errors import LeaseHeld, LeaseLost, RunNotFound
from perdure.model.records import ENDED, Claim, Lease, Pulse, RunRow

_OF_RUN: Final = ", ".join(f"run.{name}" for name in RUN_FIELDS)
_TAKE: Final = """
    status = 'running', waiting_for = '{}', lease_until = clock.at + $3, wake_at = clock.at + $3, updated_at = clock.at,
    epoch = greatest(run.epoch + 1, clock.at), lease_owner = $4,
    attempts = CASE WHEN run.journal_length < grown.length THEN 1 ELSE run.attempts + 1 END, journal_length = grown.length
"""
_MAY_WAKE: Final = "run.namespace || '' = $1 AND run.wake_at IS NOT NULL AND NOT run.held"

# $2 now, $3 the lease's length, $4 its owner, $5 how many, $6 workflows, $7 queues or NULL, $8 whether limits were locked.
# A loose index scan finds the groups: from the first row of a group straight to the first row of the next.
CLAIM: Final = f"""
    WITH RECURSIVE clock AS MATERIALIZED (
        SELECT coalesce($2::bigint, {CLOCK}) AS at
    ),
    limits AS MATERIALIZED (
        SELECT queue, concurrency, key_concurrency FROM $queues
        WHERE namespace = $1 AND (concurrency IS NOT NULL OR key_concurrency IS NOT NULL)
            AND ($7::text[] IS NULL OR queue = ANY ($7))
    ),
    may AS MATERIALIZED (
        SELECT $8::boolean OR NOT EXISTS (SELECT FROM limits) AS go
    ),
    visited (workflow, queue, priority) AS (
        (SELECT run.workflow, run.queue, run.priority FROM unnest($6::text[]) AS wanted (workflow) CROSS JOIN LATERAL (
            SELECT run.workflow, run.queue, run.priority FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = wanted.workflow ORDER BY run.queue, run.priority LIMIT 1
        ) AS run)
        UNION ALL
        SELECT next.workflow, next.queue, next.priority FROM visited CROSS JOIN LATERAL (
            SELECT run.workflow, run.queue, run.priority FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = visited.workflow
                AND (run.queue, run.priority) > (visited.queue, visited.priority)
            ORDER BY run.queue, run.priority LIMIT 1
        ) AS next
    ),
    groups AS MATERIALIZED (
        SELECT * FROM visited WHERE $7::text[] IS NULL OR queue = ANY ($7)
    ),
    soon AS MATERIALIZED (
        SELECT min(next.wake_at) AS wake_at FROM groups CROSS JOIN clock CROSS JOIN LATERAL (
            SELECT run.wake_at FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = groups.workflow AND run.queue = groups.queue AND run.priority = groups.priority
                AND run.wake_at > clock.at
            ORDER BY run.wake_at LIMIT 1
        ) AS next
    ),
    leased AS MATERIALIZED (
        SELECT limits.queue, run.limit_key, count(*) AS number FROM limits CROSS JOIN clock JOIN $runs AS run
            ON run.namespace || '' = $1 AND run.queue = limits.queue AND run.lease_until > clock.at
        GROUP BY limits.queue, run.limit_key
    ),
    room AS MATERIALIZED (
        SELECT limits.queue, limits.concurrency - coalesce(sum(leased.number), 0) AS number, limits.key_concurrency
        FROM limits LEFT JOIN leased USING (queue) GROUP BY limits.queue, limits.concurrency, limits.key_concurrency
    ),
    due AS MATERIALIZED (
        SELECT found.*, groups.queue, groups.priority, room.number AS room, room.key_concurrency,
            row_number() OVER (
                PARTITION BY groups.queue, found.limit_key ORDER BY groups.priority DESC, found.wake_at, found.id
            ) AS turn_of_key
        FROM groups LEFT JOIN room USING (queue) CROSS JOIN clock CROSS JOIN LATERAL (
            SELECT run.id, run.wake_at, run.limit_key FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = groups.workflow AND run.queue = groups.queue AND run.priority = groups.priority
                AND run.wake_at <= clock.at
            ORDER BY run.wake_at, run.id
            LIMIT CASE WHEN room.number <= 0 THEN 0 WHEN room.key_concurrency IS NULL THEN $5::bigint * 10 + 100 END
        ) AS found
        WHERE (SELECT go FROM may)
    ),
    allowed AS MATERIALIZED (
        SELECT due.id, due.wake_at, due.priority, due.room,
            row_number() OVER (PARTITION BY due.queue ORDER BY due.priority DESC, due.wake_at, due.id) AS turn
        FROM due
        WHERE due.key_concurrency IS NULL OR due.limit_key IS NULL OR due.turn_of_key <= due.key_concurrency - coalesce((
            SELECT leased.number FROM leased WHERE leased.queue = due.queue AND leased.limit_key = due.limit_key
        ), 0)
    ),
    picked AS MATERIALIZED (
        SELECT run.id, allowed.priority, allowed.wake_at
        FROM allowed CROSS JOIN clock JOIN $runs AS run ON run.namespace = $1 AND run.id = allowed.id
        WHERE (allowed.room IS NULL OR allowed.turn <= allowed.room) AND run.wake_at <= clock.at AND NOT run.held
        ORDER BY allowed.priority DESC, allowed.wake_at, allowed.id LIMIT $5::bigint
        FOR UPDATE OF run SKIP LOCKED
    ),
    taken AS (
        UPDATE $runs AS run SET lease_token = replace(gen_random_uuid()::text, '-', ''), {_TAKE}
        FROM clock, picked CROSS JOIN LATERAL (
            SELECT coalesce(max(step.seq), 0) AS length FROM $steps AS step
            WHERE step.namespace = $1 AND step.run_id = picked.id
        ) AS grown
        WHERE run.namespace = $1 AND run.id = picked.id
        RETURNING {_OF_RUN}, run.lease_token, run.inbox_seq
    )
    SELECT taken.*, picked.priority AS turn, picked.wake_at AS since,
        (SELECT go FROM may) AS go, (SELECT wake_at FROM soon) AS soon
    FROM (VALUES (1)) AS always LEFT JOIN (taken JOIN picked USING (id)) ON true
    ORDER BY turn DESC, since, id
"""
_LOCK_LIMITS: Final = """
    SELECT queue FROM $queues
    WHERE namespace = $1 AND (concurrency IS NOT NULL OR key_concurrency IS NOT NULL) AND ($2::text[] IS NULL OR queue = ANY ($2))
    ORDER BY queue FOR UPDATE
"""
# $2 now, $3 the lease's length, $4 its owner, $5 the run, $6 whether only if it is due, $7 its token.
ACQUIRE: Final = f"""
    WITH clock AS MATERIALIZED (
        SELECT coalesce($2::bigint, {CLOCK}) AS at
    ),
    found AS MATERIALIZED (
        SELECT id, status, held, wake_at, lease_until, lease_owner, lease_token, input_hash FROM $runs
        WHERE namespace = $1 AND id = $5 FOR UPDATE
    ),
    taken AS (
        UPDATE $runs AS run SET lease_token = $7, {_TAKE}
        FROM clock, found CROSS JOIN LATERAL (
            SELECT coalesce(max(step.seq), 0) AS length FROM $steps AS step WHERE step.namespace = $1 AND step.run_id = found.id
        ) AS grown
        WHERE run.namespace = $1 AND run.id = found.id AND NOT found.held AND found.status NOT IN {ENDED_SQL}
            AND CASE WHEN found.status = 'running' THEN found.lease_until <= clock.at
                ELSE found.input_hash <> '' AND (NOT $6::boolean OR found.wake_at <= clock.at) END
        RETURNING {_OF_RUN}, run.lease_token, run.inbox_seq
    )
    SELECT taken.*, found.status, found.held, found.lease_owner, found.lease_until > clock.at, found.lease_token = $7
    FROM clock CROSS JOIN found LEFT JOIN taken ON true
"""
_RENEW: Final = f"""
    WITH asked AS MATERIALIZED (
        SELECT * FROM unnest($2::text[], $3::bigint[], $4::text[]) WITH ORDINALITY AS asked (run_id, epoch, token, request)
    ),
    held AS MATERIALIZED (
        SELECT asked.request, run.id, run.inbox_seq, run.cancel_requested
        FROM (SELECT * FROM asked ORDER BY run_id COLLATE "C") AS asked CROSS JOIN LATERAL (
            SELECT id, inbox_seq, cancel_requested FROM $runs
            WHERE namespace = $1 AND id = asked.run_id AND epoch = asked.epoch AND lease_token = asked.token
            FOR NO KEY UPDATE
        ) AS run
    ),
    renewed AS (
        UPDATE $runs AS run SET lease_until = clock.at + $5, wake_at = clock.at + $5, updated_at = clock.at
        FROM held, (SELECT coalesce($6::bigint, {CLOCK}) AS at) AS clock
        WHERE run.namespace = $1 AND run.id = held.id
    )
    SELECT request, inbox_seq, cancel_requested FROM held
"""
_RELEASE: Final = f"""
    WITH clock AS MATERIALIZED (
        SELECT coalesce($5::bigint, {CLOCK}) AS at
    ),
    released AS (
        UPDATE $runs SET status = 'pending', wake_at = clock.at, updated_at = clock.at, attempts = greatest(attempts - 1, 0),
            lease_token = NULL, lease_owner = NULL, lease_until = NULL
        FROM clock WHERE namespace = $1 AND id = $2 AND epoch = $3 AND lease_token = $4 RETURNING 1
    )
    SELECT pg_notify($6, '')::text FROM released
"""
_WAS_RELEASED: Final = f"SELECT {RUN_COLUMNS}, lease_token FROM $runs WHERE namespace = $1 AND id = $2"


class Wanted(NamedTuple):
    """Which runs a worker takes, how many, and for how long. It is copied from what the caller passed in."""

    limit: int
    length: int
    owner: str
    workflows: list[str]
    queues: list[str] | None
    now: int | None

    @classmethod
    def of(
        cls, limit: int, length: int, owner: str, workflows: Collection[str], queues: Collection[str] | None, now: int | None
    ) -> Wanted:
        """The runs of these workflows in these queues, or in all."""
        return cls(max(limit, 0), length, owner, sorted(set(workflows)), None if queues is None else sorted(set(queues)), now)


class Taken(NamedTuple):
    """A run just leased; its journal is loaded after the commit."""

    lease: Lease
    run: RunRow
    inbox_seq: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> Taken:
        """From a row of the run's columns, its token and its inbox_seq."""
        run = run_from(row)
        token, inbox_seq = row[len(RUN_FIELDS)], row[len(RUN_FIELDS) + 1]
        return cls(lease_of(run, token), run, inbox_seq)


class Took(NamedTuple):
    """What a claim took, and when more may come due."""

    taken: list[Taken]
    next_wake_at: int | None


async def claim(db: Session, wanted: Wanted) -> Took:
    """Lease due runs."""
    async with db.without_jit():
        took = await _claim(db, wanted, limits_are_locked=False)
    if took is not None:
        return took
    async with db.transaction(), db.without_jit():
        await db.all(_LOCK_LIMITS, wanted.queues)
        took = await _claim(db, wanted, limits_are_locked=True)
    return took or Took([], None)


async def _claim(db: Session, wanted: Wanted, *, limits_are_locked: bool) -> Took | None:
    given = (wanted.now, wanted.length, wanted.owner, wanted.limit, wanted.workflows, wanted.queues, limits_are_locked)
    rows = await db.all(CLAIM, *given)
    if not rows[0]["go"]:
        return None
    return Took([Taken.of(row) for row in rows if row["id"] is not None], rows[0]["soon"])


async def acquire(
    db: Session, run_id: str, length: int, owner: str, token: str, now: int | None, *, due_only: bool
) -> Taken | None:
    """Lease this run, or None when it has ended, lacks its input or (with `due_only`) is not due."""
    row = await db.one(ACQUIRE, now, length, owner, run_id, due_only, token)
    if row is None:
        raise RunNotFound(run_id)
    if row[0] is not None:
        return Taken.of(row)
    status, held, lease_owner, is_live, is_ours = row[len(RUN_FIELDS) + 2 :]
    if is_ours:
        return await _ours(db, run_id)  # taken by an attempt whose reply was lost
    if status in ENDED:
        return None
    if held:
        raise LeaseHeld(run_id, "an operator, who put it on hold")
    if is_live:
        raise LeaseHeld(run_id, lease_owner or "a live worker")
    return None


async def _ours(db: Session, run_id: str) -> Taken | None:
    row = await db.one(f"SELECT {RUN_COLUMNS}, lease_token, inbox_seq FROM $runs WHERE namespace = $1 AND id = $2", run_id)
    return None if row is None else Taken.of(row)


async def renew(db: Session, leases: Sequence[Lease], length: int, now: int | None) -> list[Pulse | None]:
    """Prolong each lease that is still current to `length` microseconds from now."""
    given = columns([(lease.run_id, lease.epoch, lease.token) for lease in leases], 3)
    rows = await db.all(_RENEW, *given, length, now)
    pulses = {row[0]: Pulse(row[1], row[2]) for row in rows}
    return [pulses.get(number) for number in range(1, len(leases) + 1)]


async def release(db: Session, lease: Lease, now: int | None, *, is_repeated: bool = False) -> None:
    """Give the run back, due at once, with its attempt."""
    if await db.one(_RELEASE, lease.run_id, lease.epoch, lease.token, now, db.tables.channel) is not None:
        return
    row = await db.one(_WAS_RELEASED, lease.run_id) if is_repeated else None
    if row is None or (row["status"], row["epoch"], row["lease_token"]) != ("pending", lease.epoch, None):
        raise LeaseLost(lease.run_id, lease.epoch)


async def load(db: Session, taken: Sequence[Taken]) -> list[Claim]:
    """The claims for runs that were leased. To be called after that was committed: from then on only we append to them."""
    if not taken:
        return []
    parts = await reading.parts(db, [one.run.id for one in taken])
    return [_claim_of(one, parts) for one in taken]


def _claim_of(taken: Taken, parts: reading.Parts) -> Claim:
    inbox = parts.inboxes.get(taken.run.id, [])
    return Claim(
        lease=taken.lease,
        run=taken.run,
        journal=parts.journals.get(taken.run.id, []),
        inbox=inbox,
        # Rows that came after the lease was taken are in the list, so they count as seen.
        inbox_seq=max(taken.inbox_seq, inbox[-1].seq if inbox else 0),
        item_counts=parts.item_counts.get(taken.run.id, {}),
    )
