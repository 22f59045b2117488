"""Claiming due runs, in one statement.

Runs that may come due lie in one index by (workflow, version, queue, priority, wake_at). A claim visits each distinct (workflow,
version, queue, priority) with one seek, and from each only as many due rows as it could use, so its cost does not depend on how
many runs sleep, belong to other workflows and versions, or wait behind a queue's limit. It locks what it takes, one row after the
other in due order, and skips rows that other transactions have locked; a row that changed meanwhile is looked at again as it is
then.

Where a queue has a limit, claims wait for each other at the queue's row before they count. So a claim is one statement that says
when a limit is in its way, and only then a transaction of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from perdure.backends.base.claim_rules import ClaimRequest
from perdure.backends.base.damaged_runs import DamagedRun
from perdure.backends.postgres.channel import connection_of, fetch
from perdure.backends.postgres.connections import SERVER_SETTINGS, PostgresConnections
from perdure.backends.sql.claims import ClaimResult, LeasedRun
from perdure.backends.sql.rows import RUN_FIELDS, lease_of, run_from
from perdure.backends.sql.runs import time
from perdure.backends.sql.session import Session
from perdure.errors import SnapshotCorrupt
from perdure.model.records import SUSPECT_ATTEMPTS, Lease

_MAY_WAKE: Final = "run.namespace || '' = $1 AND run.wake_at IS NOT NULL AND run.held = 0"
_IN_GROUP: Final = """
    run.workflow = groups.workflow AND run.version = groups.version AND run.queue = groups.queue
        AND run.priority = groups.priority
"""

_IS_SUSPECT: Final = f"run.status = 'running' AND run.attempts >= {SUSPECT_ATTEMPTS}"
# A damaged number must not make the statement overflow, which would fail the claims of all runs.
_LARGEST: Final = (1 << 63) - 2

# $2 now, $3 the lease's length, $4 its owner, $5 how many, $6 workflows, $7 queues or NULL, $8 whether limits were locked,
# $9 the version of each workflow, $10 how many suspects (`RunRow.is_suspect`) or NULL.
# A loose index scan finds the groups: from the first row of a group straight to the first row of the next.
# The plan must not depend on statistics, which a new database does not have. So a run is joined by the namespace of the other
# row, not by $1: with $1 PostgreSQL may read all runs of the namespace first. And `picked` hides its conditions in CASE, or it
# may read the index of all runs that may come due.
CLAIM: Final = f"""
    WITH RECURSIVE clock AS MATERIALIZED (
        SELECT coalesce($2::bigint, (SELECT $clock)) AS at
    ),
    limits AS MATERIALIZED (
        SELECT namespace, queue, concurrency, key_concurrency FROM $queues
        WHERE namespace = $1 AND (concurrency IS NOT NULL OR key_concurrency IS NOT NULL)
            AND ($7::text[] IS NULL OR queue = ANY ($7))
    ),
    may AS MATERIALIZED (
        SELECT $8::boolean OR NOT EXISTS (SELECT FROM limits) AS go
    ),
    visited (workflow, version, queue, priority) AS (
        (SELECT run.* FROM unnest($6::text[], $9::bigint[]) AS wanted (workflow, version) CROSS JOIN LATERAL (
            SELECT run.workflow, run.version, run.queue, run.priority FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = wanted.workflow AND run.version = wanted.version
            ORDER BY run.queue, run.priority LIMIT 1
        ) AS run)
        UNION ALL
        SELECT next.* FROM visited CROSS JOIN LATERAL (
            SELECT run.workflow, run.version, run.queue, run.priority FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = visited.workflow AND run.version = visited.version
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
            WHERE {_MAY_WAKE} AND {_IN_GROUP}
                AND run.wake_at > clock.at
            ORDER BY run.wake_at LIMIT 1
        ) AS next
    ),
    leased AS MATERIALIZED (
        SELECT limits.queue, run.limit_key, count(*) AS number FROM limits CROSS JOIN clock JOIN $runs AS run
            ON run.namespace || '' = limits.namespace AND run.queue = limits.queue AND run.lease_until > clock.at
        GROUP BY limits.queue, run.limit_key
    ),
    room AS MATERIALIZED (
        SELECT limits.queue, limits.concurrency - coalesce(sum(leased.number), 0) AS number, limits.key_concurrency
        FROM limits LEFT JOIN leased USING (queue) GROUP BY limits.queue, limits.concurrency, limits.key_concurrency
    ),
    found AS MATERIALIZED (
        SELECT found.*, groups.queue, groups.priority, room.number AS room, room.key_concurrency, row_number() OVER (
            PARTITION BY found.is_suspect ORDER BY groups.priority DESC, found.wake_at, found.id
        ) AS turn_of_suspect
        FROM groups LEFT JOIN room USING (queue) CROSS JOIN clock CROSS JOIN LATERAL (
            (SELECT run.id, run.wake_at, run.limit_key, false AS is_suspect FROM $runs AS run
            WHERE {_MAY_WAKE} AND {_IN_GROUP}
                AND run.wake_at <= clock.at AND ($10::bigint IS NULL OR NOT ({_IS_SUSPECT}))
            ORDER BY run.wake_at, run.id
            LIMIT CASE WHEN room.number <= 0 THEN 0 WHEN room.key_concurrency IS NULL THEN $5::bigint * 10 + 100 END)
            UNION ALL
            (SELECT run.id, run.wake_at, run.limit_key, true FROM $runs AS run
            WHERE {_MAY_WAKE} AND {_IN_GROUP}
                AND run.wake_at <= clock.at AND $10::bigint > 0 AND {_IS_SUSPECT}
            ORDER BY run.wake_at, run.id
            LIMIT CASE WHEN room.number <= 0 THEN 0 ELSE $10::bigint END)
        ) AS found
        WHERE (SELECT go FROM may)
    ),
    due AS MATERIALIZED (
        SELECT found.*, row_number() OVER (
            PARTITION BY found.queue, found.limit_key ORDER BY found.priority DESC, found.wake_at, found.id
        ) AS turn_of_key
        FROM found WHERE NOT found.is_suspect OR found.turn_of_suspect <= $10::bigint
    ),
    allowed AS MATERIALIZED (
        SELECT $1::text AS namespace, due.id, due.wake_at, due.priority, due.room,
            row_number() OVER (PARTITION BY due.queue ORDER BY due.priority DESC, due.wake_at, due.id) AS turn
        FROM due
        WHERE due.key_concurrency IS NULL OR due.limit_key IS NULL OR due.turn_of_key <= due.key_concurrency - coalesce((
            SELECT leased.number FROM leased WHERE leased.queue = due.queue AND leased.limit_key = due.limit_key
        ), 0)
    ),
    picked AS MATERIALIZED (
        SELECT run.namespace, run.id, allowed.priority, allowed.wake_at
        FROM allowed CROSS JOIN clock JOIN $runs AS run ON run.namespace = allowed.namespace AND run.id = allowed.id
        WHERE (allowed.room IS NULL OR allowed.turn <= allowed.room)
            AND CASE WHEN run.held = 0 THEN run.wake_at <= clock.at ELSE false END
        ORDER BY allowed.priority DESC, allowed.wake_at, allowed.id LIMIT $5::bigint
        FOR UPDATE OF run SKIP LOCKED
    ),
    taken AS (
        UPDATE $runs AS run SET lease_token = replace(gen_random_uuid()::text, '-', ''),
            status = 'running', waiting_for = '[]', lease_until = clock.at + $3, wake_at = clock.at + $3, updated_at = clock.at,
            epoch = greatest(least(run.epoch, {_LARGEST}) + 1, clock.at), lease_owner = $4, journal_length = grown.length,
            attempts = CASE WHEN run.journal_length < grown.length THEN 1 ELSE least(run.attempts, {_LARGEST}) + 1 END
        FROM clock, picked CROSS JOIN LATERAL (
            SELECT coalesce(max(step.seq), 0) AS length FROM $steps AS step
            WHERE step.namespace = $1 AND step.run_id = picked.id
        ) AS grown
        WHERE run.namespace = picked.namespace AND run.id = picked.id
        RETURNING {", ".join(f"run.{field}" for field in RUN_FIELDS)}, run.lease_token, run.inbox_seq
    )
    SELECT taken.*, picked.priority AS turn, picked.wake_at AS since,
        (SELECT go FROM may) AS go, (SELECT wake_at FROM soon) AS soon, (SELECT at FROM clock) AS at
    FROM (VALUES (1)) AS always LEFT JOIN (taken JOIN picked USING (id)) ON true
    ORDER BY turn DESC, since, id
