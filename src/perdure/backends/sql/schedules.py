"""Schedules, queue limits, and the registry of workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from perdure.backends.sql.rows import SCHEDULE_FIELDS, WORKER_FIELDS, Row, fields_from
from perdure.backends.sql.runs import RunCreation, create_all
from perdure.backends.sql.session import Session
from perdure.model.records import NewRun, QueueLimits, Schedule, WorkerRow

_INSERT: Final = """
    $insert_new INTO $schedules (namespace, id, workflow, spec, input, next_at, metadata) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
    $or_nothing
"""
_REPLACE: Final = """
    UPDATE $schedules SET workflow = ?3, spec = ?4, input = ?5, next_at = ?6, metadata = ?7 WHERE namespace = ?1 AND id = ?2
"""
_ALL: Final = f"SELECT {', '.join(SCHEDULE_FIELDS)} FROM $schedules WHERE namespace = ?1 ORDER BY id"
_DROP: Final = "DELETE FROM $schedules WHERE namespace = ?1 AND id = ?2"
_MOVE: Final = "UPDATE $schedules SET next_at = ?4 WHERE namespace = ?1 AND id = ?2 AND next_at = ?3"
_INSERT_LIMIT: Final = """
    $insert_new INTO $queues (namespace, queue, concurrency, per_key, start_interval) VALUES (?1, ?2, ?3, ?4, ?5) $or_nothing
"""
# It keeps last_start_at, so that a restarted worker does not reset the rate.
_REPLACE_LIMIT: Final = """
    UPDATE $queues SET concurrency = ?3, per_key = ?4, start_interval = ?5 WHERE namespace = ?1 AND queue = ?2
"""
_DROP_LIMIT: Final = "DELETE FROM $queues WHERE namespace = ?1 AND queue = ?2"
# A queue without limits has no row: what a row is there for is limited.
LIMIT_COLUMNS: Final = "queue, concurrency, per_key, start_interval"
_LIMITS: Final = f"SELECT {LIMIT_COLUMNS} FROM $queues WHERE namespace = ?1"
_SEEN_AT: Final = "coalesce(?3:int, $clock)"
_INSERT_WORKER: Final = f"""
    $insert_new INTO $workers (namespace, id, seen_at, info) VALUES (?1, ?2, {_SEEN_AT}, ?4) $or_nothing
"""
_REPLACE_WORKER: Final = f"UPDATE $workers SET seen_at = {_SEEN_AT}, info = ?4 WHERE namespace = ?1 AND id = ?2"
_ALL_WORKERS: Final = f"SELECT {', '.join(WORKER_FIELDS)} FROM $workers WHERE namespace = ?1 ORDER BY id"
_DROP_WORKER: Final = "DELETE FROM $workers WHERE namespace = ?1 AND id = ?2"


async def put_schedule(db: Session, schedule: Schedule) -> None:
    """Insert or replace the schedule."""
    values = [getattr(schedule, field) for field in SCHEDULE_FIELDS]
    await db.send([db.statement(_INSERT, *values), db.statement(_REPLACE, *values)])


async def schedules(db: Session) -> list[Schedule]:
    """All schedules, by id."""
    return [Schedule(**fields_from(SCHEDULE_FIELDS, row, db.tables.values)) for row in await db.all(_ALL)]


async def drop_schedule(db: Session, schedule_id: str) -> bool:
    """Remove the schedule, if it is there."""
    return await db.run(_DROP, schedule_id) > 0


async def fire(db: Session, schedule_id: str, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None) -> bool:
    """Move the schedule on and create its run, unless another process has done so."""
    if not await db.run(_MOVE, schedule_id, expected_at, next_at):
        return False
    if run is not None:
        await create_all(db, [RunCreation(run, now=now)])
    return True


async def limit_queue(db: Session, queue: str, limits: QueueLimits) -> None:
    """Replace the limits of a queue."""
    if not limits.is_limited:
        await db.run(_DROP_LIMIT, queue)
        return
    values = (queue, limits.concurrency, limits.per_key, limits.interval)
    await db.send([db.statement(_INSERT_LIMIT, *values), db.statement(_REPLACE_LIMIT, *values)])


async def queue_limits(db: Session) -> dict[str, QueueLimits]:
    """The limits that were set, by queue."""
    return limits_from(db, await db.all(_LIMITS))


def limits_from(db: Session, rows: Iterable[Row]) -> dict[str, QueueLimits]:
    """Limits by queue, from rows of `LIMIT_COLUMNS`."""
    return {
        db.tables.values.name_from(queue): QueueLimits(
            concurrency=optional_number(concurrency), per_key=optional_number(per_key), interval=optional_number(interval)
        )
        for queue, concurrency, per_key, interval in rows
    }


def optional_number(value: Any) -> int | None:
    """The number, or None for NULL."""
    return None if value is None else int(value)


async def put_worker(db: Session, worker_id: str, info: bytes, now: int | None) -> None:
    """Insert or replace the worker, seen now."""
    values = worker_id, now, info
    if not await db.run(_REPLACE_WORKER, *values):
        await db.run(_INSERT_WORKER, *values)


async def workers(db: Session) -> list[WorkerRow]:
    """All workers, by id."""
    return [WorkerRow(**fields_from(WORKER_FIELDS, row, db.tables.values)) for row in await db.all(_ALL_WORKERS)]


async def drop_worker(db: Session, worker_id: str) -> None:
    """Remove the worker, if it is there."""
    await db.run(_DROP_WORKER, worker_id)
