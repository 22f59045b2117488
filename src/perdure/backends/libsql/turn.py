"""Whose turn it is to write to a database: one at a time in this process, whichever of its stores it goes through.

A libSQL server lets one connection write at a time, and those who wait for that wait badly there. Each meets an error when the
lock is free, and begins anew; and since 0.24.32 sqld may forget whose turn it is. Whoever wakes by his timer while the server
moves its log into the database, as it does by itself after a commit, leaves his place in the line and takes another. When the
first one comes up, the lock is given to somebody who does not wait for it, or is gone, and nothing is ever written there again.
That takes four who write at once. So what one process writes waits here, where an answer ends a turn and the line is fair.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

from perdure.backends.libsql.address import LibsqlAddress

# After so many seconds the server ends a transaction that keeps others waiting.
LONGEST: Final = 5.0


class Turn:
    """The right to write, for as long as it takes but not longer than the server would wait. All of it runs on one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Have the turn, after all who asked before. It passes on after `LONGEST`: who has it may be waiting for the next one."""
        await self._lock.acquire()
        has_passed_on = False

        def pass_on() -> None:
            nonlocal has_passed_on
            has_passed_on = True
            self._lock.release()

        timer = asyncio.get_running_loop().call_later(LONGEST, pass_on)
        try:
            yield
        finally:
            timer.cancel()
            if not has_passed_on:
                self._lock.release()


# By process, since the turns that a forked child inherits are the parent's.
_turns: Final[WeakValueDictionary[tuple[int, LibsqlAddress], Turn]] = WeakValueDictionary()


def turn_at(place: LibsqlAddress) -> Turn:
    """The turn of all who write there, for as long as one of them keeps it. To be called on the loop of all of them."""
    turn = _turns.get((os.getpid(), place))
    if turn is None:
        turn = _turns[os.getpid(), place] = Turn()
    return turn
