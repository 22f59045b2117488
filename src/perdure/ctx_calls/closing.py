"""What happens between the end of a workflow's function and the end of its run: its children end, then compensations run.

A step with `compensate=` records an intent before its function is called. When the function fails or the run is cancelled, every
such step that was done, or may have been done, is compensated: in reverse order of their intents, one at a time. A compensation
is a step of its own, recorded under a key that no user can have, so it runs once however often the process dies. The functions
themselves are not stored: a replay runs the body from the top and meets the same steps with the same functions.

All of this runs in a task of its own, since the function may refuse to end when it is cancelled. From then on only that task may
use ctx. A run that is unloaded is not closed: it goes on later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from perdure.ctx_calls.children import are_over, end_children
from perdure.ctx_calls.steps import OUTCOME_UNKNOWN, StepCall, run_step
from perdure.engine.body_tasks import BodyTask, cancel_by_ctx
from perdure.engine.drive import Drive
from perdure.errors import CompensationFailed, RunCancelled, StepFailed, StepTimeout
from perdure.model.journal import Entry, entries_in_force
from perdure.model.own_names import compensation_key
from perdure.result import Err
from perdure.snapshots.step_results import load_error_of, load_value
from perdure.stepspec import spec_of

# How long tasks that the function left behind may take to end before compensations begin.
_LEFTOVER_SECONDS: Final = 5.0


class _Done(NamedTuple):
    """A step that is to be compensated: done with this result, or (None) in doubt."""

    seq: int
    step: StepCall
    compensate: Callable[[Any], Any]
    close: Entry | None


class Closing:
    """The steps of one drive that have a compensation, its children, and what is done with them in the end."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._steps: dict[str, StepCall] = {}

    def add_step(self, step: StepCall) -> None:
        """The body calls this step, which has a compensation."""
        self._steps.setdefault(step.key, step)

    def is_needed(self, result: Any) -> bool:
        """Whether there is something to do before the run ends with this result."""
        has_children = self._drive.children.started or self._drive.calls.opened
        return bool(self._steps and self._must_undo(result)) or bool(has_children and not are_over(self._drive))

    def _must_undo(self, result: Any) -> bool:
        return isinstance(result, Err) or self._drive.calls.is_cancelling

    async def close(self, own: BodyTask, result: Any) -> Any:
        """End children and compensate; the result of the run: the function's own, a child's error or `CompensationFailed`."""
        failed_child = await end_children(self._drive, must_cancel=self._must_undo(result))
        if failed_child is not None:
            result = Err(failed_child)
        if not self._must_undo(result) or not self._steps:
            return result
        await _end_leftovers(self._drive, own)
        failures: dict[str, Exception] = {}
        for done in _steps_to_compensate(self._drive, self._steps):
            try:
                await _compensate(self._drive, done)
            except Exception as error:  # noqa: BLE001 - it is reported with the others, which are compensated all the same
                failures[done.step.key] = error
        if not failures:
            return result
        failed = CompensationFailed(self._drive.run.id, [f"{key}: {error!r}" for key, error in failures.items()])
        if self._drive.calls.is_cancelling:
            failed.__cause__ = RunCancelled(self._drive.run.id)
        elif isinstance(result, Err) and isinstance(result.error, BaseException):
            failed.__cause__ = result.error
        return Err(failed)


def closing_of(drive: Drive) -> Closing:
    """The closing of this drive, made when it is first needed."""
    if not isinstance(drive.closing, Closing):
        drive.closing = Closing(drive)
    return drive.closing


async def _end_leftovers(drive: Drive, own: BodyTask) -> None:
    """Cancel the tasks that the function left behind, and wait a while until they have ended. Their steps are in doubt then."""
    left = [branch.task for branch in drive.tasks.alive if branch is not own and branch.task is not None]
    for task in left:
        cancel_by_ctx(task)
    if left:
        await asyncio.wait(left, timeout=_LEFTOVER_SECONDS)


def _steps_to_compensate(drive: Drive, steps: dict[str, StepCall]) -> list[_Done]:
    """The steps whose effects are there, or may be there, the last first.

    A step that raised says that it did nothing, unless it timed out or its outcome is unknown.
    """
    opened: dict[str, int] = {}
    closed: dict[str, Entry] = {}
    for entry in entries_in_force(drive.recorder.journal):
        if entry.phase == "open":
            opened.setdefault(entry.key, entry.seq)
        elif entry.phase == "close":
            closed[entry.key] = entry
    found = []
    for step in steps.values():
        close, compensate = closed.get(step.key), step.plan.compensate
        if compensate is not None and step.key in opened and (close is None or close.ok or _is_in_doubt(drive, step, close)):
            found.append(_Done(opened[step.key], step, compensate, close if close is not None and close.ok else None))
    return sorted(found, key=lambda done: done.seq, reverse=True)


def _is_in_doubt(drive: Drive, step: StepCall, failed: Entry) -> bool:
    """Whether the effect of a failed step may be there all the same."""
    try:
        error = load_error_of(drive.codec, failed, step.key, step.plan.fails_with)
    except (ValueError, msgspec.MsgspecError):
        return True
    return isinstance(error, StepTimeout) or (isinstance(error, StepFailed) and error.error == OUTCOME_UNKNOWN)


async def _compensate(drive: Drive, done: _Done) -> None:
    step, value = done.step, None
    if done.close is not None:
        try:
            value = load_value(drive.codec, done.close, step.plan.returns)
        except (ValueError, msgspec.MsgspecError) as reason:
            drive.corrupt(f"the record of step {step.key!r}", reason)
    fn, name = done.compensate, f"compensate {step.name}"
    await run_step(drive, StepCall(compensation_key(step.key), name, fn, (value,), spec_of(fn).plan))
