"""What a run comes to when its body has ended, or will not be driven any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.codec import Codec
from perdure.errors import RunCancelled, RunDead, SnapshotMismatch
from perdure.outcomes import Ending, Hints, ended_with
from perdure.records import RunRow
from perdure.result import Err

if TYPE_CHECKING:
    from perdure.engine import Drive


def ending_for(drive: Drive, hints: Hints, result: Any) -> Ending:
    """How the run ends whose body returned `result`, or `Err(exception)` if it raised."""
    if drive.calls.is_cancelling:
        return Ending("cancelled", b"null", Err(RunCancelled(drive.run.id)))
    try:
        if drive.calls.unasked and not isinstance(result, Err):
            result = _checked(drive, result)
        keys = drive.calls.failed_keys(result) if isinstance(result, Err) else None
        return ended_with(drive.codec, result, hints, keys, drive.is_strict)
    except Exception as error:  # noqa: BLE001 - a result of the user's making, or a warning that is an error: the run has failed
        return ended_with(drive.codec, Err(error), hints)


def _checked(drive: Drive, result: Any) -> Any:
    """The body's result, unless it is an error that there are recorded steps which it never asked for."""
    unknown = sorted(drive.calls.unasked)
    shown = ", ".join(map(repr, unknown[:5])) + (" and others" if len(unknown) > 5 else "")
    reason = f"it ended without asking for what is recorded under {shown}; was a step renamed or removed?"
    try:
        drive.react(drive.options.on_unknown_steps, SnapshotMismatch(drive.run.id, reason))
    except SnapshotMismatch as error:
        return Err(error)
    return result


def dead(run: RunRow, codec: Codec, hints: Hints) -> Ending:
    """How a run ends that stopped its workers too often."""
    error = RunDead(run.id, run.attempts - 1)
    return Ending("dead", ended_with(codec, Err(error), hints).payload, Err(error))
