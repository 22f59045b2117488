"""An event loop in a daemon thread, and `block_on`, with which programs without a loop wait for a coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from perdure.aio.own_tasks import own_context

T = TypeVar("T")


class LoopThread:
    """Started by its first use, and again in the child of a fork; ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Guards `_loop` and `_thread` while the thread is started.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine on that thread's loop."""
        return own_context().run(asyncio.run_coroutine_threadsafe, coro, self._running_loop())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop


_thread: Final = LoopThread("perdure-sync")


def block_on(coro: Coroutine[Any, Any, T]) -> T:
    """The result of the coroutine; blocks the calling thread until then, also one that runs an event loop."""
    if _thread.is_current:
        coro.close()
        raise RuntimeError("a blocking call was made from the loop that would have to serve it; use the async methods there")
    future = _thread.submit(coro)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # the wait was interrupted (KeyboardInterrupt): nothing will read the result
        raise
