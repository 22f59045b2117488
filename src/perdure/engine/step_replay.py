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
    """What a recorded step gives the body."""
    if entry.args_hash != args_hash and have_changed(entry.args_hash, args_hash):
        report_changed_arguments(drive, key)
    try:
        if entry.ok:
            return load_value(drive.codec, entry, plan.returns)
        error = load_error_of(drive.codec, entry, key, plan.fails_with)
    except (ValueError, msgspec.MsgspecError) as reason:
        drive.corrupt(f"the record of step {key!r}", reason)
    drive.calls.raised(key, error)
    raise error


def report_changed_arguments(drive: Drive, key: str) -> None:
    """Do what `on_changed_arguments` says about a step that is recorded with other arguments."""
    error = StepChanged(drive.run.id, key, "called with other arguments", "called with these")
    drive.react(drive.options.on_changed_arguments, error)
