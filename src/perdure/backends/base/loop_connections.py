"""Connections on the event loops that write much, so that what is written there need not cross to the home loop and back.

Nothing else lives there: a loop that runs other people's code may be blocked for long, and leases have to be renewed meanwhile.
An outpost is opened when its loop has written a while, and until then, or where that fails, the home loop does the work. It goes
when the store is closed, and when its loop is shut down (by `asyncio.run`, or whoever calls `shutdown_asyncgens`).
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
    """What an outpost has, and how that is given back."""

    lanes: T
    close: Callable[[], Awaitable[None]]


class Outposts(Generic[T]):
    """The outposts of one store, by event loop."""

    def __init__(self, open_one: Callable[[], Awaitable[Opened[T]]]) -> None:
        """`open_one` is called on the loop that is to have one. It must not refer to the store, which may be dropped before."""
        self._open_one = open_one
        self._by_loop: dict[asyncio.AbstractEventLoop, _Outpost[T]] = {}

    def here(self) -> T | None:
        """What the running loop has, for one write; None as long as it has nothing."""
        outpost = self._by_loop.get(asyncio.get_running_loop()) or self._found()
        if outpost.lanes is None:
            outpost.count()
        return outpost.lanes

    async def open_here(self) -> None:
        """Have one on the running loop, if that can be."""
        await (self._by_loop.get(asyncio.get_running_loop()) or self._found()).open()

    def _found(self) -> _Outpost[T]:
        for loop in [loop for loop in list(self._by_loop) if loop.is_closed()]:
            self._by_loop.pop(loop, None)
        outpost = self._by_loop[asyncio.get_running_loop()] = _Outpost(self._open_one)
        return outpost

    async def close(self) -> None:
        """Close them all, each on its loop. One whose loop does not get to it is left to that."""
        closing = [asyncio.wrap_future(future) for future in map(_begin_to_close, self._by_loop.values()) if future is not None]
        self._by_loop.clear()
        if closing:
            await asyncio.wait(closing, timeout=PATIENCE)

    def abandon(self) -> None:
        """Have them closed without waiting. A collection may call this anywhere: no locks."""
        for outpost in list(self._by_loop.values()):
            _begin_to_close(outpost)

    def leave_behind(self) -> None:
        """In a forked child: never touch these connections, which are the parent's."""
        _left_behind.append(self._by_loop)
        self._by_loop = {}


class _Outpost(Generic[T]):
    """What one loop has. Everything but the reading of `loop` happens there."""

    def __init__(self, open_one: Callable[[], Awaitable[Opened[T]]]) -> None:
        self.loop = asyncio.get_running_loop()
        self.lanes: T | None = None
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
        self.lanes = opened.lanes
        try:
            yield
        finally:
            self.lanes = None
            await opened.close()

    async def close(self) -> None:
        """Give everything back."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._stay is not None:
            await self._stay.aclose()


def _begin_to_close(outpost: _Outpost[Any]) -> Future[None] | None:
    """None where nobody could do it: a loop that has ended has closed it by itself."""
    if not outpost.loop.is_running():
        return None
    closing = outpost.close()
    try:
        return asyncio.run_coroutine_threadsafe(closing, outpost.loop)
    except RuntimeError:  # it ended just now
        closing.close()
        return None


# What a forked child inherited: closing the connections would disturb the parent's, so they are kept for ever.
_left_behind: Final[list[dict[asyncio.AbstractEventLoop, _Outpost[Any]]]] = []
