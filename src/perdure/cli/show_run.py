"""How `perdure show` prints a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from perdure.cli.output import in_utc, length, preview, print_table, print_text
from perdure.cli.waiting import what_it_waits_for
from perdure.operations.describe_run import ErrorText, RunDescription, RunningStep, StepDescription

# How many steps under way are named.
_MAX_UNDER_WAY: Final = 10
_COLUMNS: Final = ("step", "kind", "status", "start (UTC)", "took", "tries", "result")


def print_run(run: RunDescription) -> None:
    """The run, a table of its steps, and the errors in full."""
    for line in _head(run):
        print_text(line)
    if run.steps:
        print_text("")
        print_table(_COLUMNS, [_row(step) for step in run.steps])
    for step in run.steps:
        if step.error is not None:
            _print_error(f"{_name(step)} {step.status}", step.error)
    if run.error is not None:
        _print_error("the run failed", _without_repetition(run.error, run.steps))


def _head(run: RunDescription) -> list[str]:
    version = "" if run.version <= 1 else f" v{run.version}"
    lines = [f"run {run.id}: {run.workflow or 'workflow not known'}{version}, {run.status}"]
    lines.append(f"created {in_utc(run.created_at)}, changed {in_utc(run.updated_at)} UTC; queue {run.queue}")
    if run.continued_at is not None:
        lines.append(f"started over at {in_utc(run.continued_at)} UTC, generation {run.generation}")
    elif run.generation:
        lines.append(f"generation {run.generation}")
    lines.append(f"input {'not known' if run.lacks_input else _arguments(run.input)}")
    if run.metadata:
        lines.append(f"metadata {preview(run.metadata)}")
    if run.status in ("pending", "suspended"):
        lines.append(_next(run))
    elif run.status == "running":
        lines.append(f"{run.worker or 'a worker'} holds it until {in_utc(run.lease_until)} UTC at least; attempt {run.attempts}")
        lines.append(_under_way(run))
    if run.held:
        lines.append(f"on hold; `perdure unhold {run.id}` lets it go on")
    if run.cancel_requested:
        lines.append("it was asked to stop")
    lines += _trouble(run)
    if run.status == "completed":
        lines.append(f"value {preview(run.value)}")
    return lines


def _trouble(run: RunDescription) -> list[str]:
    """Return why the run cannot be resumed, and what it has left behind."""
    since = "" if run.problem_at is None else f" ({in_utc(run.problem_at)} UTC)"
    lines = [] if run.problem is None else [f"problem{since}: {run.problem}"]
    return [*lines, f"not undone: {', '.join(run.not_undone)}"] if run.not_undone else lines


def _arguments(stored: Any) -> str:
    """The arguments of the workflow, as it would be called."""
    match stored:
        case [list() as args, dict() as kwargs]:
            return ", ".join([*map(preview, args), *(f"{name}={preview(value)}" for name, value in kwargs.items())]) or "none"
    return preview(stored)


def _under_way(run: RunDescription) -> str:
    """The steps that a running run executes."""
    if not run.running_step_count:
        return f"no step was under way at {in_utc(run.running_as_of)} UTC"
    steps = [f"{_name(step)} since {in_utc(step.started_at)}" for step in run.running_steps[:_MAX_UNDER_WAY]]
    more = run.running_step_count - len(steps)
    return f"under way at {in_utc(run.running_as_of)} UTC: {', '.join([*steps, *([f'{more} more'] if more else [])])}"


def _next(run: RunDescription) -> str:
    """What a run that no worker holds waits for."""
    if run.lacks_input and run.status == "pending":
        return "waits for a start with this id that brings its input"
    return what_it_waits_for(run, run.steps)


def _name(step: StepDescription | RunningStep) -> str:
    """The key of the step; a compensation is told apart from the step that it undoes."""
    return f"compensation of {step.key}" if step.kind == "compensation" else step.key


def _row(step: StepDescription) -> list[str]:
    started, took = in_utc(step.started_at), length(step.seconds)
    tries = str(step.attempts) if step.kind in ("step", "compensation") else ""
    return [step.key, step.kind, step.status, started, took, tries, _result(step)]


def _result(step: StepDescription) -> str:
    if step.kind == "cancel":
        return "the run was cancelled" if step.until is None else f"its deadline {in_utc(step.until)} has passed"
    if step.status == "completed":
        return preview(step.value)
    if step.kind == "approval" and step.status == "waiting":
        return _asked(step)
    if step.error is not None and step.status == "failed":
        return f"{step.error.type}: {step.error.message}"
    if step.child_id is not None:
        return f"run {step.child_id}"
    if step.until is not None:
        return f"{'next try' if step.status == 'retrying' else 'until'} {in_utc(step.until)}"
    return ""


def _asked(step: StepDescription) -> str:
    """What an approval that is pending asks, of whom, and until when."""
    whom = f"asks {', '.join(step.assignees)}" if step.assignees else "asks"
    until = "" if step.until is None else f", until {in_utc(step.until)}"
    return f"{whom} about {preview(step.value)}{until}"


def _without_repetition(error: ErrorText, steps: Iterable[StepDescription]) -> ErrorText:
    """The error without its traceback if it is that of a step, which was shown."""
    known = {(step.error.type, step.error.message) for step in steps if step.error is not None}
    return ErrorText(type=error.type, message=error.message) if (error.type, error.message) in known else error


def _print_error(title: str, error: ErrorText) -> None:
    print_text("")
    print_text(f"{title}: {error.type}: {error.message}")
    if error.traceback:
        print_text("\n".join(f"  {line}" for line in error.traceback.rstrip().splitlines()))
