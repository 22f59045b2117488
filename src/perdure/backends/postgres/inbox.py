"""The inbox: signals, and whom they wake. Children's outcomes are put there by `recording`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perdure.backends.postgres.rows import ENDED_SQL, SIGNAL_COLUMNS, columns, identity, signal_from
from perdure.backends.postgres.schema import CLOCK, Session
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import ENDED, Signal

# A signal sent twice at once is a unique violation for the second, which is sent again and then finds the first.
_SIGNAL: Final = f"""
    WITH target AS MATERIALIZED (
        SELECT id, status, inbox_seq FROM $runs WHERE namespace = $1 AND id = $2 FOR NO KEY UPDATE
    ),
    first AS MATERIALIZED (
        SELECT seq FROM $signals WHERE namespace = $1 AND run_id = $2 AND identity = $6
    ),
    put AS (
        INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, dedupe, identity)
        SELECT $1, $2, target.inbox_seq + 1, 'signal', $3, $4, $5, $6 FROM target
        WHERE target.status NOT IN {ENDED_SQL} AND NOT EXISTS (SELECT FROM first)
        RETURNING seq
    ),
    woken AS (
        UPDATE $runs AS run SET inbox_seq = put.seq, wake_at = CASE
            WHEN run.status = 'suspended' AND 'signal:' || $3 = ANY (run.waiting_for)
            THEN least(run.wake_at, coalesce($7::bigint, {CLOCK})) ELSE run.wake_at END
        FROM put WHERE run.namespace = $1 AND run.id = $2
    )
    SELECT target.status, (SELECT seq FROM first), (SELECT seq FROM put), pg_notify($8, '')::text FROM target
"""
_INSERT: Final = """
    INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, dedupe, consumed_by, identity)
    SELECT $1, $2, * FROM unnest($3::bigint[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::text[], $9::bytea[])
"""
_UNCONSUMED: Final = f"""
    SELECT {SIGNAL_COLUMNS} FROM $signals WHERE namespace = $1 AND run_id = $2 AND consumed_by IS NULL AND seq > $3 ORDER BY seq
"""


async def signal(db: Session, run_id: str, name: str, payload: bytes, dedupe: str | None, sent: bytes, now: int | None) -> int:
    """Put a signal with the identity `sent` into the inbox and give its seq; one that is there already keeps its own."""
    row = await db.one(_SIGNAL, run_id, name, payload, dedupe, sent, now, db.tables.channel)
    if row is None:
        raise RunNotFound(run_id)
    status, first, seq, _ = row
    if first is None and seq is None and status in ENDED:
        raise RunFinished(run_id, status)
    return int(seq if first is None else first)


async def insert(db: Session, run_id: str, rows: Sequence[Signal]) -> None:
    """Write rows as they are into an inbox that is empty."""
    if rows:
        await db.all(_INSERT, run_id, *columns([inbox_values(row) for row in rows], 7))


def inbox_values(row: Signal) -> tuple[object, ...]:
    """What is written of a row."""
    sent = identity(row.name, row.dedupe)
    return (row.seq, row.kind, row.name, row.payload, row.dedupe, row.consumed_by, sent)


async def unconsumed(db: Session, run_id: str, after: int = 0) -> list[Signal]:
    """The unconsumed rows with a seq above `after`, in order of arrival."""
    return [signal_from(row) for row in await db.all(_UNCONSUMED, run_id, after)]