"""
_SET_PLANNER: Final = "; ".join(f"SET LOCAL {name} = {value}" for name, value in SERVER_SETTINGS.items())
_LOCK_LIMITS: Final = """
    SELECT queue FROM $queues
    WHERE namespace = $1 AND (concurrency IS NOT NULL OR key_concurrency IS NOT NULL) AND ($2::text[] IS NULL OR queue = ANY ($2))
    ORDER BY queue FOR UPDATE
"""


async def claim(connections: PostgresConnections, namespace: str, request: ClaimRequest) -> ClaimResult:
    """Lease due runs."""
    if request.filter.is_empty:
        return ClaimResult([], None, await connections.perform(namespace, lambda db, _: time(db, request.now)), [])

    async def attempt(db: Session, _: bool, *, lock_limits: bool) -> ClaimResult | None:  # noqa: FBT001 - as all work
        if not connections.has_own_sessions:  # of a pooler, or of a pool that was passed in
            await connection_of(db).execute(_SET_PLANNER)
        if lock_limits:
            await fetch(db, _LOCK_LIMITS, request.filter.queues)
        return await _claim(db, request, limits_are_locked=lock_limits)

    perform = connections.autocommit if connections.has_own_sessions else connections.perform
    result = await perform(namespace, partial(attempt, lock_limits=False))
    while result is None:  # once: under the locks no limit is in the way
        result = await connections.perform(namespace, partial(attempt, lock_limits=True))
    return result


async def _claim(db: Session, request: ClaimRequest, *, limits_are_locked: bool) -> ClaimResult | None:
    """None when a limit is in the way."""
    (workflows, queues), limit, length, owner, now, suspects = request
    names, versions = zip(*workflows, strict=True)
    rows = await fetch(db, CLAIM, now, length, owner, limit, names, queues, limits_are_locked, versions, suspects)
    if not rows[0]["go"]:
        return None
    result = ClaimResult([], rows[0]["soon"], rows[0]["at"], [])
    for row in rows:
        if row["id"] is None:
            continue
        try:
            result.leased.append(_leased_run(db, row))
        except SnapshotCorrupt as problem:
            lease = Lease(run_id=row["id"], epoch=row["epoch"], token=row["lease_token"], until=row["lease_until"])
            result.damaged.append(DamagedRun(lease, problem))
    return result


def _leased_run(db: Session, row: Sequence[Any]) -> LeasedRun:
    run = run_from(row, db.tables.values)
    token, inbox_seq = row[len(RUN_FIELDS)], row[len(RUN_FIELDS) + 1]
    return LeasedRun(lease_of(run, token), run, inbox_seq)
