"""Schedules: workflows that are started by the clock, kept in the store.

The store moves a schedule from one instant to the next and creates the run in the same transition, so each instant has one run
however many workers there are. The run's id is `{schedule id}:{instant}`.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from perdure.errors import ScheduleNotFound, SnapshotCorrupt
from perdure.model.durations import MAX_INSTANT, MICROSECOND, Duration, moment
from perdure.model.ids import check_id, random_bytes
from perdure.model.records import NewRun, Schedule
from perdure.model.recurrence import Recurrence, recurrence
from perdure.options import columns_of
from perdure.snapshots.importer import RunStart
from perdure.store import ScheduleStore, require
from perdure.worker.host import Host
from perdure.worker.workflow_body import WorkflowDefinition

# What happens at an instant while an earlier run of the schedule has not ended.
Overlap: TypeAlias = Literal["skip", "allow", "queue"]
# What happens with instants that passed while no worker was there.
CatchUp: TypeAlias = Literal["last", "all", "none"]

_INSTANT: Final = re.compile(r"\d{4,}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class ScheduleSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a schedule says besides its workflow and input: the text that the store keeps and does not read."""

    when: Recurrence
    input_hash: bytes
    overlap: Overlap = "skip"
    catch_up: CatchUp = "last"
    queue: str = "default"
    priority: int = 0
    limit_key: str | None = None
    # How long after its creation a run must have ended, in microseconds.
    deadline: int | None = None
    is_held: bool = False

    @staticmethod
    def of(schedule: Schedule) -> ScheduleSpec:
        """The spec in this schedule. Raises `SnapshotCorrupt`."""
        try:
            return msgspec.json.decode(schedule.spec, type=ScheduleSpec)
        except (msgspec.MsgspecError, ValueError) as reason:
            raise SnapshotCorrupt(schedule.id, "the schedule", str(reason)) from reason


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as `runtime.schedules()` gives it. `next_at` is None while it is on hold, and when no instant is left."""

    id: str
    workflow: str
    cron: str | None
    tz: str | None
    every: timedelta | None
    overlap: Overlap
    catch_up: CatchUp
    queue: str
    priority: int
    limit_key: str | None
    deadline: timedelta | None
    next_at: datetime | None
    held: bool


class RuntimeSchedules:
    """The schedules of one store."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def _store(self) -> ScheduleStore:
        return require(self._host.store, "schedules")

    async def put(
        self,
        workflow: WorkflowDefinition,
        args: tuple[Any, ...],
        *,
        cron: str | None,
        every: Duration | None,
        tz: str | None,
        schedule_id: str | None,
        overlap: Overlap,
        catch_up: CatchUp,
        options: dict[str, Any],
    ) -> ScheduleInfo:
        """Insert or replace the schedule. One that recurs as before keeps its next instant, and stays on hold if it is."""
        _check_choice("overlap", overlap, get_args(Overlap))
        _check_choice("catch_up", catch_up, get_args(CatchUp))
        new_id = check_id(workflow.name if schedule_id is None else schedule_id, "a schedule's id")
        check_id(run_id_at(new_id, 0), "the id of a schedule's runs")
        await self._host.ask_time()
        now = self._host.clock.now()
        when = recurrence(cron, every, tz, now - now % MICROSECOND)
        encoded, digest, _ = workflow.encode_input(self._host.settings.codec, args, {})
        if isinstance(options.get("deadline"), datetime):
            raise TypeError("deadline= of a schedule is a length of time, which counts from the creation of each run")
        columns = columns_of(options, 0)  # counted from 0, the deadline is its length
        metadata = columns.pop("metadata", b"{}")
        spec = ScheduleSpec(when=when, input_hash=digest, overlap=overlap, catch_up=catch_up, **columns)
        next_at = when.after(now)
        known = await self._find(new_id)
        if known is not None:
            spec, next_at = _keep_time(spec, next_at, known)
        made = Schedule(id=new_id, workflow=workflow.name, spec=_text(spec), input=encoded, next_at=next_at, metadata=metadata)
        await self._store.put_schedule(made)
        return info_of(made)

    async def all(self) -> list[ScheduleInfo]:
        """All schedules, by id."""
        return [info_of(schedule) for schedule in await self._store.schedules()]

    async def hold(self, schedule_id: str) -> None:
        """Let it start no run until `unhold`. Raises `ScheduleNotFound`."""
        await self._replace(schedule_id, is_held=True)

    async def unhold(self, schedule_id: str) -> None:
        """Undo `hold`. What came meanwhile is not made up for. Raises `ScheduleNotFound`."""
        await self._replace(schedule_id, is_held=False)

    async def run_now(self, schedule_id: str) -> NewRun:
        """Create a run of the schedule that is due at once, whatever its next instant. Raises `ScheduleNotFound`."""
        schedule = await self._get(schedule_id)
        await self._host.ask_time()
        now = self._host.clock.now()
        definition, spec = self._host.definition(schedule.workflow), ScheduleSpec.of(schedule)
        run = new_run(definition, schedule, spec, now - now % MICROSECOND, now)
        await self._host.create(definition, await self._host.with_state(definition, RunStart(run), {}, is_named=True))
        return run

    async def drop(self, schedule_id: str) -> bool:
        """Remove the schedule; False when there was none. Its runs stay."""
        return await self._store.drop_schedule(check_id(schedule_id, "a schedule's id"))

    async def _replace(self, schedule_id: str, *, is_held: bool) -> None:
        schedule = await self._get(schedule_id)
        spec = ScheduleSpec.of(schedule)
        if spec.is_held == is_held:
            return
        await self._host.ask_time()
        spec = msgspec.structs.replace(spec, is_held=is_held)
        next_at = None if is_held else spec.when.after(self._host.clock.now())
        await self._store.put_schedule(msgspec.structs.replace(schedule, spec=_text(spec), next_at=next_at))

    async def _get(self, schedule_id: str) -> Schedule:
        found = await self._find(check_id(schedule_id, "a schedule's id"))
        if found is None:
            raise ScheduleNotFound(schedule_id)
        return found

    async def _find(self, schedule_id: str) -> Schedule | None:
        return next((each for each in await self._store.schedules() if each.id == schedule_id), None)


