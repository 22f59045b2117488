"""A run and its steps as `perdure show` prints them, from its row and its journal."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from perdure.errors import RunNotFound, SnapshotCorrupt
from perdure.model.durations import MICROSECOND, moment
from perdure.model.ids import check_id
from perdure.model.journal import Entry, Kind, NextTry, OpenWait
from perdure.model.records import Awaited, RunRow, Status
from perdure.snapshots.consistent_view import View, load_view, user_metadata
from perdure.snapshots.parts import StepResult
from perdure.snapshots.step_results import read_result
from perdure.store import Store

StepStatus: TypeAlias = Literal["completed", "failed", "retrying", "waiting", "started", "cancelled"]


class ErrorText(msgspec.Struct, frozen=True, kw_only=True):
    """An error that was recorded, to be read."""

    type: str
    message: str
    traceback: str | None = None


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A step, or a wait, of the timeline. `until` says when the next attempt is due, or when the wait ends."""

    key: str
    kind: Kind
    status: StepStatus
    started_at: datetime | None
    ended_at: datetime | None = None
    seconds: float | None = None
    attempts: int = 1
    value: Any = None
    error: ErrorText | None = None
    until: datetime | None = None


class RunTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A run with everything it has recorded, in the order in which it did."""

    id: str
    workflow: str
    version: int
    status: Status
    queue: str
    priority: int
    created_at: datetime
    updated_at: datetime
    attempts: int
    held: bool
    cancel_requested: bool
    lease_until: datetime | None
    waiting_for: tuple[dict[str, str], ...]
    wake_at: datetime | None
    problem: str | None
    problem_at: datetime | None
    lacks_input: bool
    input: Any
    metadata: dict[str, Any]
    steps: tuple[StepLine, ...]
    value: Any = None
    error: ErrorText | None = None


async def load_timeline(store: Store, run_id: str) -> RunTimeline:
    """The run with this id. Raises `RunNotFound`, and `SnapshotCorrupt` when a record cannot be read."""
    view = await load_view(store, check_id(run_id, "a run's id"))
    if view is None:
        raise RunNotFound(run_id)
    row = view.row
    try:
        return _timeline(row, view)
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as reason:
        raise SnapshotCorrupt(row.id, "the row or the journal", str(reason)) from reason


def _timeline(row: RunRow, view: View) -> RunTimeline:
    ending = None
    if row.outcome is not None and row.status != "cancelled":
        ending = read_result(Entry(seq=1, key=row.id, ok=row.status == "completed", payload=row.outcome)).result
    return RunTimeline(
        id=row.id,
        workflow=row.workflow,
        version=row.version,
        status=row.status,
        queue=row.queue,
        priority=row.priority,
        created_at=moment(row.created_at),
        updated_at=moment(row.updated_at),
        attempts=row.attempts,
        held=row.held,
        cancel_requested=row.cancel_requested and not row.ended,
        lease_until=_moment(row.lease_until),
        waiting_for=tuple(_awaited(each) for each in row.waiting_for),
        wake_at=None if row.ended else _moment(row.wake_at),
        problem=row.problem,
        problem_at=_moment(row.problem_at),
        lacks_input=row.lacks_input,
        input=None if row.lacks_input else msgspec.json.decode(row.input),
        metadata=user_metadata(row),
        steps=tuple(_lines(view.entries())),
        value=None if ending is None else ending.value,
        error=None if ending is None or ending.ok else _error_of(ending),
    )


def _moment(at: int | None) -> datetime | None:
    return moment(at) if at else None


def _awaited(awaited: Awaited) -> dict[str, str]:
    return {"kind": awaited.kind, "name": awaited.name}


def _lines(entries: Iterable[Entry]) -> list[StepLine]:
    """A line for each key: its result, or what it was last known to be doing."""
    last: dict[str, Entry] = {}
    started: dict[str, int] = {}
    for entry in entries:
        if not entry.key:  # it is about the run
            continue
        last[entry.key] = entry
        if entry.phase != "cancel":  # which says when the call was cancelled, not when it began
            started.setdefault(entry.key, entry.started_at)
    return [_line(entry, started.get(entry.key, 0)) for entry in last.values()]


def _line(entry: Entry, started_at: int) -> StepLine:
    at = _moment(started_at)
    if entry.phase == "open":
        return _open_line(entry, at)
    ended_at = _moment(entry.ended_at)
    took = None if at is None or ended_at is None else (entry.ended_at - started_at) / MICROSECOND
    if entry.phase == "cancel":
        return StepLine(key=entry.key, kind=entry.kind, status="cancelled", started_at=at, ended_at=ended_at, seconds=took)
    result = read_result(entry).result
    return StepLine(
        key=entry.key,
        kind=entry.kind,
        status="completed" if result.ok else "failed",
        started_at=at,
        ended_at=ended_at,
        seconds=took,
        attempts=entry.attempt,
        value=result.value,
        error=None if result.ok else _error_of(result),
    )


def _open_line(entry: Entry, at: datetime | None) -> StepLine:
    if entry.kind != "step":
        deadline = msgspec.json.decode(entry.payload, type=OpenWait | None)
        until = None if deadline is None else _moment(deadline.deadline)
        return StepLine(key=entry.key, kind=entry.kind, status="waiting", started_at=at, until=until)
    if entry.payload == b"null":
        return StepLine(key=entry.key, kind=entry.kind, status="started", started_at=at, attempts=entry.attempt)
    next_try = msgspec.json.decode(entry.payload, type=NextTry)
    failed = msgspec.json.decode(next_try.error)
    return StepLine(
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
    text = result.error if isinstance(result.error, str) else msgspec.json.encode(result.error).decode()
    return ErrorText(type="Err", message=text)
