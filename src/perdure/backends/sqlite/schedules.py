"""Schedules and queue limits."""

from __future__ import annotations

from typing import Final

from perdure.backends.base.new_runs import new_row
from perdure.backends.sqlite import runs
from perdure.backends.sqlite.rows import clock
from perdure.backends.sqlite.schema import Session
from perdure.model.records import NewRun, QueueLimits, Schedule

_PUT: Final = """
    INSERT INTO $schedules (namespace, id, workflow, spec, input, next_at, metadata) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
    ON CONFLICT (namespace, id) DO UPDATE SET workflow = ?3, spec = ?4, input = ?5, next_at = ?6, metadata = ?7
"""
_ALL: Final = "SELECT id, workflow, spec, input, next_at, metadata FROM $schedules WHERE namespace = ?1 ORDER BY id"
_DROP: Final = "DELETE FROM $schedules WHERE namespace = ?1 AND id = ?2"
_MOVE: Final = "UPDATE $schedules SET next_at = ?4 WHERE namespace = ?1 AND id = ?2 AND next_at = ?3"
_LIMIT: Final = """
    INSERT INTO $queues (namespace, queue, concurrency, key_concurrency) VALUES (?1, ?2, ?3, ?4)
    ON CONFLICT (namespace, queue) DO UPDATE SET concurrency = ?3, key_concurrency = ?4
"""
_LIMITS: Final = "SELECT queue, concurrency, key_concurrency FROM $queues WHERE namespace = ?1"


def put_schedule(db: Session, schedule: Schedule) -> None:
    """Insert or replace the schedule."""
    db.run(_PUT, schedule.id, schedule.workflow, schedule.spec, schedule.input, schedule.next_at, schedule.metadata)


def schedules(db: Session) -> list[Schedule]:
    """All schedules, by id."""
    return [
        Schedule(id=id_, workflow=workflow, spec=spec, input=input_, next_at=next_at, metadata=metadata)
        for id_, workflow, spec, input_, next_at, metadata in db.all(_ALL)
    ]


def drop_schedule(db: Session, schedule_id: str) -> bool:
    """Remove the schedule, if it is there."""
    return db.run(_DROP, schedule_id) > 0


def fire(db: Session, schedule_id: str, expected_at: int, next_at: int | None, run: NewRun, now: int | None) -> bool:
    """Move the schedule on and create its run, unless somebody else did."""
    if not db.run(_MOVE, schedule_id, expected_at, next_at):
        return False
    runs.insert(db, new_row(run, clock(now)), None)
    return True


def limit_queue(db: Session, queue: str, limits: QueueLimits) -> None:
    """Set the limits of a queue."""
    db.run(_LIMIT, queue, limits.concurrency, limits.key_concurrency)


def queue_limits(db: Session) -> dict[str, QueueLimits]:
    """The limits that were set, by queue."""
    return {
        queue: QueueLimits(concurrency=concurrency, key_concurrency=key_concurrency)
        for queue, concurrency, key_concurrency in db.all(_LIMITS)
    }
