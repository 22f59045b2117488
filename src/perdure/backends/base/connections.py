"""The connections of a store and the event loop on which they are used.

A connection belongs to an event loop, but a store's verbs are called from any. The connections that a store opens live on the
loop of a thread that all stores of its kind share and on which nothing else runs; borrowed ones live on their own loop. A verb is
submitted to that loop, and its result is handed back. A caller that is cancelled stops waiting; its verb runs to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.aio.own_tasks import own_context, start_own_task
from perdure.backends.base.retries import NotSentError, WriteFailure, retry_transient
from perdure.errors import PersistenceError, StoreClosed
from perdure.store import Durability

T = TypeVar("T")

# Connections that a forked child inherited: closing them would disturb the parent's, so they are kept for ever.
_leaked: Final[list[ServerConnections]] = []


class ServerConnections(ABC):
    """The loop and the connections of one store. Everything but `run`, `submit` and `abandon` happens on that loop."""

    PATIENCE: ClassVar[float] = 15.0  # seconds for which a verb is repeated after transient errors
    THREAD: ClassVar[LoopThread]

    def __init__(self, label: str, *, is_borrowed: bool, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` is that of borrowed connections; by default the one that runs now, or else at the first use."""
        self.label = label
        self.is_borrowed = is_borrowed
        self.durability: Durability = "disk"
        self.is_ready = False
        # Where they are used: that of borrowed connections, or of those that were opened for one loop (`settle_here`).
        self._pinned_loop = loop
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None  # where the connections are, once there are any
        self._setting_up: asyncio.Task[None] | None = None
        # Held while connections are opened, so that they are opened once.
        self._changing = asyncio.Lock()
        if is_borrowed and loop is None:
            with contextlib.suppress(RuntimeError):  # none runs yet
                self._pinned_loop = asyncio.get_running_loop()

    @abstractmethod
    def sibling(self) -> Self:
        """Connections of its own to the same server; borrowed ones are shared."""

    @abstractmethod
    async def open(self, *, allowed: bool) -> None:
        """Open the connections, create the schema if that is `allowed`, and find out what the server's commits survive."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections, unless they are borrowed."""

    @abstractmethod
    def classify_failure(self, error: BaseException) -> WriteFailure:
        """What an error of the driver or the server means for what was sent."""

    @abstractmethod
    def map_error(self, error: BaseException) -> BaseException:
        """The error that the caller gets: `PersistenceError` for errors of driver, server and system, without credentials."""

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine on the connections loop."""
        if not self.is_borrowed and self._pinned_loop is None:
            return self.THREAD.submit(coro)
        try:
            return own_context().run(asyncio.run_coroutine_threadsafe, coro, self._pin_loop())
        except RuntimeError:
            coro.close()
            raise StoreClosed(self.label, "the event loop of what it borrowed is closed; make a store anew") from None

    async def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """What the coroutine gives, run on the connections loop to its end whatever becomes of the caller."""
        return await asyncio.shield(self.start(coro))

    def start(self, coro: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """The coroutine on its way on the connections' loop. Raises `PersistenceError`, and has not started it, without that."""
        running: asyncio.Future[T] = start_own_task(coro) if self.is_here else asyncio.wrap_future(self.submit(coro))
        running.add_done_callback(_was_heard)
        return running

    @property
    def is_here(self) -> bool:
        """Whether the connections belong to the loop that runs now."""
        loop = self._pin_loop() if self.is_borrowed else self._pinned_loop
        return loop is asyncio.get_running_loop()

    def settle_here(self) -> None:
        """Belong to the loop that runs now, and to no thread of ours."""
        self._pinned_loop = self._loop = asyncio.get_running_loop()
        self.is_ready = True

    @property
    def is_reachable(self) -> bool:
        """Whether there is a loop to run on: False once that of borrowed connections is closed."""
        return self._pinned_loop is None or not self._pinned_loop.is_closed()

    def call(self, callback: Callable[[], None]) -> None:
        """Call back on the connections loop. Raises `PersistenceError` before `ensure_open` has run there."""
        if self._loop is None:
            raise PersistenceError(self.label, "it is not ready")
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise StoreClosed(self.label, "the event loop of what it borrowed is closed; make a store anew") from None

    def _pin_loop(self) -> asyncio.AbstractEventLoop:
        if self._pinned_loop is None:
            self._pinned_loop = asyncio.get_running_loop()
        return self._pinned_loop

    def leak_after_fork(self) -> None:
        """In a forked child: keep these connections, which are the parent's, and never use or close them."""
        _leaked.append(self)

    async def ensure_open(self, *, allowed: bool) -> None:
        """Open connections and schema once, however many callers there are."""
        if self.is_ready:
            return
        if self._setting_up is None or self._setting_up.done():
            self._setting_up = asyncio.ensure_future(self.set_up(allowed=allowed))
        await asyncio.shield(self._setting_up)  # shared: a cancelled caller must not cancel it

    async def set_up(self, *, allowed: bool) -> None:
        """As `ensure_open`, also when it is open already."""
        self._loop = asyncio.get_running_loop()
        async with self._changing:
            await self.retry_transient(lambda _: self.open(allowed=allowed))
        self.is_ready = True

    async def retry_transient(self, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """The result of the attempt, repeated after transient errors. It is passed True when it may be committed already."""
        return await retry_transient(attempt, self.classify_failure, self.map_error, self.PATIENCE, self._drop_idle_after_silence)

    async def _drop_idle_after_silence(self, error: BaseException) -> bool:
        """Whether it was a silence. Then the connections that are idle now are closed: most likely they are silent too."""
        is_silence = self.is_silence(error)
        if is_silence:
            with contextlib.suppress(Exception):
                await self.drop_idle()
        return is_silence

    def is_silence(self, error: BaseException) -> bool:
        """Whether an error means that a connection was there, and no reply came on it in time."""
        return isinstance(error, TimeoutError)

    async def drop_idle(self) -> None:  # noqa: B027 - for a client of the caller's there is nothing to do
        """Close the connections that nothing uses now, so that the next statement opens another."""

    @contextlib.contextmanager
    def map_errors(self) -> Iterator[None]:
        """Raise errors of the driver and the server as errors of perdure."""
        try:
            yield
        except NotSentError as carrier:
            mapped = self.map_error(carrier.__cause__ or carrier)
            raise mapped from mapped.__cause__
        except Exception as error:
            mapped = self.map_error(error)
            if mapped is error:
                raise
            raise mapped from mapped.__cause__

    def is_caused_by_one_request(self, error: BaseException) -> bool:
        """Whether a batch failed because of one of its requests, and not because of the server or the connection."""
        return self.classify_failure(error.__cause__ or error) is WriteFailure.PERMANENT

    def abandon(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start `close` on the connections' loop, if there is one. A garbage collection may call this, so it takes no lock."""
        if self._loop is not None and not self._loop.is_closed() and self._process == os.getpid():
            asyncio.run_coroutine_threadsafe(close(), self._loop)


def _was_heard(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a coroutine whose caller has left, which asyncio would log otherwise."""
    if not done.cancelled():
        done.exception()
