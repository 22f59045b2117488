"""Hearing from the server that something may be due, and polling where that is impossible.

A listener belongs to one store and lives on the loop of its connections. Changes that were made before it listened were not
heard, so the watch that starts it returns as soon as it listens, and its caller looks for due runs. A connection that breaks
soon after it was opened is replaced only after a pause, in which the watchers poll: each new one wakes them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from typing import Final

from perdure.backends.base.lifecycle import Lifecycle

POLL_EVERY: Final = 1.0
# Seconds without a message after which a listener asks the server whether it still hears it. Workers claim meanwhile, so this is
# only how long they may hear of a change late, and a check is a query of an idle worker.
CHECK_EVERY: Final = 60.0
_END_WITHIN: Final = 5.0
# A connection that held this many seconds is replaced at once when it breaks.
_LASTING: Final = 10.0
# How long to wait before another is opened, if it broke sooner: at first, and at most. Doubled with each such loss in a row.
_PAUSES: Final = (0.25, 30.0)


class ChangeListener(ABC):
    """Wakes the watchers of a store. Everything but `is_live` happens on the connections' loop.

    `is_live` says that a change made from now on wakes the watchers. When the connection breaks or has fallen silent they are
    woken once, since a change may have been missed, and the next watch opens another.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._starting: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._is_closed = False
        self._pause = _PAUSES[0]
        # The time of the loop before which no other connection is opened.
        self._open_after = 0.0
        self.is_live = False

    @abstractmethod
    async def _open(self) -> None:
        """Return when the server will tell of changes. Raises what the driver raises."""

    @abstractmethod
    async def _listen(self) -> None:
        """Wake the watchers at each change, until the connection breaks, gives no reply to a check, or `_is_closed`."""

    async def start(self) -> None:
        """Listen, if that is possible. Many callers may start it at once."""
        if self.is_live or asyncio.get_running_loop().time() < self._open_after:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())
        with contextlib.suppress(Exception):  # the watcher polls, and meets the error at its next verb
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._open()
        self._listening = asyncio.ensure_future(self._listen_until_lost())
        self.is_live = True

    async def _listen_until_lost(self) -> None:
        opened_at = asyncio.get_running_loop().time()
        try:
            with contextlib.suppress(Exception):  # the connection broke: the watchers poll
                await self._listen()
        finally:
            self.is_live = False
            self._space_out(opened_at)
            self._lifecycle.wake()

    def _space_out(self, opened_at: float) -> None:
        """Decide when another connection may be opened after the one of this time."""
        now = asyncio.get_running_loop().time()
        if now - opened_at >= _LASTING:
            self._pause = _PAUSES[0]
            return
        self._open_after = now + self._pause * random.uniform(1.0, 1.25)  # noqa: S311 - to spread out, not to hide
        self._pause = min(self._pause * 2, _PAUSES[1])

    async def close(self) -> None:
        """Stop listening. What does not end soon is left alone: it ends with its next reply or its connection."""
        self._is_closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=_END_WITHIN)
        if self._listening is not None:
            # Until Python 3.12 `wait_for`, by which drivers send, loses a cancellation that comes as it ends: hence `_is_closed`.
            self._listening.cancel()
            await asyncio.wait([self._listening], timeout=_END_WITHIN)
