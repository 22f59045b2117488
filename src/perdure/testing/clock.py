"""A clock that stands still until `advance` moves it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from perdure.model.clock import Timer
from perdure.model.durations import Duration, instant, microseconds

EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)


class _ManualTimer:
    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._loop = loop
        self._callback: Callable[..., Any] | None = callback
        self._args = args

    @property
    def is_open(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        # Drop the references, as a loop's own timer does: they may form a cycle with the clock.
        self._callback, self._args = None, ()

    def fire(self) -> None:
        if self._callback is not None:
            self._loop.call_soon(self._callback, *self._args)
            self.cancel()


class ManualClock:
    """Time that passes only by `advance`. Give it to a `Runtime` as `clock=`, usually with `unload_grace=0`."""

    def __init__(self, start: datetime = EPOCH) -> None:
        self._now = instant(start)
        self._order = itertools.count()
        self._timers: list[tuple[int, int, _ManualTimer]] = []

    def now(self) -> int:
        return self._now

    def store_now(self) -> int | None:
        return self._now

    def call_at(self, at: int, callback: Callable[..., Any], *args: Any) -> Timer:
        timer = _ManualTimer(asyncio.get_running_loop(), callback, args)
        self._timers.append((at, next(self._order), timer))
        self._fire()
        return timer

    def advance(self, duration: Duration) -> None:
        """Let this much time pass; timers that come due are called in the order of their instants."""
        self._now += microseconds(duration)
        self._fire()

    def next_at(self) -> int | None:
        """The instant of the earliest timer, or None."""
        self._timers = [each for each in self._timers if each[2].is_open]
        return min((at for at, _, _ in self._timers), default=None)

    def _fire(self) -> None:
        due = sorted((each for each in self._timers if each[0] <= self._now), key=lambda each: each[:2])
        self._timers = [each for each in self._timers if each[0] > self._now]
        for _, _, timer in due:
            timer.fire()
