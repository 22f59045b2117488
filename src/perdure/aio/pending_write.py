"""Store verbs whose answer must be known, whatever happens to the task that asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class _Coming(asyncio.Future[None]):
    """Done when an answer has come. Who is cancelled while he waits for it is so after that."""

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ARG002 - always refused
        return False


class Answer(Generic[T]):
    """The answer to a write that is on its way and takes place whatever becomes of whoever waits: it cannot be cancelled.

    `then` is called with it at once, before anybody who waits goes on: a callback would come a turn of the loop later. Every step
    has one of these, and nearly always it is only told so; so it is no future, and makes one when it is awaited before it came.
    """

    __slots__ = ("_coming", "_is_done", "error", "loop", "then", "value")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self.then: Callable[[Answer[T]], None] | None = None
        # What it says. Whoever works in another thread puts it here, and has it `come` on the loop.
        self.value: T | None = None
        self.error: BaseException | None = None
        self._is_done = False
        self._coming: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, T]:
        if not self._is_done:
            if self._coming is None:
                self._coming = self._new_coming()
            yield from self._coming
        return self.result()

    def _new_coming(self) -> asyncio.Future[None]:
        return _Coming(loop=self.loop)

    def done(self) -> bool:
        """Whether it has come."""
        return self._is_done

    def exception(self) -> BaseException | None:
        """The error that came instead of it."""
        return self.error

    def result(self) -> T:
        """What it says, or the error raised."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)

    def set_result(self, value: T) -> None:
        """It has come, and says this."""
        self.value = value
        self.come()

    def set_exception(self, error: BaseException) -> None:
        """It has come: there is none but this error."""
        self.error = error
        self.come()

    def come(self) -> None:
        """It is known by now. On its loop; a second time changes nothing."""
        if self._is_done:
            return
        self._is_done = True
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(None)
        if self.then is not None:
            try:
                self.then(self)
            except BaseException as error:  # noqa: BLE001 - as what a callback raises: many answers come at once, and all have to
                self.loop.call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error


async def answered(verb: Awaitable[T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
    """What `verb` gives. Cancelled meanwhile, the cancellation goes on only when the verb was answered, and `undo` is done."""
    asking = under_way(verb)
    try:
        return await (asking if isinstance(asking, Answer) else asyncio.shield(asking))
    except asyncio.CancelledError:
        await _ended(asking)
        if undo is not None and took_place(asking):
            await _ended(asyncio.ensure_future(undo(asking.result())))
        raise


def under_way(verb: Awaitable[T]) -> Answer[T] | asyncio.Future[T]:
    """The verb on its way: an answer and a future are that already."""
    return verb if isinstance(verb, Answer | asyncio.Future) else asyncio.ensure_future(verb)


def took_place(asking: Answer[Any] | asyncio.Future[Any]) -> bool:
    """Whether the verb was answered, and did not fail."""
    return asking.done() and not was_cut_off(asking) and asking.exception() is None


def was_cut_off(asking: Answer[Any] | asyncio.Future[Any]) -> bool:
    """Whether nobody will ever know how it went: a task that the loop cancelled as it was shut down."""
    return isinstance(asking, asyncio.Future) and asking.cancelled()


async def finished(work: Coroutine[Any, Any, None]) -> None:
    """Do this to the end, however often the task that asked for it is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    await _ended(task)
    task.result()


async def done(asking: Answer[Any] | asyncio.Future[Any]) -> None:
    """Return when it is done, whatever it gives."""
    if isinstance(asking, Answer):
        with contextlib.suppress(Exception):
            await asking
    else:
        await asyncio.wait([asking])


async def _ended(asking: Answer[Any] | asyncio.Future[Any]) -> None:
    while not asking.done():
        with contextlib.suppress(asyncio.CancelledError):  # one is on its way already
            await done(asking)
