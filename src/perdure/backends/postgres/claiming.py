"""Claiming due runs, in one statement.

Runs that may come due lie in one index by (workflow, version, queue, priority, is_started, wake_at). A claim visits each distinct
group of the first five with one seek, and from each only as many due rows as it could use, so its cost does not depend on how
many runs sleep or belong to other workflows and versions. It locks what it takes, one row after the other in due order, and skips
rows that other transactions have locked; a row that changed meanwhile is looked at again as it is then.

Where one of its queues has limits, claims wait for each other at the queue's row before they count. So the statement only says
that a limit is in its way, and then the claim of `backends.sql` is made, in a transaction of several statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.base.claim_rules import ClaimRequest
from perdure.backends.base.damaged_runs import DamagedRun
from perdure.backends.postgres.channel import connection_of, fetch
from perdure.backends.postgres.connections import PostgresConnections
from perdure.backends.sql import claims
from perdure.backends.sql.claims import ClaimResult, LeasedRun
from perdure.backends.sql.rows import RUN_FIELDS, lease_of, run_from
from perdure.backends.sql.runs import time
from perdure.backends.sql.session import Session
from perdure.errors import SnapshotCorrupt
from perdure.model.records import SUSPECT_ATTEMPTS, Lease

_MAY_WAKE: Final = "run.namespace || '' = $1 AND run.wake_at IS NOT NULL AND run.held = 0"
_IS_STARTED: Final = "(run.epoch > 0)::int"
_IN_GROUP: Final = f"""
    run.workflow = groups.workflow AND run.version = groups.version AND run.queue = groups.queue
        AND run.priority = groups.priority AND {_IS_STARTED} = groups.is_started
"""

_IS_SUSPECT: Final = f"run.status = 'running' AND run.attempts >= {SUSPECT_ATTEMPTS}"
# A damaged number must not make the statement overflow, which would fail the claims of all runs.
_LARGEST: Final = (1 << 63) - 2

# Without statistics PostgreSQL expects few rows of everything, and takes any way to them for as good as another. So in these
# statements there is only one: due runs are read in the order of their index and no further than needed, a run is looked up by
# its id (a subquery with FOR UPDATE or OFFSET is not merged into the query around it, and `held + 0` keeps out the indexes that
# have only runs with held = 0), and the update goes by the places of rows.

# The update that leases runs that are locked, at the time of `clock`. $2 is the lease's length, $3 its owner. A row that was
# changed after the statement began, but before it was locked, is left alone: its new place is not seen. What changes a due run
# wakes the workers.
_LEASE: Final = f"""
    UPDATE $runs AS run SET lease_token = replace(gen_random_uuid()::text, '-', ''),
        status = 'running', waiting_for = '[]', lease_until = clock.at + $2, wake_at = clock.at + $2, updated_at = clock.at,
        epoch = greatest(least(run.epoch, {_LARGEST}) + 1, clock.at), lease_owner = $3, running_steps = NULL,
        (journal_length, attempts) = (
            SELECT coalesce(max(step.seq), 0),
                CASE WHEN run.journal_length < coalesce(max(step.seq), 0) THEN 1 ELSE least(run.attempts, {_LARGEST}) + 1 END
            FROM $steps AS step WHERE step.namespace = $1 AND step.run_id = run.id
        )
    FROM clock WHERE run.ctid = ANY (ARRAY({{places}}))
    RETURNING {", ".join(f"run.{field}" for field in RUN_FIELDS)}, run.lease_token, run.inbox_seq
