"""Lines of `list`: a `RunInfo` from the columns of a run, also where a column is damaged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from perdure.backends.base.damaged_runs import UNREADABLE, check_columns, problem_of, report
from perdure.codec.outcomes import Failure
from perdure.model.durations import MAX_INSTANT, moment
from perdure.model.records import STATUSES, Awaited, ListedRun, RunInfo, RunRow, Status, problem_text

# How much of a failed run's outcome is read for its line, in bytes or characters: class and message stand at the beginning.
OUTCOME_START: Final = 2_000
FAILED: Final[tuple[Status, ...]] = ("failed", "dead")

_LONGEST_ERROR: Final = 200
_RECORDED_EXCEPTION: Final = re.compile(r'\{"module":"[^"]*","qualname":"([^"]*)","message":"((?:[^"\\]|\\.)*)')
_CUT_FAILURE: Final = re.compile(r'\{"origin":"(?:result|throw)","error":(.*)', re.DOTALL)


R = TypeVar("R", bound=ListedRun)


def newest_first(run: ListedRun) -> tuple[int, str]:
    """The order of lists: last changed first, ties by id."""
    return (-run.updated_at, run.id)


def page_of(runs: Iterable[R], before: tuple[int, str] | None, limit: int) -> list[R]:
    """Of these runs, in any order, the page of a list that comes after the line `before`."""
    if before is not None:
        last = (-before[0], before[1])
        runs = [run for run in runs if newest_first(run) > last]
    return sorted(runs, key=newest_first)[:limit]


def line_of(row: RunRow) -> RunInfo:
    """The line of this run."""
    return RunInfo.of(row, error_line(row.status, row.outcome))


class _LineColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that a line is made of."""

    id: str
    workflow: str
    version: int
    status: Status
    created_at: int
    updated_at: int
    queue: str
    priority: int
    waiting_for: tuple[Awaited, ...]
    wake_at: int | None
    attempts: int
    problem: str | None
    metadata: bytes


LINE_FIELDS: Final = _LineColumns.__struct_fields__


def line_from(run_id: str, columns: Mapping[str, Any], outcome: bytes | None) -> RunInfo:
    """The line of a run with these columns (`LINE_FIELDS`) and this beginning of its outcome; of a damaged one, its problem."""
    try:
        run = _LineColumns(id=run_id, **{name: columns[name] for name in LINE_FIELDS if name != "id"})
        check_columns(msgspec.structs.asdict(run))
        return RunInfo.of(run, error_line(run.status, outcome))
    except UNREADABLE as reason:
        return damaged_line(run_id, columns, reason)


def damaged_line(run_id: str, columns: Mapping[str, Any], reason: BaseException) -> RunInfo:
    """The line of a run whose row cannot be read: what can be, and its problem. Logs the problem."""
    problem = problem_of(run_id, "the row", reason)
    report(problem)
    created_at, updated_at = (_readable_instant(columns.get(name)) for name in ("created_at", "updated_at"))
    workflow, version, status, queue = (columns.get(name) for name in ("workflow", "version", "status", "queue"))
    return RunInfo(
        id=run_id,
        workflow=workflow if isinstance(workflow, str) else "",
        version=version if type(version) is int else 0,
        status=status if status in STATUSES else "pending",
        created_at=created_at,
        updated_at=updated_at,
        queue=queue if isinstance(queue, str) else "",
        problem=problem_text(problem),
    )


def _readable_instant(at: object) -> datetime:
    return moment(at if type(at) is int and 0 <= at <= MAX_INSTANT else 0)


def error_line(status: Status, outcome: bytes | None) -> str | None:
    """The error of a failed or dead run in one line, from its outcome or the beginning of that; None for any other run."""
    if status not in FAILED or outcome is None:
        return None
    try:
        failure = msgspec.json.decode(outcome, type=Failure)
        error, is_exception = bytes(failure.error).decode(), failure.origin == "throw" or failure.is_exception
    except (msgspec.MsgspecError, UnicodeDecodeError):
        cut = _CUT_FAILURE.match(outcome.decode(errors="ignore"))
        if cut is None:
            return None
        error, is_exception = cut[1], True  # whether it is one stands at the end; it looks like one if it is
    recorded = _RECORDED_EXCEPTION.match(error) if is_exception else None
    if recorded is None:
        return _one_line(_text_from(error[1:-1]) if error[:1] == error[-1:] == '"' else error)
    name, message = recorded[1], _text_from(recorded[2])
    return _one_line(f"{name}: {message}" if message else name)


def _text_from(json: str) -> str:
    """The text of a JSON string without its quotes, which may be cut."""
    try:
        return msgspec.json.decode(f'"{json}"', type=str)
    except msgspec.MsgspecError:
        return json


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_ERROR else line[: _LONGEST_ERROR - 1] + "…"
