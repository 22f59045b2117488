"""`runtime.describe(run_id)`: a run with everything it has recorded and does now, to be read by people and programs.

What is recorded comes from the row and the journal, at one moment. A step is recorded when it returns, so steps under way come
from elsewhere: from the drive if this process drives the run, otherwise from what the lease holder wrote with its last heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from perdure.codec import readable, tree_of
from perdure.errors import RunNotFound, SnapshotCorrupt
from perdure.model.approvals import OpenApproval
from perdure.model.durations import MICROSECOND, moment
from perdure.model.ids import check_id
from perdure.model.journal import CancelPoint, Entry, Intent, Kind, OpenChild, OpenWait, StepOpening
from perdure.model.own_names import child_key, parts_of
from perdure.model.process_owner import Owner
from perdure.model.records import RunRow, Status, deadline_in_force
from perdure.model.running_steps import RunningSteps, decode_running_steps
from perdure.result import WaitingFor
from perdure.snapshots.consistent_view import View, load_view, user_metadata
from perdure.snapshots.effects import not_undone
from perdure.snapshots.parts import StepResult
from perdure.snapshots.step_results import read_result
from perdure.worker.active_runs import active_runs
from perdure.worker.host import Host

StepKind: TypeAlias = Kind | Literal["compensation"]
StepStatus: TypeAlias = Literal["completed", "failed", "retrying", "waiting", "started", "cancelled"]


class ErrorText(msgspec.Struct, frozen=True, kw_only=True):
    """An error that was recorded, to be read."""

    type: str
    message: str
    traceback: str | None = None


class StepDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A step, a wait or a child, of which something is recorded. `until` says when the next attempt is due, or the wait ends.

    The `key` of a compensation is that of its step. The cancellation of the run has no key, and as `until` the deadline if that
    was its reason. The `value` of an approval that is pending is what it asks about, and `assignees` are those who may decide;
    none: everyone. `child_id` is the id of a child's run.
    """

    key: str
    kind: StepKind
    status: StepStatus
    started_at: datetime | None
    ended_at: datetime | None = None
    seconds: float | None = None
    attempts: int = 1
    value: Any = None
    error: ErrorText | None = None
    until: datetime | None = None
    assignees: tuple[str, ...] = ()
    child_id: str | None = None


class RunningStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose function was running when this was seen, or the compensation of one, and when that attempt began."""

    key: str
    started_at: datetime
    kind: Literal["step", "compensation"] = "step"

    @classmethod
    def of(cls, key: str, started_at: int, journal_keys: Iterable[str]) -> RunningStep:
        """Return the step that runs under this key."""
        kind, own = parts_of(key, journal_keys)
        return cls(key=own, started_at=moment(started_at), kind="compensation" if kind == "compensation" else "step")


class RunDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A run with everything it has recorded, in the order in which it did, and what it does now.

    `wake_at` is when a run that waits goes on at the latest, or when a running one may be taken over. `worker` is the process
    that holds the lease until `lease_until`, as `runtime.workers()` names it. `running_steps` are the longest-running of the
    `running_step_count` steps that were under way at `running_as_of`. `generation` counts how often the run has started over; it
    last did so at `continued_at`. `not_undone` has the keys of what a run has done that
    has a compensation and is not undone, if the run has ended badly or cannot be resumed as it is. Values are plain JSON.
    """

    id: str
    workflow: str
    version: int
    generation: int
    continued_at: datetime | None
    status: Status
    queue: str
    priority: int
    limit_key: str | None
    created_at: datetime
    updated_at: datetime
    start_at: datetime | None
    deadline: datetime | None
    attempts: int
    held: bool
    cancel_requested: bool
    worker: str | None
    lease_owner: str | None
    lease_until: datetime | None
    waiting_for: tuple[WaitingFor, ...]
    wake_at: datetime | None
    problem: str | None
    problem_at: datetime | None
    lacks_input: bool
    input: Any
    metadata: dict[str, Any]
    progress: Any
    parent_id: str | None
    parent_key: str | None
    running_steps: tuple[RunningStep, ...]
    running_step_count: int
    running_as_of: datetime | None
    steps: tuple[StepDescription, ...]
    not_undone: tuple[str, ...] = ()
    value: Any = None
    error: ErrorText | None = None


class _UnderWay(NamedTuple):
    """Which steps run, and when that was seen."""

    steps: RunningSteps
    at: int


