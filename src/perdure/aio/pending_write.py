"""Writes whose reply must be known, whatever happens to the task that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

from perdure.aio.own_tasks import start_own_task

T = TypeVar("T")


class _UncancellableFuture(asyncio.Future[None]):
    """Cancelling a waiter takes effect only after the reply has arrived."""

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ARG002 - always refused
        return False


class PendingWrite(Generic[T]):
    """The reply to a write that is in flight. The write takes place whatever becomes of the waiter, so it cannot be cancelled.

    `on_resolved` is called as soon as the reply is there, before any waiter goes on: a future's callback would come a turn of the
    loop later. There is one for each step and nearly always only `on_resolved` is used, so it is no future itself, and makes one
    when it is awaited before the reply has arrived.
    """

    __slots__ = ("_is_done", "_waiter", "error", "loop", "on_resolved", "value")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self.on_resolved: Callable[[PendingWrite[T]], None] | None = None
        # The reply. Another thread may set one of these and have `resolve` called on the loop.
        self.value: T | None = None
        self.error: BaseException | None = None
        self._is_done = False
        self._waiter: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, T]:
        if not self._is_done:
            if self._waiter is None:
                self._waiter = self._new_waiter()
            yield from self._waiter
        return self.result()

    def _new_waiter(self) -> asyncio.Future[None]:
        return _UncancellableFuture(loop=self.loop)

    def done(self) -> bool:
        """Whether the reply has arrived."""
        return self._is_done

    def exception(self) -> BaseException | None:
        """The error that is the reply, if it is one."""
        return self.error

    def result(self) -> T:
        """The value of the reply, or its error raised."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)

    def set_result(self, value: T) -> None:
        """Resolve with this value."""
        self.value = value
        self.resolve()

    def set_exception(self, error: BaseException) -> None:
        """Resolve with this error."""
        self.error = error
        self.resolve()

    def resolve(self) -> None:
        """The reply is in `value` or `error`. Called on the loop; a second call changes nothing."""
        if self._is_done:
            return
        self._is_done = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_resolved is not None:
            try:
                self.on_resolved(self)
            except BaseException as error:  # noqa: BLE001 - many writes are resolved at once, and one must not keep the others back
                self.loop.call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error


async def await_reply(verb: Awaitable[T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
    """What `verb` gives. A cancellation meanwhile is raised only after the reply has arrived and `undo` has undone it."""
    write = in_flight(verb)
    try:
        return await (write if isinstance(write, PendingWrite) else asyncio.shield(write))
    except asyncio.CancelledError:
        await _wait_uncancelled(write)
        if is_committed(write) and undo is not None:
            await _wait_uncancelled(start_own_task(undo(write.result())))
        raise


def in_flight(verb: Awaitable[T]) -> PendingWrite[T] | asyncio.Future[T]:
    """The verb, started: a pending write and a future are that already."""
    return verb if isinstance(verb, PendingWrite | asyncio.Future) else start_own_task(verb)


def is_committed(write: PendingWrite[Any] | asyncio.Future[Any]) -> bool:
    """Whether the reply has arrived and is no error."""
    return write.done() and not is_unknown(write) and write.exception() is None


def is_unknown(write: PendingWrite[Any] | asyncio.Future[Any]) -> bool:
    """Whether the reply will never be known: the loop cancelled the task of the write as it was shut down."""
    return isinstance(write, asyncio.Future) and write.cancelled()


async def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Do this to its end, however often the calling task is cancelled meanwhile."""
    task = start_own_task(work)
    await _wait_uncancelled(task)
    task.result()


async def wait_for_reply(write: PendingWrite[Any] | asyncio.Future[Any]) -> None:
    """Return when the reply has arrived, whatever it is."""
    if isinstance(write, PendingWrite):
        with contextlib.suppress(Exception):
            await write
    else:
        await asyncio.wait([write])


async def _wait_uncancelled(write: PendingWrite[Any] | asyncio.Future[Any]) -> None:
    while not write.done():
        with contextlib.suppress(asyncio.CancelledError):  # one is raised already
            await wait_for_reply(write)
