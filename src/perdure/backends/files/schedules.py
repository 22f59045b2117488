"""Schedules and queue limits: changed under the lock of the settings, read without."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import msgspec

from perdure.backends.base.new_runs import new_row
from perdure.backends.files.place import Place
from perdure.backends.files.verbs import clock, create_missing
from perdure.errors import SnapshotCorrupt
from perdure.model.records import NewRun, QueueLimits, Schedule


def put_schedule(place: Place, schedule: Schedule) -> None:
    """Insert or replace the schedule."""
    with place.lock("settings"):
        settings = place.settings.read()
        settings.schedules[schedule.id] = schedule
        place.settings.write(settings)


def schedules(place: Place) -> list[Schedule]:
    """All schedules, by id."""
    return [schedule for _, schedule in sorted(place.settings.read().schedules.items())]


def drop_schedule(place: Place, schedule_id: str) -> bool:
    """Remove the schedule."""
    with place.lock("settings"):
        settings = place.settings.read()
        if settings.schedules.pop(schedule_id, None) is None:
            return False
        place.settings.write(settings)
        return True


def fire(place: Place, schedule_id: str, expected_at: int, next_at: int | None, run: NewRun, now: int | None) -> bool:
    """Move the schedule on and create its run, once."""
    row = new_row(run, clock(now))
    with place.lock("settings"):
        settings = place.settings.read()
        schedule = settings.schedules.get(schedule_id)
        if schedule is None or schedule.next_at != expected_at:
            return False
        settings.schedules[schedule_id] = msgspec.structs.replace(schedule, next_at=next_at)
        settings.fired.append(row)
        place.settings.write(settings)
        create_fired(place)
        return True


def create_fired(place: Place) -> None:
    """Create what schedules have started. The caller has the lock of the settings."""
    settings = place.settings.read()
    for row in settings.fired:
        with suppress(SnapshotCorrupt):  # there is a run, and it is left alone
            place.change_one(row.id, partial(create_missing, row=row), create=True)
    settings.fired = []
    place.settings.write(settings)


def limit_queue(place: Place, queue: str, limits: QueueLimits) -> None:
    """Set the limits of a queue."""
    with place.lock("settings"):
        settings = place.settings.read()
        settings.limits[queue] = limits
        place.settings.write(settings)


def queue_limits(place: Place) -> dict[str, QueueLimits]:
    """The limits that were set, by queue."""
    return place.settings.read().limits
