"""Locks by name, for callers on any event loop or thread.

An `asyncio.Lock` belongs to one loop, and waiting for a `threading.Lock` would block a loop. Here every waiter is a future that
any loop can await, and waiters get the lock in the order in which they came.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager


class NamedLocks:
    """Fair locks, each of which exists while it is held."""

    def __init__(self) -> None:
        # Guards the queues. Nothing waits while holding it.
        self._guard = threading.Lock()
        # By name, while the lock is held: the holder first, then the waiters.
        self._queues: dict[str, deque[Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Hold the lock. A waiter that is cancelled leaves the queue."""
        waiter: Future[None] = Future()
        try:
            if not self._enqueue(name, waiter):
                await asyncio.wrap_future(waiter)
            yield
        finally:
            self._dequeue(name, waiter)

    @contextmanager
    def hold_if_free(self, name: str) -> Iterator[bool]:
        """Hold the lock if it is free, and yield whether it was."""
        holder: Future[None] = Future()
        with self._guard:
            is_free = name not in self._queues
            if is_free:
                self._queues[name] = deque([holder])
        try:
            yield is_free
        finally:
            if is_free:
                self._dequeue(name, holder)

    def _enqueue(self, name: str, waiter: Future[None]) -> bool:
        """Whether the waiter holds the lock at once."""
        with self._guard:
            queue = self._queues.setdefault(name, deque())
            queue.append(waiter)
            return queue[0] is waiter

    def _dequeue(self, name: str, waiter: Future[None]) -> None:
        """Leave the queue; a holder passes the lock on."""
        with self._guard:
            queue = self._queues[name]
            was_holder = queue[0] is waiter
            queue.remove(waiter)
            if not queue:
                del self._queues[name]
            elif was_holder and queue[0].set_running_or_notify_cancel():  # a cancelled one dequeues itself, and passes it on
                queue[0].set_result(None)
