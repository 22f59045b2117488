"""What a test is told when it awaits a run and nothing is left that could move one: what each run waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import perdure
from perdure.engine.drive import Drive
from perdure.errors import name_key
from perdure.model.durations import moment
from perdure.model.records import RunRow

_PACKAGE: Final = str(Path(perdure.__file__).parent)


class NothingMoves(AssertionError):
    """A test awaits a run that has not ended, and nothing can move it any more. `waits` has a line for each run that is left."""

    def __init__(self, run_id: str, waits: Iterable[str]) -> None:
        super().__init__(run_id, list(waits))

    @property
    def waits(self) -> list[str]:
        return list(self.args[1])

    def __str__(self) -> str:
        what_to_do = "send what is waited for in another task, or before: rt.signal_when_waiting, rt.approve_when_waiting"
        lines = [f"run {self.args[0]!r} is awaited, and nothing can move it any more:", *self.waits, what_to_do]
        return "\n  ".join(lines)


def is_only_task() -> bool:
    """Return whether no task of the test is left on this loop but the one that asks: all others are perdure's own."""
    here = asyncio.current_task()
    return all(task is here or _is_ours(task) for task in asyncio.all_tasks())


def _is_ours(task: asyncio.Task[object]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(_PACKAGE)


def explain_wait(row: RunRow, drive: Drive | None, now: int) -> str:
    """Return what keeps this run from going on, in words. `drive` is that of a run in memory."""
    addresses = row.waiting_for if drive is None else drive.waits.addresses()
    wake_at = row.wake_at if drive is None else drive.waits.wake_at()
    reasons = [f"is at step {name_key(key)}, which does not end" for key in (drive.executing if drive is not None else ())]
    reasons += [f"waits for {address.by_user}" for address in addresses]
    if row.held:
        reasons.append("is on hold")
    if row.problem is not None:
        reasons.append(f"has a problem: {row.problem}")
    if wake_at is not None and wake_at <= now:
        reasons.append(f"is due in queue {row.queue!r}, and no worker here has taken it")
    elif wake_at is not None:
        reasons.append(f"waits until {moment(wake_at).isoformat(sep=' ')}")
    if not reasons:
        reasons.append("waits for something of its own, neither a step nor ctx")
    return f"{row.id!r} of {row.workflow!r} {' and '.join(reasons)}"
