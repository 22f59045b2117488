"""A recorded step on replay: its arguments are compared, and its result is rebuilt."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.codec.checksums import have_changed
from perdure.engine.drive import Drive
from perdure.errors import StepChanged
from perdure.model.journal import Entry
from perdure.snapshots.step_results import load_error_of, load_value
from perdure.stepspec import StepPlan


def replay_step(drive: Drive, key: str, plan: StepPlan, entry: Entry, args_hash: bytes | None) -> Any:
    """What a recorded step gives the body. With other arguments, it follows `on_changed_arguments`."""
    if entry.args_hash != args_hash and have_changed(entry.args_hash, args_hash):
        drive.react(drive.options.on_changed_arguments, changed_arguments(drive, key))
    return load_result(drive, key, plan, entry)


def load_result(drive: Drive, key: str, plan: StepPlan, entry: Entry) -> Any:
    """The recorded value, or the recorded error raised."""
    try:
        if entry.ok:
            return load_value(drive.codec, entry, plan.returns)
        error = load_error_of(drive.codec, entry, key, plan.fails_with)
    except (ValueError, msgspec.MsgspecError) as reason:
        drive.corrupt(f"the record of step {key!r}", reason)
    drive.calls.raised(key, error)
    raise error


def changed_arguments(drive: Drive, key: str, by: str = "") -> StepChanged:
    """The error of a step that was called with other arguments than those that are recorded."""
    return StepChanged(drive.run.id, key, f"called with other arguments{by}", "called with these")
