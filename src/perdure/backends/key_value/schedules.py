"""Schedules, queue limits, and the runs that schedules have fired: one document for the namespace; and one for the workers.

A schedule and the run it fires are two documents. In one change the schedule moves on and the run is noted; then the run is
created; then the note is removed. After a crash in between, the next `claim` finds the note and does the rest.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import msgspec

from perdure.backends.key_value import verbs
from perdure.backends.key_value.namespace import KeyValueNamespace
from perdure.backends.key_value.run_writer import RunWriter
from perdure.backends.key_value.settings_document import NoncedDocument, SwappedDocument
from perdure.errors import SnapshotCorrupt
from perdure.model.records import QueueLimits, RunRow, Schedule, WorkerRow


class KeyValueSettings(NoncedDocument, kw_only=True):
    """Limits by queue, schedules by id, and by id the fired runs that may not exist yet."""

    limits: dict[str, QueueLimits] = msgspec.field(default_factory=dict)
    schedules: dict[str, Schedule] = msgspec.field(default_factory=dict)
    fired: dict[str, RunRow] = msgspec.field(default_factory=dict)


class KeyValueWorkers(NoncedDocument, kw_only=True):
    """The workers by id."""

    workers: dict[str, WorkerRow] = msgspec.field(default_factory=dict)


class Schedules:
    """The schedules, queue limits and workers of one namespace."""

    def __init__(self, namespace: KeyValueNamespace, writer: RunWriter) -> None:
        self._document = SwappedDocument(namespace.backend, f"{namespace.root}/settings", KeyValueSettings)
        # A document of its own: workers write it with their heartbeats, and claims read the other one.
        self._workers = SwappedDocument(namespace.backend, f"{namespace.root}/workers", KeyValueWorkers)
        self._writer = writer

    async def read(self) -> KeyValueSettings:
        """The schedules and limits as they are now."""
        return await self._document.read()

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""

        def put(settings: KeyValueSettings) -> None:
            settings.schedules[schedule.id] = schedule

        await self._document.change(put)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule; whether it was there."""
        return await self._document.change(lambda settings: settings.schedules.pop(schedule_id, None) is not None)

    async def put_worker(self, worker: WorkerRow) -> None:
        """Insert or replace the worker."""

        def put(document: KeyValueWorkers) -> None:
            document.workers[worker.id] = worker

        await self._workers.change(put)

    async def list_workers(self) -> list[WorkerRow]:
        """All workers, by id."""
        return [worker for _, worker in sorted((await self._workers.read()).workers.items())]

    async def drop_worker(self, worker_id: str) -> None:
        """Remove the worker, if it is there."""

        def drop(document: KeyValueWorkers) -> None:
            document.workers.pop(worker_id, None)

        await self._workers.change(drop)

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Replace the limits of a queue."""

        def put(settings: KeyValueSettings) -> None:
            settings.limits.pop(queue, None)
            if limits.is_limited:
                settings.limits[queue] = limits

        await self._document.change(put)

    async def fire(self, schedule_id: str, expected_at: int, next_at: int | None, row: RunRow | None) -> bool:
        """Move the schedule on and create its run, once."""

        def move(settings: KeyValueSettings) -> bool:
            schedule = settings.schedules.get(schedule_id)
            if schedule is None or schedule.next_at != expected_at:
                return False
            settings.schedules[schedule_id] = msgspec.structs.replace(schedule, next_at=next_at)
            if row is not None:
                settings.fired[row.id] = row
            return True

        if not await self._document.change(move):
            return False
        if row is not None:
            await self.create_fired({row.id: row})
        return True

    async def create_fired(self, fired: dict[str, RunRow]) -> None:
        """Create the runs that schedules fired, and remove the notes that they are to be created."""
        for run_id, row in fired.items():
            with suppress(SnapshotCorrupt):  # there is a run with this id, and reading it raises this
                await self._writer.change(run_id, partial(verbs.create_missing, row=row))

        def forget(settings: KeyValueSettings) -> None:
            settings.fired = {run_id: row for run_id, row in settings.fired.items() if fired.get(run_id) != row}

        if fired:
            await self._document.change(forget)
