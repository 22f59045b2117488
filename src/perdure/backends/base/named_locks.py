"""NamedLocks: by name, one at a time, in the order in which they were asked for, whichever event loop or thread asks.

An `asyncio.Lock` belongs to one loop, and a `threading.Lock` would make a loop wait. Here a place in the line is a future that
any loop can await; nobody holds the guard while waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager


class NamedLocks:
    """Lines of those who want the same thing."""

    def __init__(self) -> None:
        # Guards the lines and what is first in them.
        self._guard = threading.Lock()
        # By name, only while somebody has the turn: whoever is first in line.
        self._lines: dict[str, deque[Future[None]]] = {}

    @asynccontextmanager
    async def taken(self, name: str) -> AsyncIterator[None]:
        """Have the turn. Cancelled while it waits it leaves the line."""
        place: Future[None] = Future()
        try:
            if not self._join(name, place):
                await asyncio.wrap_future(place)
            yield
        finally:
            self._leave(name, place)

    @contextmanager
    def taken_if_free(self, name: str) -> Iterator[bool]:
        """Have the turn if nobody else has it or waits for it, and say so."""
        place: Future[None] = Future()
        with self._guard:
            is_free = name not in self._lines
            if is_free:
                self._lines[name] = deque([place])
        try:
            yield is_free
        finally:
            if is_free:
                self._leave(name, place)

    def _join(self, name: str, place: Future[None]) -> bool:
        """Whether the turn was had at once."""
        with self._guard:
            line = self._lines.setdefault(name, deque())
            line.append(place)
            return line[0] is place

    def _leave(self, name: str, place: Future[None]) -> None:
        with self._guard:
            line = self._lines[name]
            had_turn = line[0] is place
            line.remove(place)
            if not line:
                del self._lines[name]
            elif had_turn and line[0].set_running_or_notify_cancel():  # one that was cancelled leaves by itself, and passes it on
                line[0].set_result(None)
