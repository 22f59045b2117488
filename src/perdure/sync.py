"""The door for programs without an event loop: coroutines run on a loop in a background thread, and the caller blocks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from perdure.loopthread import LoopThread

T = TypeVar("T")

_thread: Final = LoopThread("perdure-sync")


def block_on(coro: Coroutine[Any, Any, T]) -> T:
    """What the coroutine gives; the caller waits for it. Works in any thread, also one that runs an event loop."""
    if _thread.is_current:
        coro.close()
        raise RuntimeError("a blocking call was made from the loop that would have to serve it; use the async methods there")
    future = _thread.submit(coro)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # interrupted (KeyboardInterrupt) rather than answered: nobody waits for it any more
        raise
