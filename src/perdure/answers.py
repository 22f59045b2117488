"""Store verbs whose answer must be known, whatever happens to the task that asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Answer(asyncio.Future[T]):
    """The answer to a write that is on its way and takes place whatever becomes of whoever waits: it cannot be cancelled.

    Who is cancelled while he waits for it is so after it came. `then` is called with it at once, before anybody who waits goes
    on: a callback would come a turn of the loop later.
    """

    then: Callable[[asyncio.Future[T]], None] | None = None

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ARG002 - always refused
        return False

    def set_result(self, result: T) -> None:
        super().set_result(result)
        if self.then is not None:
            self._tell(self.then)

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(exception)
        if self.then is not None:
            self._tell(self.then)

    def _tell(self, then: Callable[[asyncio.Future[T]], None]) -> None:
        """Call it. What it raises goes the way of what a callback raises: many answers come at once, and all have to."""
        try:
            then(self)
        except BaseException as error:  # noqa: BLE001
            self.get_loop().call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error


async def answered(verb: Awaitable[T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
    """What `verb` gives. Cancelled meanwhile, the cancellation goes on only when the verb was answered, and `undo` is done."""
    asking = as_future(verb)
    try:
        return await (asking if isinstance(asking, Answer) else asyncio.shield(asking))
    except asyncio.CancelledError:
        await _ended(asking)
        if undo is not None and took_place(asking):
            await _ended(asyncio.ensure_future(undo(asking.result())))
        raise


def as_future(verb: Awaitable[T]) -> asyncio.Future[T]:
    """The verb on its way: what a store gives as a future is that already."""
    return verb if isinstance(verb, asyncio.Future) else asyncio.ensure_future(verb)


def took_place(asking: asyncio.Future[Any]) -> bool:
    """Whether the verb was answered, and did not fail."""
    return asking.done() and not asking.cancelled() and asking.exception() is None


async def finished(work: Coroutine[Any, Any, None]) -> None:
    """Do this to the end, however often the task that asked for it is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    await _ended(task)
    task.result()


async def _ended(task: asyncio.Future[Any]) -> None:
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):  # one is on its way already
            await asyncio.wait([task])
