"""Time, as a parameter.

The engine gets instants and timers from one clock. `SystemClock` is real; `perdure.testing.ManualClock` jumps. A store has a
clock of its own, which decides when leases expire; only under a manual clock does the engine pass it an instant (`store_now`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from perdure.model.durations import MICROSECOND


class Timer(Protocol):
    """A callback that has not run yet."""

    def cancel(self) -> None:
        """Do not run the callback any more."""
        ...


class Clock(Protocol):
    """The source of time for the engine."""

    def now(self) -> int:
        """The present instant, in microseconds UTC."""
        ...

    def store_now(self) -> int | None:
        """The `now=` for store verbs; None: the store uses its own clock."""
        ...

    def call_at(self, at: int, callback: Callable[..., Any], *args: Any) -> Timer:
        """Call back on the running loop at the instant `at`, or soon when it has passed."""
        ...


class SystemClock:
    """The real time."""

    def now(self) -> int:
        return time.time_ns() // 1000

    def store_now(self) -> int | None:
        return None

    def call_at(self, at: int, callback: Callable[..., Any], *args: Any) -> Timer:
        delay = max(0, at - self.now()) / MICROSECOND
        return asyncio.get_running_loop().call_later(delay, callback, *args)


class NotBefore:
    """Another clock, moved forward so that it starts at a given instant or later."""

    def __init__(self, clock: Clock, at: int) -> None:
        self._clock = clock
        self._offset = max(0, at - clock.now())

    def now(self) -> int:
        return self._clock.now() + self._offset

    def store_now(self) -> int | None:
        return self.now()

    def call_at(self, at: int, callback: Callable[..., Any], *args: Any) -> Timer:
        return self._clock.call_at(at - self._offset, callback, *args)


if hasattr(time, "CLOCK_BOOTTIME"):

    def elapsed() -> float:
        """Seconds on a clock that is never adjusted and that also counts while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
else:  # not Linux

    def elapsed() -> float:
        """Seconds on a clock that is never adjusted."""
        return time.monotonic()
