"""Connections on the event loops that write much, so that what is written there need not cross to the connections loop and back.

Nothing else lives there: a loop that runs other people's code may be blocked for long, and leases have to be renewed meanwhile.
An loop_pool is opened when its loop has written a while, and until then, or where that fails, the connections loop does the
work. It goes when the store is closed, and when its loop is shut down (by `asyncio.run`, or whoever calls `shutdown_asyncgens`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

WRITES_BEFORE: Final = 32
PATIENCE: Final = 5.0

_logger: Final = logging.getLogger("perdure")


class Opened(NamedTuple, Generic[T]):
    """What an loop_pool has, and how that is given back."""

    batchers: T
    close: Callable[[], Awaitable[None]]


class LoopConnections(Generic[T]):
    """The loop_connections of one store, by event loop."""

    def __init__(self, open_one: Callable[[], Awaitable[Opened[T]]]) -> None:
        """`open_one` is called on the loop that is to have one. It must not refer to the store, which may be dropped before."""
        self._open_one = open_one
        self._by_loop: dict[asyncio.AbstractEventLoop, _LoopPool[T]] = {}

    def here(self) -> T | None:
        """What the running loop has, for one write; None as long as it has nothing."""
        loop_pool = self._by_loop.get(asyncio.get_running_loop()) or self._found()
        if loop_pool.batchers is None:
            loop_pool.count()
        return loop_pool.batchers

    async def open_here(self) -> None:
        """Have one on the running loop, if that can be."""
        await (self._by_loop.get(asyncio.get_running_loop()) or self._found()).open()

    def _found(self) -> _LoopPool[T]:
        for loop in [loop for loop in list(self._by_loop) if loop.is_closed()]:
            self._by_loop.pop(loop, None)
        loop_pool = self._by_loop[asyncio.get_running_loop()] = _LoopPool(self._open_one)
        return loop_pool

    async def close(self) -> None:
        """Close them all, each on its loop. One whose loop does not get to it is left to that."""
        closing = [asyncio.wrap_future(future) for future in map(_begin_to_close, self._by_loop.values()) if future is not None]
        self._by_loop.clear()
        if closing:
            await asyncio.wait(closing, timeout=PATIENCE)

    def abandon(self) -> None:
        """Have them closed without waiting. A collection may call this anywhere: no locks."""
        for loop_pool in list(self._by_loop.values()):
            _begin_to_close(loop_pool)

    def leak_after_fork(self) -> None:
        """In a forked child: never touch these connections, which are the parent's."""
        _left_behind.append(self._by_loop)
        self._by_loop = {}


class _LoopPool(Generic[T]):
    """What one loop has. Everything but the reading of `loop` happens there."""

    def __init__(self, open_one: Callable[[], Awaitable[Opened[T]]]) -> None:
        self.loop = asyncio.get_running_loop()
        self.batchers: T | None = None
        self._open_one = open_one
        self._writes = 0
        self._opening: asyncio.Task[None] | None = None
        self._stay: AsyncGenerator[None, None] | None = None

    def count(self) -> None:
        """One more write that went the long way."""
        self._writes += 1
        if self._writes == WRITES_BEFORE:
            self._begin_to_open()

    async def open(self) -> None:
        """Return when it is open, or cannot be."""
        await asyncio.wait([self._begin_to_open()])

    def _begin_to_open(self) -> asyncio.Task[None]:
        if self._opening is None:
            # In a context of its own: it is no part of the run that happens to write.
            self._opening = asyncio.Task(self._open(), loop=self.loop, context=contextvars.Context())
        return self._opening

    async def _open(self) -> None:
        try:
            opened = await self._open_one()
        except Exception as error:  # noqa: BLE001 - whatever it is, it can be done without
            _logger.info("writes go on through another thread, as this event loop gets no connection of its own: %r", error)
            return
        self._stay = self._stayed(opened)
        await anext(self._stay)

    async def _stayed(self, opened: Opened[T]) -> AsyncGenerator[None, None]:
        """An asynchronous generator, as those are closed when their loop is shut down."""
        self.batchers = opened.batchers
        try:
            yield
        finally:
            self.batchers = None
            await opened.close()

    async def close(self) -> None:
        """Give everything back."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._stay is not None:
            await self._stay.aclose()


def _begin_to_close(loop_pool: _LoopPool[Any]) -> Future[None] | None:
    """None where nobody could do it: a loop that has ended has closed it by itself."""
    if not loop_pool.loop.is_running():
        return None
    closing = loop_pool.close()
    try:
        return asyncio.run_coroutine_threadsafe(closing, loop_pool.loop)
    except RuntimeError:  # it ended just now
        closing.close()
        return None


# What a forked child inherited: closing the connections would disturb the parent's, so they are kept for ever.
_left_behind: Final[list[dict[asyncio.AbstractEventLoop, _LoopPool[Any]]]] = []
