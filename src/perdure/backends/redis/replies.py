"""What scripts reply, as the contract's values and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.backends.base.new_runs import restored_row
from perdure.backends.redis.rows import run_from
from perdure.errors import LeaseHeld, PersistenceError, RunFinished, RunNotFound
from perdure.model.records import Pulse, RunInfo, RunRow, Signal


def checked(reply: list[Any], run_id: str) -> list[Any]:
    """The reply, unless it says that the verb was refused."""
    said = reply[0]
    if said == b"missing":
        raise RunNotFound(run_id)
    if said == b"finished":
        raise RunFinished(run_id, reply[1].decode())
    if said == b"held":
        raise LeaseHeld(run_id, reply[1].decode())
    if said == b"refused":
        raise PersistenceError(f"run {run_id!r}", f"{reply[1].decode()}; nothing was written")
    return reply


def row_from(flat: Sequence[bytes]) -> RunRow:
    """The run of a reply that always has one."""
    row = run_from(flat)
    if row is None:
        raise ValueError("a script gave an empty run")
    return row


def pulse_from(reply: Sequence[bytes]) -> Pulse:
    """What the holder is told."""
    return Pulse(int(reply[1]), reply[2] == b"1")


def line_from(line: Sequence[bytes]) -> RunInfo:
    """A line of a list."""
    run_id, workflow, status, updated_at = line
    return RunInfo.of(run_id.decode(), workflow.decode(), status.decode(), int(updated_at))  # type: ignore[arg-type]  # as written


def to_restore(run: RunRow, inbox: Sequence[Signal]) -> tuple[RunRow, str]:
    """The row that `restore` writes but for what only the server knows, and when it wakes: never, due, now or as given.

    The second half is `restored_row` in words: what it decides by the present instant is decided by the server's.
    """
    row = restored_row(run, inbox, None, 0)
    if row.ended or row.lacks_input:
        wake = "never"
    elif row.cancel_requested or any(signal.address in row.waiting_for for signal in inbox):
        wake = "due"
    else:
        wake = "now" if row.status == "pending" and run.wake_at is None else "given"
    return msgspec.structs.replace(row, wake_at=run.wake_at), wake
