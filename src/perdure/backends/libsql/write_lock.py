"""The write lock of a database: one writer at a time in this process, whichever of its stores writes.

A libSQL server lets one connection write at a time, and its own queue for that is unreliable. A waiter gets an error when the
lock becomes free, and has to begin again. And since 0.24.32 sqld may lose the lock: a waiter that wakes by its timer while the
server checkpoints its log into the database, as it does by itself after a commit, leaves its place in the queue and takes a new
one. When the old place comes up, the lock goes to a connection that does not wait for it, or is closed, and nothing is ever
written there again. That takes four concurrent writers. So the writers of one process wait here, where a reply releases the lock
and the queue is fair.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

from perdure.backends.libsql.address import LibsqlAddress

# Seconds after which the server ends a transaction that keeps others waiting.
MAX_HOLD: Final = 5.0


class WriteLock:
    """A fair lock that is held until released, but not longer than the server would let one writer keep others waiting.

    It belongs to one event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold the lock, after all who asked before. It is released after `MAX_HOLD`: the holder may wait for the next one."""
        await self._lock.acquire()
        is_released = False

        def release() -> None:
            nonlocal is_released
            is_released = True
            self._lock.release()

        timer = asyncio.get_running_loop().call_later(MAX_HOLD, release)
        try:
            yield
        finally:
            timer.cancel()
            if not is_released:
                self._lock.release()


# By process, since the locks that a forked child inherits are the parent's.
_locks: Final[WeakValueDictionary[tuple[int, LibsqlAddress], WriteLock]] = WeakValueDictionary()


def write_lock_of(address: LibsqlAddress) -> WriteLock:
    """The lock of everyone who writes there, for as long as one of them refers to it. Call it on their event loop."""
    lock = _locks.get((os.getpid(), address))
    if lock is None:
        lock = _locks[os.getpid(), address] = WriteLock()
    return lock
