"""Leaving memory: whether a waiting run may, and how the tasks of its body are ended in bounded time."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any, Final

from perdure.engine.body_tasks import BodyTasks
from perdure.engine.timers_and_signals import Waits
from perdure.errors import PerdureWarning

# How long a body may take to end once it was cancelled. It is discarded then; only its own clean-up is cut short.
CLOSING_SECONDS: Final = 5.0


def can_leave_memory(branches: BodyTasks, waits: Waits, now: int, grace: int) -> bool:
    """Whether a run at rest need not stay in memory: only a timer that is not due soon, or a signal, can move its body.

    When no branch waits for either, the body is busy with something of its own, and nothing in the store would wake it.
    """
    wake_at = waits.wake_at()
    is_due_soon = wake_at is not None and wake_at - now < grace
    return bool(branches.ours) and not is_due_soon


async def cancel_tasks(run_id: str, tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel them; once more when they have not ended in a while; and then leave them alone and say so."""
    for patience in (CLOSING_SECONDS, CLOSING_SECONDS / 5):
        tasks = [task for task in tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
    for task in tasks:
        if not task.done():
            warnings.warn(f"run {run_id!r} left memory, but {_where(task)}", PerdureWarning, stacklevel=2)


def _where(task: asyncio.Task[Any]) -> str:
    """What a task that does not end is at."""
    frames = task.get_stack(limit=1)
    line = f" at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
    return f"a task of it{line} does not end when it is cancelled"