async def describe_run(host: Host, run_id: str) -> RunDescription:
    """The run with this id. Raises `RunNotFound`, and `SnapshotCorrupt` when a record cannot be read."""
    view = await load_view(host.store, check_id(run_id, "a run's id"))
    if view is None:
        raise RunNotFound(run_id)
    row = view.row
    try:
        described = _describe(view, _steps_under_way(host, row))
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as reason:
        raise SnapshotCorrupt(row.id, "the row or the journal", str(reason)) from reason
    if described.not_undone:
        described = msgspec.structs.replace(described, not_undone=await _without_open_children(host, described))
    problem = await _problem_of_child(host, described) if row.status == "suspended" else None
    return described if problem is None else msgspec.structs.replace(described, problem=problem)


async def _problem_of_child(host: Host, parent: RunDescription) -> str | None:
    """Return why a run waits for a child that cannot be resumed, if it does."""
    awaited = {each.name for each in parent.waiting_for if each.kind == "child"}
    for step in parent.steps:
        if step.kind == "child" and step.status == "waiting" and step.key in awaited and step.child_id is not None:
            child = await host.store.get(step.child_id)
            if child is not None and not child.ended and child.problem is not None:
                return f"it waits for its child {child.id!r}, which has a problem: {child.problem}"
    return None


async def _without_open_children(host: Host, parent: RunDescription) -> tuple[str, ...]:
    """Return the keys of what is not undone, without children that have not completed: they undo themselves."""
    waiting = {step.key: step.child_id for step in parent.steps if step.kind == "child" and step.status != "completed"}
    rows = {key: await host.store.get(child_id) for key, child_id in waiting.items() if key in parent.not_undone and child_id}
    return tuple(key for key in parent.not_undone if key not in rows or ((row := rows[key]) and row.status == "completed"))


def _steps_under_way(host: Host, row: RunRow) -> _UnderWay:
    if row.status != "running":  # a drive of this process may be about to end
        return _UnderWay(RunningSteps(), row.updated_at)
    for active in active_runs.find_all(host.store, row.id):
        if active.drive.run.epoch == row.epoch:
            executing = active.drive.executing.copy()  # atomic, since another thread's event loop may change it
            return _UnderWay(RunningSteps(len(executing), tuple(executing.items())), host.clock.now())
    return _UnderWay(decode_running_steps(row.running_steps), row.updated_at)


def _describe(view: View, under_way: _UnderWay) -> RunDescription:
    row, ending = view.row, None
    keys = [entry.key for entry in view.journal]
    if row.outcome is not None and row.status != "cancelled":
        ending = read_result(Entry(seq=1, key=row.id, ok=row.status == "completed", payload=row.outcome)).result
    return RunDescription(
        id=row.id,
        workflow=row.workflow,
        version=row.version,
        generation=row.generation,
        continued_at=None if row.continued_at is None else moment(row.continued_at),
        status=row.status,
        queue=row.queue,
        priority=row.priority,
        limit_key=row.limit_key,
        created_at=moment(row.created_at),
        updated_at=moment(row.updated_at),
        start_at=_moment(row.start_at),
        deadline=_moment(deadline_in_force(row, view.entries())),
        attempts=row.attempts,
        held=row.held,
        cancel_requested=row.cancel_requested and not row.ended,
        worker=worker_of(row),
        lease_owner=row.lease_owner,
        lease_until=_moment(row.lease_until),
        waiting_for=tuple(awaited.by_user for awaited in row.waiting_for),
        wake_at=None if row.ended else _moment(row.wake_at),
        problem=row.problem,
        problem_at=_moment(row.problem_at),
        lacks_input=row.lacks_input,
        input=None if row.lacks_input else readable(msgspec.json.decode(row.input)),
        metadata=user_metadata(row),
        progress=None if row.progress is None else readable(tree_of(row.progress)[0]),
        parent_id=row.parent_id,
        parent_key=None if row.parent_key is None else child_key(row.parent_key),
        running_steps=tuple(RunningStep.of(key, at, keys) for key, at in under_way.steps.started),
        running_step_count=under_way.steps.count,
        running_as_of=moment(under_way.at) if row.status == "running" else None,
        steps=tuple(_describe_steps(view.entries())),
        not_undone=tuple(not_undone(row, view.journal[: view.length])),
        value=None if ending is None else readable(ending.value),
        error=None if ending is None or ending.ok else _error_of(ending),
    )


