"""Time, as a parameter.

The engine gets instants and timers from one clock. `SystemClock` is real; `perdure.testing.ManualClock` jumps. A store has a
clock of its own, which decides when leases expire and runs are due; only under a manual clock does the engine pass it an instant
(`store_now`). Otherwise the engine makes its instants from the store's time (`StoreClock`), so that no two clocks are compared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from perdure.model.durations import MICROSECOND

log: Final = logging.getLogger("perdure")

# From which difference on it is reported that the clocks of a store and of this machine differ.
_REPORTED_DIFFERENCE: Final = 1 * MICROSECOND
# The stores about which that was reported.
_reported: Final[set[tuple[str, ...]]] = set()

# How long a timer of the loop may be: it then looks at its clock, which may have been set meanwhile.
_LONGEST_DELAY: Final = 60.0
# How long one that fired early waits at least: the timers of some loops have whole milliseconds.
_SHORTEST_DELAY: Final = 0.001


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
        return _LoopTimer(self, at, callback, args)


class _LoopTimer:
    """A timer of the event loop that calls back when its clock has reached the instant, and never before.

    The loop's own timers may be early by that clock: uvloop counts whole milliseconds, asyncio fires within the resolution of its
    clock (16 ms on Windows), and the clock may be set back while the timer runs.
    """

    __slots__ = ("_args", "_at", "_callback", "_clock", "_handle", "_loop")

    def __init__(self, clock: Clock, at: int, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._clock = clock
        self._at = at
        self._callback = callback
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(min(max(0, at - clock.now()) / MICROSECOND, _LONGEST_DELAY), self._fire)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        left = (self._at - self._clock.now()) / MICROSECOND
        if left <= 0:
            self._callback(*self._args)
        else:
            self._handle = self._loop.call_later(min(max(left, _SHORTEST_DELAY), _LONGEST_DELAY), self._fire)


class Keyed(Protocol):
    """A store, as far as its clock needs it."""

    @property
    def key(self) -> tuple[str, ...]:
        """Which store it is."""
        ...


class StoreClock:
    """The time of a store: that of the last reply which carried it, and what has passed here since the reply was received.

    So it is behind the store's clock by the time that a reply takes, but not ahead of it: a run that was claimed is due by this
    clock too. What passes here is measured by `elapsed`, which does not change when this machine's clock is set. Until the first
    reply it has the time of `clock`.
    """

    def __init__(self, clock: Clock, store: Keyed) -> None:
        self._clock = clock
        self._store = store
        self._offset = clock.now() - _elapsed_ns() // 1000
        self.has_store_time = False

    def now(self) -> int:
        return _elapsed_ns() // 1000 + self._offset

    def store_now(self) -> int | None:
        return None

    def call_at(self, at: int, callback: Callable[..., Any], *args: Any) -> Timer:
        return _LoopTimer(self, at, callback, args)

    def observe(self, store_time: int, asked_at: int) -> None:
        """The reply to what was asked at `asked_at`, by this clock, was made at `store_time` by the store's.

        This clock is set only if it cannot be right, so it does not go back and forth with the time that each reply takes.
        """
        self.has_store_time = True
        received_at = _elapsed_ns() // 1000 + self._offset
        if not asked_at <= store_time <= received_at:
            self._offset += store_time - received_at
            self._report_difference(store_time - self._clock.now(), received_at - asked_at)

    def _report_difference(self, least: int, uncertainty: int) -> None:
        """Log, once for each store, that its clock and this machine's differ: by `least`, and up to `uncertainty` more."""
        is_ahead, is_behind = least >= _REPORTED_DIFFERENCE, least + uncertainty <= -_REPORTED_DIFFERENCE
        key = self._store.key
        if (is_ahead or is_behind) and key not in _reported:
            _reported.add(key)
            log.warning(
                "the clock of the %s store is about %.1f s %s this machine's; runs go by the store's",
                key[0],
                abs(least + uncertainty / 2) / MICROSECOND,
                "ahead of" if is_ahead else "behind",
            )


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

    _elapsed_ns: Callable[[], int] = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
else:  # not Linux

    def elapsed() -> float:
        """Seconds on a clock that is never adjusted."""
        return time.monotonic()

    _elapsed_ns = time.monotonic_ns
