"""An event loop in a daemon thread, and `block_on`, with which programs without a loop wait for a coroutine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, Final, Protocol, TypeVar

from perdure.aio.own_tasks import own_context
from perdure.aio.threads import count_blocked, start_thread
from perdure.errors import PersistenceError

T = TypeVar("T")

_loop_threads: Final[list[LoopThread]] = []
# In a forked child: the parent's loops. They share the parent's epoll instances, and closing one here would take file descriptors
# out of them, so they are kept for ever.
_left_behind: Final[list[asyncio.AbstractEventLoop]] = []


class LoopThread:
    """Started by its first use, and again in the child of a fork; ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()
        _loop_threads.append(self)

    def _forget(self) -> None:
        # Guards `_loop` and `_thread` while the thread is started.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine on that thread's loop. Raises `PersistenceError`, and closes it, if the thread cannot be started."""
        try:
            loop = self._running_loop()
        except BaseException:
            coro.close()
            raise
        return own_context().run(asyncio.run_coroutine_threadsafe, coro, loop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop, self._thread = self._start()
            return self._loop

    def _start(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        try:
            loop = asyncio.new_event_loop()
        except OSError as reason:  # no file descriptors are left
            raise PersistenceError(f"thread {self._name!r}", f"it could not be started: {reason}") from reason
        try:
            return loop, start_thread(self._name, loop.run_forever)
        except PersistenceError:
            loop.close()
            raise

    def start_over(self) -> None:
        """In a forked child: the thread is the parent's."""
        if self._loop is not None:
            _left_behind.append(self._loop)
        self._forget()


def _start_over_in_child() -> None:
    for thread in _loop_threads:
        thread.start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over_in_child)

_thread: Final = LoopThread("perdure-sync")
# How long a thread is blocked before it looks whether all threads for plain steps are.
WARN_OF_BLOCKED_SECONDS: Final = 3.0


class BlockOn(Protocol):
    """Wait for a coroutine and return its result: `block_on`, or another function for a loop that is not in that thread."""

    def __call__(self, coro: Coroutine[Any, Any, T], by: str = ..., /) -> T: ...


def block_on(coro: Coroutine[Any, Any, T], by: str = "a call") -> T:
    """The result of the coroutine; blocks the calling thread until then, also one that runs an event loop.

    `by` is what a warning names if the thread is one for plain steps and all of those block in such calls.
    """
    if _thread.is_current:
        coro.close()
        raise RuntimeError("a blocking call was made from the loop that would have to serve it; use the async methods there")
    future = _thread.submit(coro)
    try:
        with count_blocked(by) as warn_if_all_blocked:
            while not wait([future], WARN_OF_BLOCKED_SECONDS).done:
                warn_if_all_blocked()
        return future.result()
    except KeyboardInterrupt as interrupt:
        future.cancel()  # nothing will read the result
        raise interrupt.with_traceback(None) from None  # how this thread waited says nothing about what was interrupted
    except BaseException:
        future.cancel()
        raise