def worker_of(row: RunRow) -> str | None:
    """The holder of the lease. A store on this machine names a process so that its end can be noticed; that is long."""
    owner = None if row.lease_owner is None else Owner.parse(row.lease_owner)
    return row.lease_owner if owner is None else f"process {owner.pid}"


def _moment(at: int | None) -> datetime | None:
    return moment(at) if at else None


def _describe_steps(entries: Iterable[Entry]) -> list[StepDescription]:
    """A description for each key: its result, or what it was last known to be doing."""
    last: dict[str, Entry] = {}
    started: dict[str, int] = {}
    children: dict[str, str] = {}
    for entry in entries:
        if not entry.key:  # it is about the run
            continue
        last[entry.key] = entry
        if entry.phase != "cancel":  # which says when the call was cancelled, not when it began
            started.setdefault(entry.key, entry.started_at)
        if entry.kind == "child" and entry.phase == "open":
            children[entry.key] = msgspec.json.decode(entry.payload, type=OpenChild).id
    described = [_describe_step(entry, started.get(entry.key, 0)) for entry in last.values()]
    return [_as_written(msgspec.structs.replace(step, child_id=children.get(step.key)), last) for step in described]


def _as_written(step: StepDescription, journal_keys: Iterable[str]) -> StepDescription:
    """Return the step with the key that a user knows."""
    kind, key = parts_of(step.key, journal_keys)
    if kind == "call":
        return step
    return msgspec.structs.replace(step, key=key, kind="compensation" if kind == "compensation" else step.kind)


def _describe_step(entry: Entry, started_at: int) -> StepDescription:
    at = _moment(started_at)
    if entry.phase == "open":
        return _describe_open_step(entry, at)
    ended_at = _moment(entry.ended_at)
    took = None if at is None or ended_at is None else (entry.ended_at - started_at) / MICROSECOND
    if entry.phase == "cancel":
        return StepDescription(key=entry.key, kind=entry.kind, status="cancelled", started_at=at, ended_at=ended_at, seconds=took)
    if entry.kind == "cancel":
        deadline = _moment(msgspec.json.decode(entry.payload, type=CancelPoint).deadline)
        return StepDescription(key=entry.key, kind="cancel", status="completed", started_at=at, ended_at=ended_at, until=deadline)
    result = read_result(entry).result
    value = readable(result.value)
    if entry.kind == "approval" and isinstance(value, dict):
        value.pop("nonce", None)  # only its sender knows a decision by it
    return StepDescription(
        key=entry.key,
        kind=entry.kind,
        status="completed" if result.ok else "failed",
        started_at=at,
        ended_at=ended_at,
        seconds=took,
        attempts=entry.attempt,
        value=value,
        error=None if result.ok else _error_of(result),
    )


def _describe_open_step(entry: Entry, at: datetime | None) -> StepDescription:
    if entry.kind == "approval":
        asked = msgspec.json.decode(entry.payload, type=OpenApproval)
        return StepDescription(
            key=entry.key,
            kind="approval",
            status="waiting",
            started_at=at,
            value=readable(tree_of(bytes(asked.payload))[0]),
            until=_moment(asked.deadline),
            assignees=asked.assignees,
        )
    if entry.kind == "child":
        return StepDescription(key=entry.key, kind=entry.kind, status="waiting", started_at=at)
    if entry.kind != "step":
        deadline = msgspec.json.decode(entry.payload, type=OpenWait | None)
        until = None if deadline is None else _moment(deadline.deadline)
        return StepDescription(key=entry.key, kind=entry.kind, status="waiting", started_at=at, until=until)
    next_try = msgspec.json.decode(entry.payload, type=StepOpening)
    if isinstance(next_try, Intent):
        return StepDescription(key=entry.key, kind=entry.kind, status="started", started_at=at, attempts=entry.attempt)
    failed = msgspec.json.decode(next_try.error)
    return StepDescription(
        key=entry.key,
        kind=entry.kind,
        status="retrying",
        started_at=at,
        attempts=entry.attempt - 1,  # the entry has the number of the next attempt
        error=ErrorText(type=failed["qualname"], message=failed["message"], traceback=failed.get("traceback")),
        until=_moment(next_try.at),
    )


def _error_of(result: StepResult) -> ErrorText:
    cause = result.cause or {}
    if cause.get("type") == "error":
        return ErrorText(type=cause["name"], message=cause["message"], traceback=cause.get("stack"))
    text = result.error if isinstance(result.error, str) else msgspec.json.encode(readable(result.error)).decode()
    return ErrorText(type="Err", message=text)
