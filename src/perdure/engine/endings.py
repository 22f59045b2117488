"""How a run ends once its body has ended, or cannot be run any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.codec import Codec
from perdure.codec.outcomes import Ending, Hints, run_ending
from perdure.engine.keyed_calls import Calls
from perdure.errors import RunCancelled, RunDead, SnapshotMismatch
from perdure.model.records import RunRow
from perdure.result import Err


def ending_of_body(
    result: Any,
    run: RunRow,
    calls: Calls,
    codec: Codec,
    hints: Hints,
    *,
    is_strict: bool,
    on_unknown_steps: Callable[[SnapshotMismatch], None],
) -> Ending:
    """How the run ends whose body returned `result`, or `Err(exception)` if it raised.

    `on_unknown_steps` gets the error that recorded steps were never asked for, and raises it where that has to fail the run.
    """
    if calls.is_cancelling:
        return Ending("cancelled", b"null", Err(RunCancelled(run.id)))
    try:
        if calls.owed.unasked and not isinstance(result, Err):
            try:
                on_unknown_steps(SnapshotMismatch(run.id, _unknown_steps(calls)))
            except SnapshotMismatch as error:
                result = Err(error)
        keys = calls.failed_keys(result) if isinstance(result, Err) else None
        return run_ending(codec, result, hints, keys, is_strict)
    except Exception as error:  # noqa: BLE001 - a result of the user's making, or a warning that is an error: the run has failed
        return run_ending(codec, Err(error), hints)


def _unknown_steps(calls: Calls) -> str:
    unknown = sorted(calls.owed.unasked)
    shown = ", ".join(map(repr, unknown[:5])) + (" and others" if len(unknown) > 5 else "")
    return f"it ended without asking for what is recorded under {shown}; was a step renamed or removed?"


def ending_of_dead_run(run: RunRow, codec: Codec, hints: Hints) -> Ending:
    """How a run ends of which too many attempts in a row failed, or ended with their process."""
    error = RunDead(run.id, run.attempts - 1, run.problem)
    return Ending("dead", run_ending(codec, Err(error), hints).payload, Err(error))