"""
# $4 now, $5 how many, $6 workflows, $7 the version of each, $8 queues or NULL, $9 how many `RunRow.is_suspect` or NULL.
# A loose index scan finds the groups: from the first row of a group straight to the first row of the next.
CLAIM: Final = f"""
    WITH RECURSIVE clock AS MATERIALIZED (
        SELECT coalesce($4::bigint, (SELECT $clock)) AS at
    ),
    visited (workflow, version, queue, priority, is_started) AS (
        (SELECT run.* FROM unnest($6::text[], $7::bigint[]) AS wanted (workflow, version) CROSS JOIN LATERAL (
            SELECT run.workflow, run.version, run.queue, run.priority, {_IS_STARTED} FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = wanted.workflow AND run.version = wanted.version
            ORDER BY run.queue, run.priority, {_IS_STARTED} LIMIT 1
        ) AS run)
        UNION ALL
        SELECT next.* FROM visited CROSS JOIN LATERAL (
            SELECT run.workflow, run.version, run.queue, run.priority, {_IS_STARTED} FROM $runs AS run
            WHERE {_MAY_WAKE} AND run.workflow = visited.workflow AND run.version = visited.version
                AND (run.queue, run.priority, {_IS_STARTED}) > (visited.queue, visited.priority, visited.is_started)
            ORDER BY run.queue, run.priority, {_IS_STARTED} LIMIT 1
        ) AS next
    ),
    groups AS MATERIALIZED (
        SELECT * FROM visited WHERE $8::text[] IS NULL OR queue = ANY ($8)
    ),
    may AS MATERIALIZED (
        SELECT NOT EXISTS (
            SELECT FROM groups JOIN $queues AS limited ON limited.namespace = $1 AND limited.queue = groups.queue
        ) AS go
    ),
    soon AS MATERIALIZED (
        SELECT min(next.wake_at) AS wake_at FROM groups CROSS JOIN clock CROSS JOIN LATERAL (
            SELECT run.wake_at FROM $runs AS run
            WHERE {_MAY_WAKE} AND {_IN_GROUP}
                AND run.wake_at > clock.at
            ORDER BY run.wake_at LIMIT 1
        ) AS next
    ),
    found AS MATERIALIZED (
        SELECT found.*, groups.priority, row_number() OVER (
            PARTITION BY found.is_suspect ORDER BY groups.priority DESC, found.wake_at, found.id
        ) AS turn_of_suspect
        FROM groups CROSS JOIN clock CROSS JOIN LATERAL (
            (SELECT run.id, run.wake_at, false AS is_suspect FROM $runs AS run
            WHERE {_MAY_WAKE} AND {_IN_GROUP}
                AND run.wake_at <= clock.at AND ($9::bigint IS NULL OR NOT ({_IS_SUSPECT}))
            ORDER BY run.wake_at FETCH FIRST ($5::bigint * 10 + 100) ROWS WITH TIES)
            UNION ALL
            (SELECT run.id, run.wake_at, true FROM $runs AS run
            WHERE {_MAY_WAKE} AND {_IN_GROUP}
                AND run.wake_at <= clock.at AND $9::bigint > 0 AND groups.is_started = 1 AND {_IS_SUSPECT}
            ORDER BY run.wake_at FETCH FIRST ($9::bigint) ROWS WITH TIES)
        ) AS found
        WHERE (SELECT go FROM may)
    ),
    picked AS MATERIALIZED (
        SELECT run.id, run.place FROM (
            SELECT found.id, clock.at FROM found CROSS JOIN clock
            WHERE NOT found.is_suspect OR found.turn_of_suspect <= $9::bigint
            ORDER BY found.priority DESC, found.wake_at, found.id
        ) AS found CROSS JOIN LATERAL (
            SELECT run.id, run.ctid AS place FROM $runs AS run
            WHERE run.namespace = $1 AND run.id = found.id AND run.wake_at <= found.at AND run.held + 0 = 0
            FOR UPDATE SKIP LOCKED
        ) AS run LIMIT $5::bigint
    ),
    taken AS ({_LEASE.format(places="SELECT place FROM picked")})
    SELECT taken.*, (SELECT go FROM may) AS go, (SELECT wake_at FROM soon) AS soon, (SELECT at FROM clock) AS at,
        CASE WHEN row_number() OVER () = 1 THEN ARRAY(SELECT id FROM picked) END AS in_order
    FROM (VALUES (1)) AS always LEFT JOIN taken ON true
"""
# $4 the time, $5 the ids of runs that this transaction has locked.
_PLACES: Final = """
    SELECT run.place FROM unnest($5::text[]) AS locked (id) CROSS JOIN LATERAL (
        SELECT run.ctid AS place FROM $runs AS run WHERE run.namespace = $1 AND run.id = locked.id OFFSET 0
    ) AS run
"""
_LEASE_LOCKED: Final = f"WITH clock AS MATERIALIZED (SELECT $4::bigint AS at) {_LEASE.format(places=_PLACES)}"


async def claim(connections: PostgresConnections, namespace: str, request: ClaimRequest) -> ClaimResult:
    """Lease due runs."""
    if request.filter.is_empty:
        return ClaimResult([], None, await connections.perform(namespace, lambda db, _: time(db, request.now)), [])

    async def attempt(db: Session, _: bool) -> ClaimResult | None:  # noqa: FBT001 - as all work
        if not connections.has_own_sessions:  # to compile the statement first takes a hundred times as long as the statement
            await connection_of(db).execute("SET LOCAL jit = off")
        return await _claim_unlimited(db, request)

    perform = connections.autocommit if connections.has_own_sessions else connections.perform
    result = await perform(namespace, attempt)
    if result is None:
        return await connections.perform(namespace, lambda db, _: claims.claim(db, request, _lease_locked))
    return result


async def _claim_unlimited(db: Session, request: ClaimRequest) -> ClaimResult | None:
    """None when one of the queues has limits."""
    (workflows, queues), limit, length, owner, now, suspects = request
    names, versions = zip(*workflows, strict=True)
    rows = await fetch(db, CLAIM, length, owner, now, limit, names, versions, queues, suspects)
    if not rows[0]["go"]:
        return None
    result = ClaimResult([], rows[0]["soon"], rows[0]["at"], [])
    _add_leased(db, [row for row in rows if row["id"] is not None], rows[0]["in_order"], result)
    return result


async def _lease_locked(db: Session, ids: Sequence[str], request: ClaimRequest, result: ClaimResult) -> None:
    """Lease runs that are locked, with one statement."""
    _add_leased(db, await fetch(db, _LEASE_LOCKED, request.length, request.owner, result.now, ids), ids, result)


def _add_leased(db: Session, rows: Sequence[Any], in_order: Sequence[str], result: ClaimResult) -> None:
    turns = {run_id: turn for turn, run_id in enumerate(in_order)}
    for row in sorted(rows, key=lambda row: turns[row["id"]]):
        try:
            result.leased.append(_leased_run(db, row))
        except SnapshotCorrupt as problem:
            lease = Lease(run_id=row["id"], epoch=row["epoch"], token=row["lease_token"], until=row["lease_until"])
            result.damaged.append(DamagedRun(lease, problem))


def _leased_run(db: Session, row: Sequence[Any]) -> LeasedRun:
    run = run_from(row, db.tables.values)
    token, inbox_seq = row[len(RUN_FIELDS)], row[len(RUN_FIELDS) + 1]
    return LeasedRun(lease_of(run, token), run, inbox_seq)
