"""What is to be done at the next turn of an event loop, for all runs on it together: one handle, however many they are."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable
from typing import Final


class NextTurn:
    """The callbacks that one loop calls at its next turn, in the order in which they came. None of them may raise.

    It does not refer to the loop, which is the key it is known by, and whoever has something to do there has.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        # Not that of whoever asks first: the others are no part of his run.
        self._context = contextvars.Context()

    def call(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call this at the next turn of the loop."""
        if not self._callbacks:
            loop.call_soon(self._call_all, context=self._context)
        self._callbacks.append(callback)

    def _call_all(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


_next_turns: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, NextTurn]] = weakref.WeakKeyDictionary()


def next_turn_of(loop: asyncio.AbstractEventLoop) -> NextTurn:
    """The one of this loop."""
    turn = _next_turns.get(loop)
    if turn is None:
        turn = _next_turns[loop] = NextTurn()
    return turn
