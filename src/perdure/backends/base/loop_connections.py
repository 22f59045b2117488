"""Connections on the event loops that write much, so that their writes need not cross to the connections loop and back.

They serve writes only: a loop that runs user code may be blocked for long, and leases have to be renewed meanwhile. A loop gets
connections after WRITES_BEFORE writes; before that, or where opening them fails, the connections loop does the work. They are
closed with the store, and when their loop is shut down (by `asyncio.run`, or by a call of `shutdown_asyncgens`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, NamedTuple, TypeVar

from perdure.errors import PersistenceError

T = TypeVar("T")

WRITES_BEFORE: Final = 32
PATIENCE: Final = 5.0

_logger: Final = logging.getLogger("perdure")


class LoopBatchers(NamedTuple, Generic[T]):
    """The batchers of one loop, and how their connections are closed."""

    batchers: T
    close: Callable[[], Awaitable[None]]


class LoopConnections(Generic[T]):
    """The connections of one store on the event loops of its callers."""

    def __init__(self, open_one: Callable[[], Awaitable[LoopBatchers[T]]]) -> None:
        """`open_one` is called on the loop that gets connections. It must not refer to the store, which may be dropped before."""
        self._open_one = open_one
        self._by_loop: dict[asyncio.AbstractEventLoop, _LoopPool[T]] = {}

    def here(self) -> T | None:
        """The batchers of the running loop, for one write; None as long as it has none."""
        loop_pool = self._by_loop.get(asyncio.get_running_loop()) or self._add_loop()
        if loop_pool.batchers is None:
            loop_pool.count()
        return loop_pool.batchers

    async def open_here(self) -> None:
        """Open connections on the running loop, if that is possible."""
        await (self._by_loop.get(asyncio.get_running_loop()) or self._add_loop()).open()

    async def connect(self) -> T:
        """What is open on the running loop, opened if need be. Raises what kept it from that; the next call tries again."""
        loop_pool = self._by_loop.get(asyncio.get_running_loop()) or self._add_loop()
        if loop_pool.batchers is None:
            await loop_pool.open()
        if loop_pool.batchers is None:
            self._by_loop.pop(loop_pool.loop, None)
            raise loop_pool.failure or PersistenceError("connections", "they were closed while they were being opened")
        return loop_pool.batchers

    def _add_loop(self) -> _LoopPool[T]:
        for loop in [loop for loop in list(self._by_loop) if loop.is_closed()]:
            self._by_loop.pop(loop, None)
        loop_pool = self._by_loop[asyncio.get_running_loop()] = _LoopPool(self._open_one)
        return loop_pool

    async def close(self) -> None:
        """Close them all, each on its loop. A loop that is blocked for longer than PATIENCE closes its own later."""
        closing = [asyncio.wrap_future(future) for future in map(_start_to_close, self._by_loop.values()) if future is not None]
        self._by_loop.clear()
        if closing:
            await asyncio.wait(closing, timeout=PATIENCE)

    def abandon(self) -> None:
        """Start to close them, without waiting. A garbage collection may call this, so it takes no lock."""
        for loop_pool in list(self._by_loop.values()):
            _start_to_close(loop_pool)

    def leak_after_fork(self) -> None:
        """In a forked child: keep these connections, which are the parent's, and never use or close them."""
        _leaked.append(self._by_loop)
        self._by_loop = {}


class _LoopPool(Generic[T]):
    """The connections of one loop. Everything but reading `loop` happens there."""

    def __init__(self, open_one: Callable[[], Awaitable[LoopBatchers[T]]]) -> None:
        self.loop = asyncio.get_running_loop()
        self.batchers: T | None = None
        self.failure: Exception | None = None
        self._opened: LoopBatchers[T] | None = None
        self._open_one = open_one
        self._writes = 0
        self._opening: asyncio.Task[None] | None = None
        self._stay: AsyncGenerator[None, None] | None = None
        # The closing of the connections, once it has begun: the store, a garbage collection and asyncio may all want it.
        self._closing: asyncio.Future[None] | None = None

    def count(self) -> None:
        """Count a write that crossed to the connections loop."""
        self._writes += 1
        if self._writes == WRITES_BEFORE:
            self._start_to_open()

    async def open(self) -> None:
        """Return when it is open, or opening it failed."""
        await asyncio.wait([self._start_to_open()])

    def _start_to_open(self) -> asyncio.Task[None]:
        if self._opening is None:
            # In a context of its own: it is no part of the run that happens to write.
            self._opening = asyncio.Task(self._open(), loop=self.loop, context=contextvars.Context())
        return self._opening

    async def _open(self) -> None:
        try:
            batchers = await self._open_one()
        except Exception as error:  # noqa: BLE001 - whatever it is, writes can go on without
            self.failure = error
            _logger.info("writes go on through another thread, as this event loop gets no connection of its own: %r", error)
            return
        self._opened = batchers
        self.batchers = batchers.batchers
        self._stay = self._stay_open()
        await anext(self._stay)

    async def _stay_open(self) -> AsyncGenerator[None, None]:
        """An asynchronous generator, since asyncio closes those when their loop is shut down."""
        try:
            yield
        finally:
            self._stay = None  # from now on no other may close this generator: it runs
            await self._close_once()

    async def close(self) -> None:
        """Close the connections. May be called several times, also while they are being closed."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._close_once()
        if self._stay is not None:
            await self._stay.aclose()

    async def _close_once(self) -> None:
        self.batchers = None
        opened, self._opened = self._opened, None
        if opened is not None:
            self._closing = asyncio.ensure_future(opened.close())
        if self._closing is not None:
            await asyncio.shield(self._closing)


def _start_to_close(loop_pool: _LoopPool[Any]) -> Future[None] | None:
    """The closing on the loop; None when the loop has ended, and has closed it by itself."""
    if not loop_pool.loop.is_running():
        return None
    closing = loop_pool.close()
    try:
        return asyncio.run_coroutine_threadsafe(closing, loop_pool.loop)
    except RuntimeError:  # it ended just now
        closing.close()
        return None


# Connections that a forked child inherited: closing them would disturb the parent's, so they are kept for ever.
_leaked: Final[list[dict[asyncio.AbstractEventLoop, _LoopPool[Any]]]] = []
