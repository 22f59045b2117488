"""The scheduler of a worker: at each instant of a schedule it creates the run, once among all workers.

It reads all schedules at the next instant of those that it knows, and a few seconds after the store has changed, so a schedule
that another process made is known soon. While nothing changes it reads them twice a minute.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from perdure.errors import SnapshotCorrupt
from perdure.model.clock import Timer
from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import UNFINISHED, Schedule
from perdure.model.run_filter import RunFilter
from perdure.snapshots.importer import RunStart, has_state
from perdure.store import ScheduleStore, require
from perdure.worker.host import Host
from perdure.worker.schedules import ScheduleSpec, is_run_of, new_run, run_id_at

log: Final = logging.getLogger("perdure")

# The time between two looks: after changes in the store, and when nothing has changed.
LOOK_SECONDS: Final = 10.0
IDLE_LOOK_SECONDS: Final = 30.0
# With catch_up="none", an instant counts as missed when it is longer ago than this: a worker may be late by a look.
MISSED_AFTER: Final = round(IDLE_LOOK_SECONDS * MICROSECOND)
# How many instants of one schedule are made up for in one look, so that one schedule does not hold up the others.
MOST_AT_ONCE: Final = 100


class Scheduler:
    """Fires the schedules of one store whose workflows are registered here."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._look_soon = asyncio.Event()
        # Whether the store may have changed since the last look, and the time of the loop at which that leads to another.
        self._has_changed = False
        self._look_after = 0.0
        self._reported: set[tuple[str, str]] = set()

    def look_soon(self) -> None:
        """A schedule has changed: look at once. May be called on any event loop."""
        self._loop.call_soon_threadsafe(self._look_soon.set)

    def note_change(self) -> None:
        """The store may have changed: look again when the last look is `LOOK_SECONDS` ago."""
        if not self._has_changed:
            self._has_changed = True
            self._loop.call_at(self._look_after, self._look_soon.set)

    async def work(self) -> None:
        """Fire what is due, again and again, until cancelled.

        Of failures in a row the second is logged: the worker reports a store that is down, and most outages are short.
        """
        failures = 0
        while True:
            self._look_soon.clear()
            self._has_changed, self._look_after = False, self._loop.time() + LOOK_SECONDS
            try:
                next_at, failures = await self.fire_due(), 0
            except Exception as failure:  # noqa: BLE001 - the store may fail in any way
                next_at, failures = None, failures + 1
                if failures == 2:
                    log.warning("schedules could not be looked at, trying again every %.0f s: %s", LOOK_SECONDS, failure)
            timers: list[Timer] = [self._loop.call_later(LOOK_SECONDS if failures else IDLE_LOOK_SECONDS, self._look_soon.set)]
            if next_at is not None:
                timers.append(self._host.clock.call_at(next_at, self._look_soon.set))
            try:
                await self._look_soon.wait()
            finally:
                for timer in timers:
                    timer.cancel()

    async def fire_due(self) -> int | None:
        """Create the runs that are due by schedules, and give the earliest instant that is not reached yet."""
        store, next_at = require(self._host.store, "schedules"), None
        await self._host.ask_time()
        for schedule in await store.schedules():
            if schedule.next_at is None:
                continue
            try:
                following = await self._fire(store, schedule)
            except (SnapshotCorrupt, ImportError, ValueError) as problem:  # of this schedule; the others go on
                following = None
                self._report(schedule, str(problem))
            next_at = following if next_at is None else next_at if following is None else min(next_at, following)
        return next_at

    async def _fire(self, store: ScheduleStore, schedule: Schedule) -> int | None:
        """Create the runs of this schedule up to now, as it says, and give its next instant."""
        host, spec, next_at = self._host, ScheduleSpec.of(schedule), schedule.next_at
        for _ in range(MOST_AT_ONCE):
            now = host.clock.now()
            if next_at is None or next_at > now:
                return next_at
            try:
                workflow = host.definition(schedule.workflow)
            except LookupError:  # another worker has it
                return None
            at = next_at if spec.catch_up == "all" else spec.when.latest(next_at, now)
            is_missed = spec.catch_up == "none" and now - at > MISSED_AFTER
            is_running = not is_missed and spec.overlap != "allow" and await self._has_unfinished(schedule.id, at)
            if is_running and spec.overlap == "queue":
                return None  # the next look finds out whether it has ended
            run = None if is_missed or is_running else new_run(workflow, schedule, spec, at, now)
            following = spec.when.after(at)
            to_create = run
            if run is not None and has_state(workflow.process_options):
                # `fire` creates runs without a journal. Created before, the run is there also if this process dies in between:
                # then the next look finds it, by its id.
                try:
                    await host.create(workflow, await host.with_state(workflow, RunStart(run), {}, is_named=True))
                except Exception as failure:  # noqa: BLE001 - of the user's function; the other schedules go on
                    self._report(schedule, f"run {run.id!r} cannot be created with its state, which is tried again: {failure!r}")
                    return None
                to_create = None
            if not await store.fire(
                schedule.id, expected_at=next_at, next_at=following, run=to_create, now=host.clock.store_now()
            ):
                return None  # another worker was first, or the schedule was changed
            if run is not None:
                log.info("schedule %r started run %r", schedule.id, run.id)
            else:
                why = "it was missed" if is_missed else "an earlier run has not ended"
                log.info("schedule %r passed over %s: %s", schedule.id, run_id_at(schedule.id, at), why)
            next_at = following
        self._look_soon.set()
        return next_at

    async def _has_unfinished(self, schedule_id: str, at: int) -> bool:
        """Return whether a run of the schedule for an earlier instant than this has not ended."""
        wanted, before = RunFilter(prefix=f"{schedule_id}:", status=UNFINISHED), None
        while page := await self._host.store.list(wanted, before=before):
            if any(is_run_of(schedule_id, info.id) and info.id != run_id_at(schedule_id, at) for info in page):
                return True
            before = instant(page[-1].updated_at), page[-1].id
        return False

    def _report(self, schedule: Schedule, problem: str) -> None:
        if (schedule.id, problem) not in self._reported:
            self._reported.add((schedule.id, problem))
            log.error("schedule %r starts no runs: %s", schedule.id, problem)