def new_run(workflow: WorkflowDefinition, schedule: Schedule, spec: ScheduleSpec, at: int, now: int) -> NewRun:
    """The run of this schedule for the instant `at`, created now."""
    return NewRun(
        id=run_id_at(schedule.id, at),
        workflow=workflow.name,
        version=workflow.version,
        input=schedule.input,
        input_hash=spec.input_hash,
        seed=random_bytes(),
        definition_hash=workflow.definition_hash,
        metadata=schedule.metadata,
        queue=spec.queue,
        priority=spec.priority,
        limit_key=spec.limit_key,
        start_at=at,
        deadline=None if spec.deadline is None else min(now + spec.deadline, MAX_INSTANT),
    )


def run_id_at(schedule_id: str, at: int) -> str:
    """The id of the run of this schedule for the instant `at`."""
    return f"{schedule_id}:{moment(at):%Y-%m-%dT%H:%M:%SZ}"


def is_run_of(schedule_id: str, run_id: str) -> bool:
    """Whether this is the id of a run of the schedule, and not of another whose id begins alike."""
    return run_id.startswith(f"{schedule_id}:") and _INSTANT.fullmatch(run_id, len(schedule_id) + 1) is not None


def info_of(schedule: Schedule) -> ScheduleInfo:
    """The schedule, to be shown. Raises `SnapshotCorrupt`."""
    spec = ScheduleSpec.of(schedule)
    when = spec.when
    return ScheduleInfo(
        id=schedule.id,
        workflow=schedule.workflow,
        cron=when.cron,
        tz=None if when.cron is None else when.tz,
        every=None if when.every is None else timedelta(microseconds=when.every),
        overlap=spec.overlap,
        catch_up=spec.catch_up,
        queue=spec.queue,
        priority=spec.priority,
        limit_key=spec.limit_key,
        deadline=None if spec.deadline is None else timedelta(microseconds=spec.deadline),
        next_at=None if schedule.next_at is None else moment(schedule.next_at),
        held=spec.is_held,
    )


def _keep_time(spec: ScheduleSpec, next_at: int | None, known: Schedule) -> tuple[ScheduleSpec, int | None]:
    """A program puts its schedules at every start: one that recurs as before goes on, and does not begin anew."""
    try:
        before = ScheduleSpec.of(known)
    except SnapshotCorrupt:  # it is replaced
        return spec, next_at
    spec = msgspec.structs.replace(spec, is_held=before.is_held)
    if msgspec.structs.replace(before.when, anchor=spec.when.anchor) == spec.when:
        return msgspec.structs.replace(spec, when=before.when), known.next_at
    return spec, None if before.is_held else next_at


def _text(spec: ScheduleSpec) -> str:
    return msgspec.json.encode(spec).decode()


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(choices)}, not {value!r}")
