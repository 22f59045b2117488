"""Where a store's connections live: one event loop, and what is tried again there.

A connection belongs to an event loop, but a store's verbs are called from any. The connections that a store opens live on the
loop of a thread that all stores of its kind share and on which nothing else runs; borrowed ones live on their own loop. A verb is
carried to that loop and its answer back. A caller that is cancelled stops waiting; its verb is carried out all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.failures import NotSentError, WriteFailure
from perdure.errors import PerdureError, PersistenceError
from perdure.store import Durability

T = TypeVar("T")

_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5

# What a forked child inherited: closing the connections would disturb the parent's, so they are kept for ever.
_left_behind: Final[list[ServerConnections]] = []


class ServerConnections(ABC):
    """The loop and the connections of one store. Everything but `run`, `submit` and `abandon` happens on that loop."""

    PATIENCE: ClassVar[float] = 15.0  # for how long a verb is tried again after errors that pass
    THREAD: ClassVar[LoopThread]

    def __init__(self, label: str, *, is_borrowed: bool, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is that of borrowed connections; without it, it is the one that runs now or at the first use."""
        self.label = label
        self.is_borrowed = is_borrowed
        self.durability: Durability = "disk"
        self.is_ready = False
        self._borrowed_loop = loop
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None  # where the connections are, once there are any
        self._setting_up: asyncio.Task[None] | None = None
        # Held while connections are opened, so that none is opened twice.
        self._changing = asyncio.Lock()
        if is_borrowed and loop is None:
            with contextlib.suppress(RuntimeError):  # none runs yet
                self._borrowed_loop = asyncio.get_running_loop()

    @abstractmethod
    def sibling(self) -> Self:
        """A connections in the same place with connections of its own, unless they are borrowed."""

    @abstractmethod
    async def open(self, *, allowed: bool) -> None:
        """Leave connections there, and the schema if it may be created; find out what the server survives."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the connections, if they are ours."""

    @abstractmethod
    def classify_failure(self, error: BaseException) -> WriteFailure:
        """What to make of an error that something sent to the server met."""

    @abstractmethod
    def map_error(self, error: BaseException) -> BaseException:
        """What the caller gets: `PersistenceError` for what the driver, the server and the system say, without credentials."""

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine on the connections loop."""
        if not self.is_borrowed:
            return self.THREAD.submit(coro)
        try:
            return asyncio.run_coroutine_threadsafe(coro, self._pin_loop())
        except RuntimeError:
            coro.close()
            raise PersistenceError(self.label, "the event loop of what it borrowed is closed; make a store anew") from None

    async def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """What the coroutine gives, run on the connections loop to its end whatever becomes of the caller."""
        return await asyncio.shield(self.start(coro))

    def start(self, coro: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """The coroutine on its way on the connections' loop. Raises `PersistenceError`, and has not started it, without that."""
        is_here = self.is_borrowed and self._pin_loop() is asyncio.get_running_loop()
        running: asyncio.Future[T] = asyncio.ensure_future(coro) if is_here else asyncio.wrap_future(self.submit(coro))
        running.add_done_callback(_was_heard)
        return running

    @property
    def is_reachable(self) -> bool:
        """Whether there is a loop to run on: False once that of borrowed connections is closed."""
        return self._borrowed_loop is None or not self._borrowed_loop.is_closed()

    def call(self, callback: Callable[[], None]) -> None:
        """Call back on the connections loop, once that is known: what is ready has one."""
        if self._loop is None:
            raise PersistenceError(self.label, "it is not ready")
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise PersistenceError(self.label, "the event loop of what it borrowed is closed; make a store anew") from None

    def _pin_loop(self) -> asyncio.AbstractEventLoop:
        if self._borrowed_loop is None:
            self._borrowed_loop = asyncio.get_running_loop()
        return self._borrowed_loop

    def leak_after_fork(self) -> None:
        """In a forked child: never touch these connections, which are the parent's."""
        _left_behind.append(self)

    async def ensure_open(self, *, allowed: bool) -> None:
        """Have connections and schema there. Many may ask at once."""
        if self.is_ready:
            return
        if self._setting_up is None or self._setting_up.done():
            self._setting_up = asyncio.ensure_future(self.set_up(allowed=allowed))
        await asyncio.shield(self._setting_up)  # shared, so nobody who leaves takes it along

    async def set_up(self, *, allowed: bool) -> None:
        """As `ensure_open`, also when it was ready before."""
        self._loop = asyncio.get_running_loop()
        async with self._changing:
            await self.retry_transient(lambda _: self.open(allowed=allowed))
        self.is_ready = True

    async def retry_transient(self, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """What the attempt gives, made again after errors that pass. It is told when it may have been done before."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.PATIENCE
        repeated, pause = False, _FIRST_PAUSE
        while True:
            try:
                return await attempt(repeated)
            except PerdureError:
                raise
            except NotSentError as carrier:
                error: BaseException = carrier.__cause__ or carrier
                fate = WriteFailure.RETRY
            except Exception as met:  # noqa: BLE001 - told apart below, and raised unless it passes
                error, fate = met, self.classify_failure(met)
            if fate is WriteFailure.PERMANENT or loop.time() > deadline:
                raise self.map_error(error)
            repeated |= fate is WriteFailure.UNKNOWN
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - to spread out, not to hide
            pause = min(pause * 2, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def map_errors(self) -> Iterator[None]:
        """Errors of the driver and the server as errors of perdure."""
        try:
            yield
        except NotSentError as carrier:
            raise self.map_error(carrier.__cause__ or carrier) from carrier.__cause__
        except Exception as error:
            told = self.map_error(error)
            if told is error:
                raise
            raise told from told.__cause__

    def is_caused_by_one_request(self, error: BaseException) -> bool:
        """Whether what was sent for many failed because of one of them, and not because of the server or the way to it."""
        return self.classify_failure(error.__cause__ or error) is WriteFailure.PERMANENT

    def abandon(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start `close` on the connections' loop, if there is one. A garbage collection may call this, so it takes no lock."""
        if self._loop is not None and not self._loop.is_closed() and self._process == os.getpid():
            asyncio.run_coroutine_threadsafe(close(), self._loop)


def _was_heard(done: asyncio.Future[Any]) -> None:
    """Nobody has forgotten what it raised: whoever has left did not want to know, and asyncio need not say it in his stead."""
    if not done.cancelled():
        done.exception()
