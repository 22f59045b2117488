"""Time, as a parameter.

The engine asks one clock for instants and timers. `SystemClock` is real; `perdure.testing.ManualClock` jumps. A store has a
clock of its own, the one that lease expiry goes by, and is told another instant only under a manual clock (`store_now`).
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
        """Forget it."""
        ...


class Clock(Protocol):
    """Where the engine gets the time from."""

    def now(self) -> int:
        """The present instant, in microseconds UTC."""
        ...

    def store_now(self) -> int | None:
        """The `now=` for store verbs: None leaves it to the store's own clock."""
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
    """Another clock, seen as if a given instant had come already; it goes on from there."""

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
        """Seconds on a clock that is never set and also counts while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)
else:  # not Linux

    def elapsed() -> float:
        """Seconds on a clock that is never set."""
        return time.monotonic()
