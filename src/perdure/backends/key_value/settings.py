"""What is not of one run: schedules, queue limits, and the runs that schedules have fired.

A schedule and the run it fires are two documents. The first moves on and notes the run to be created, in one change; then the run
is created; then the note is taken away. After a crash in between, the next who claims finds the note and does the rest.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from perdure.backends.key_value import verbs
from perdure.backends.key_value.cell import Cell, Signed
from perdure.backends.key_value.lanes import Lanes
from perdure.backends.key_value.place import Place
from perdure.errors import SnapshotCorrupt
from perdure.model.records import QueueLimits, RunRow, Schedule

_KEY: Final = "settings"


class Settings(Signed, kw_only=True):
    """Limits by queue, schedules by id, and fired runs by id that may not be there yet."""

    limits: dict[str, QueueLimits] = msgspec.field(default_factory=dict)
    schedules: dict[str, Schedule] = msgspec.field(default_factory=dict)
    fired: dict[str, RunRow] = msgspec.field(default_factory=dict)


class SettingsBook:
    """The settings of one namespace."""

    def __init__(self, place: Place, lanes: Lanes) -> None:
        self._cell = Cell(place.backend, f"{place.root}/{_KEY}", Settings)
        self._lanes = lanes

    async def read(self) -> Settings:
        """The settings as they are now."""
        return await self._cell.read()

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""

        def put(settings: Settings) -> None:
            settings.schedules[schedule.id] = schedule

        await self._cell.change(put)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule; whether it was there."""
        return await self._cell.change(lambda settings: settings.schedules.pop(schedule_id, None) is not None)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""

        def put(settings: Settings) -> None:
            settings.limits[queue] = limits

        await self._cell.change(put)

    async def fire(self, schedule_id: str, expected_at: int, next_at: int | None, row: RunRow) -> bool:
        """Move the schedule on and create its run, once."""

        def move(settings: Settings) -> bool:
            schedule = settings.schedules.get(schedule_id)
            if schedule is None or schedule.next_at != expected_at:
                return False
            settings.schedules[schedule_id] = msgspec.structs.replace(schedule, next_at=next_at)
            settings.fired[row.id] = row
            return True

        if not await self._cell.change(move):
            return False
        await self.create_fired({row.id: row})
        return True

    async def create_fired(self, fired: dict[str, RunRow]) -> None:
        """Have the runs that schedules fired, and note no longer that they are to be created."""
        for run_id, row in fired.items():
            with suppress(SnapshotCorrupt):  # there is one, and whoever asks for it hears of that
                await self._lanes.change(run_id, partial(verbs.create_missing, row=row))

        def forget(settings: Settings) -> None:
            settings.fired = {run_id: row for run_id, row in settings.fired.items() if fired.get(run_id) != row}

        if fired:
            await self._cell.change(forget)
