"""The end of a run: its outcome, when its function has returned or raised, was cancelled, or starts over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from perdure.body.calls import Calls
from perdure.codec import Codec
from perdure.codec.outcomes import Ending, Hints, run_ending
from perdure.errors import CompensationFailed, DeadlineExceeded, RunCancelled, RunDead, SnapshotMismatch, name_key
from perdure.model.durations import moment
from perdure.model.journal import Entry, entries_in_force
from perdure.model.records import NewInput, RunRow
from perdure.result import Err


class StartingOver(BaseException):
    """Raised in the body by `ctx.continue_as`. No exception of the kind that handlers catch: the run does not fail."""

    def __init__(self, new: NewInput) -> None:
        super().__init__(new)
        self.new = new


class StartOver(NamedTuple):
    """The run does not end: it starts over with this input."""

    new: NewInput


def start_over_in(result: Any) -> StartOver | None:
    """With what the run starts over, if that is how its body ended. A TaskGroup that the body was in has wrapped it."""
    # By `type`, which no value of the user's can intercept.
    error = result.error if type(result) is Err else None
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return StartOver(error.new) if isinstance(error, StartingOver) else None


def open_children(journal: Sequence[Entry]) -> list[str]:
    """The keys of children whose outcome the body has not got, but those that it left to themselves."""
    entries = entries_in_force(journal)
    over = {entry.key for entry in entries if entry.phase != "open"}
    opened = [entry for entry in entries if entry.kind == "child" and entry.phase == "open" and entry.key not in over]
    return [entry.key for entry in opened if not _is_detached(entry)]


def _is_detached(opened: Entry) -> bool:
    payload = msgspec.json.decode(opened.payload)
    return isinstance(payload, dict) and bool(payload.get("detached"))


def ending_of_body(
    result: Any,
    run: RunRow,
    calls: Calls,
    codec: Codec,
    hints: Hints,
    *,
    is_cancelled: bool,
    is_strict: bool,
    passed_deadline: int | None,
    left: Sequence[str],
    on_unknown_steps: Callable[[SnapshotMismatch], None],
) -> Ending | StartOver:
    """Return how the run ends whose body returned `result`, or `Err(exception)` if it raised, or starts over.

    `passed_deadline` is set if that is why the body was cancelled. `left` has the keys of what a cancelled run does not undo,
    because its caller asked for that. `on_unknown_steps` gets the error that steps of a snapshot or resume state were never asked
    for, and raises it where that has to fail the run.
    """
    is_cancelled = is_cancelled and not (isinstance(result, Err) and isinstance(result.error, CompensationFailed))
    if is_cancelled and passed_deadline is not None:
        late = DeadlineExceeded(run.id, moment(passed_deadline).isoformat(timespec="milliseconds"))
        return run_ending(codec, Err(late), hints, keys=[])  # no step ended the run: a retry keeps what is recorded
    if is_cancelled:
        return ending_of_cancelled_run(run, left)
    try:
        if not isinstance(result, Err) and (unknown := _imported(calls)):
            try:
                on_unknown_steps(SnapshotMismatch(run.id, _unknown_steps(unknown)))
            except SnapshotMismatch as error:
                result = Err(error)
        if isinstance(result, StartOver):
            return result
        keys = calls.failed_keys(result) if isinstance(result, Err) else None
        return run_ending(codec, result, hints, keys, is_strict)
    except Exception as error:  # noqa: BLE001 - a result of the user's making, or a warning that is an error: the run has failed
        return run_ending(codec, Err(error), hints)


def _imported(calls: Calls) -> set[str]:
    """Return the keys that came with a snapshot or a resume state and that the function has not asked for."""
    retired = calls.retired
    unasked = (entry for entry in calls.cursor.unasked() if not entry.epoch or entry.kind == "foreign")
    own = ("timer", "cancel")
    return {each.key for each in unasked if each.kind not in own and each.key not in retired and each.name not in retired}


def _unknown_steps(unknown: set[str]) -> str:
    shown = ", ".join(map(name_key, sorted(unknown)[:5])) + (" and others" if len(unknown) > 5 else "")
    return f"it ended without asking for what is recorded under {shown}; was a step renamed or removed?"


def ending_of_cancelled_run(run: RunRow, left: Sequence[str]) -> Ending:
    """Return how a cancelled run ends that leaves behind what these steps have done."""
    return Ending("cancelled", msgspec.json.encode(left or None), Err(RunCancelled(run.id, left)))


def ending_of_dead_run(run: RunRow, codec: Codec, hints: Hints) -> Ending:
    """Return how a run ends of which too many attempts in a row failed, or ended with their process."""
    error = RunDead(run.id, run.attempts - 1, run.problem)
    return Ending("dead", run_ending(codec, Err(error), hints).payload, Err(error))
