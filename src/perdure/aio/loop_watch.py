"""Noticing an event loop that is blocked: by an endless loop or a blocking call in a workflow function or an async step.

The thread of the heartbeat renews leases whatever the event loops do. So a loop that never comes back would hold all its runs
for ever, and nobody would know. The same thread looks once a second whether each loop that drives runs has answered the last
question, and says where it is blocked. After `max_blocked` the heartbeat renews its leases no more.
What counts are the looks, and not a clock: while the process stands still (SIGSTOP, a machine that sleeps) or C code keeps the
GIL, this thread does not look either. A thread in which somebody debugs is not blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from perdure.aio.code_places import CodePlace, is_in_debugger, place_in_thread
from perdure.model.logs import LoggedRun, log, run_fields

LOOK_EVERY: Final = 1.0
# After how many seconds without an answer a loop counts as blocked, and is logged.
BLOCKED_AFTER: Final = 5.0


class HeldRun(Protocol):
    """A run that an event loop drives."""

    @property
    def run(self) -> LoggedRun:
        """Its row."""
        ...

    @property
    def thread_id(self) -> int:
        """The thread in which the loop ran when the run was claimed."""
        ...

    def is_executing(self) -> bool:
        """Whether it is the code of this run that the loop executes just now."""
        ...


class WatchedLoop:
    """An event loop that drives runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # For how many seconds it has not answered, as counted at the last look, and where it was then.
        self._silent_for = 0.0
        self._place: CodePlace | None = None
        self._loop = loop
        self._has_answered = True
        self._is_logged = False

    def look(self, held: Sequence[HeldRun]) -> None:
        """Look whether it has answered, and ask it again."""
        if self._has_answered:
            if self._is_logged:
                log.info("the event loop goes on, after it was blocked for %.0f s", self._silent_for)
            self._silent_for, self._is_logged = 0.0, False
            self._ask()
        elif not is_in_debugger(held[0].thread_id):
            self._silent_for += LOOK_EVERY
            if self._silent_for >= BLOCKED_AFTER:
                self._place = place_in_thread(held[0].thread_id) if self._loop.is_running() else None
                if not self._is_logged:
                    self._is_logged = True
                    self._log(held)

    def _ask(self) -> None:
        self._has_answered = False
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it is closed, and its leases are renewed no more
            self._has_answered = True

    def _answer(self) -> None:
        self._has_answered = True

    @property
    def blocked_for(self) -> float:
        """For how many seconds it has not answered by now."""
        return 0.0 if self._has_answered else self._silent_for

    def describe(self) -> str | None:
        """For how long it has been blocked, and where, in words; None when it is not."""
        seconds = self.blocked_for
        if seconds < BLOCKED_AFTER:
            return None
        where = "and nothing runs it" if not self._loop.is_running() else "" if self._place is None else f"at {self._place}"
        return f"{seconds:.0f} s{where and f', {where}'}"

    def _log(self, held: Sequence[HeldRun]) -> None:
        executing = next((one for one in held if one.is_executing()), None)
        described = self.describe()
        if executing is None:
            log.warning("the event loop has been blocked for %s; the %d runs that it drives stand still", described, len(held))
        else:
            run, others = executing.run, len(held) - 1
            log.warning(
                "run %r has blocked the event loop for %s; %d other runs stand still",
                run.id,
                described,
                others,
                extra=run_fields(run),
            )
