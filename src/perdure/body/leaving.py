"""Let the tasks of a body end: when the run leaves memory, when its function has ended, and at the end of the run.

It is done as `asyncio.run` ends. The body's own task is cancelled first, since a TaskGroup ignores a child that is cancelled on
its own. At each rest that follows, the tasks are cancelled that this has not reached, each of them once. ctx calls are refused by
then. `finally` blocks may await something of the host, so this takes turns of the host, and a bounded time: after that a task is
left alone, and kept for good, since a garbage collection would throw GeneratorExit into it on any thread.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

from perdure.aio.code_places import CodePlace, innermost_place
from perdure.body.asyncio_internals import gatherings_around
from perdure.body.body_queue import BodyQueue, BodyTask
from perdure.errors import PerdureWarning
from perdure.model.logs import log

# How long tasks may take to end once they were cancelled.
CLOSING_SECONDS: Final = 5.0
# After half of that they are cancelled again, and then so often.
_AGAIN_SECONDS: Final = 0.1

# Tasks that did not end, with the ids of their runs, and in words.
_left: Final[weakref.WeakKeyDictionary[asyncio.Task[Any], str]] = weakref.WeakKeyDictionary()
# They are never freed while they are pending.
_kept: Final[set[asyncio.Task[Any]]] = set()


class Leaving:
    """The end of the tasks of one body, and of steps that still run."""

    def __init__(
        self,
        body: BodyQueue,
        main: asyncio.Task[Any],
        steps: Mapping[asyncio.Task[Any], str],
        refused: set[asyncio.Task[Any]],
        seconds: float = CLOSING_SECONDS,
    ) -> None:
        self._body = body
        self._main = main
        self._steps = dict(steps)
        # Those whose ctx calls were refused are on their way out already.
        self._cancelled = refused
        # How often each was cancelled before, by the body itself.
        self._requests = {task: task.cancelling() for task in body.pending_tasks()}
        # Done when all tasks have ended, or were left alone.
        self.done: asyncio.Future[None] = body.on_host(body.loop.create_future)
        body.is_closing = True
        for timer in list(body.timers.values()):
            timer.disarm()
            body.enqueue_later(timer)
        for task in body.pending_tasks():
            task.add_done_callback(_retrieve, context=body.context)
        for task in self._steps:
            body.on_host(task.cancel)
            task.add_done_callback(lambda _: body.schedule(), context=body.context)
        self._timers = [
            body.call_later(seconds / 2, self._cancel_again),
            body.call_later(seconds, self._give_up),
        ]
        body.schedule()

    def rest(self) -> bool:
        """The body rests: cancel what was not cancelled by what was cancelled before. Return whether to look again."""
        if self.done.done():
            return False
        tasks = self._pending()
        if not tasks:
            self._end()
            return False
        if not self._main.done() and self._main not in self._cancelled:
            self._cancel(self._main)
            return True
        found = False
        for task in tasks:
            is_reached = task in self._cancelled or task in self._steps or task.cancelling() > self._requests.get(task, 0)
            if not is_reached and not _cleans_up(task):
                self._cancel(task)
                found = True
        return found

    def _pending(self) -> list[asyncio.Task[Any]]:
        return [*self._body.pending_tasks(), *(task for task in self._steps if not task.done())]

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._cancelled.add(task)
        for gathering in gatherings_around(task):
            gathering.add_done_callback(_retrieve, context=self._body.context)
        if not self._body.wake_without(task):
            task.cancel()

    def _cancel_again(self) -> None:
        if not self.done.done():
            for task in self._pending():
                self._cancel(task)
            self._timers.append(self._body.call_later(_AGAIN_SECONDS, self._cancel_again))
            self._body.schedule()

    def _give_up(self) -> None:
        if not self.done.done():
            for task in self._pending():
                _leave(self._body.run_id, task, self._steps.get(task))
            self._end()

    def _end(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.done.set_result(None)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take the error of what nothing may wait for any more, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


def _cleans_up(task: asyncio.Task[Any]) -> bool:
    """Return whether a task that is still unwinding has made this one, as `wait_for` in a `finally` block does."""
    return isinstance(task, BodyTask) and task.cleans_up_for is not None and not task.cleans_up_for.done()


def _leave(run_id: str, task: asyncio.Task[Any], step: str | None) -> None:
    """Leave a task alone that does not end, and say so."""
    place = _place_of(task)
    what = "a task of it" if step is None else f"step {step!r}"
    where = "" if place is None else f"; it is at {place}"
    _left[task] = f"{what} of run {run_id!r}{where}"
    _kept.add(task)
    task.add_done_callback(_kept.discard)
    if log.hasHandlers():  # otherwise it would be printed twice
        log.warning("run %r left memory, but %s does not end when it is cancelled%s", run_id, what, where)
    message = f"run {run_id!r} left memory, but {what} does not end when it is cancelled{where}"
    warnings.warn(message, PerdureWarning, stacklevel=2)


def _place_of(task: asyncio.Task[Any]) -> CodePlace | None:
    """Return the place in the user's code where a task waits."""
    return innermost_place(list(_awaiting_frames(task.get_coro())))


def _awaiting_frames(awaited: Any) -> Iterator[FrameType]:
    """Return the frames of a coroutine that waits, the outermost first."""
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        frame: FrameType | None = None if kind is None else getattr(awaited, f"{kind}_frame")
        if frame is None:
            return
        yield frame
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def give_up_left_tasks() -> list[str]:
    """Return the tasks that were left alone on this event loop and still run, in words. `asyncio.run` waits for them no more.

    Called when a worker has drained: its program ends now, and the loop would otherwise wait for ever.
    """
    loop, found = asyncio.get_running_loop(), []
    for task, words in list(_left.items()):
        if not task.done() and task.get_loop() is loop:
            unregister: Callable[[asyncio.Task[Any]], None] = asyncio._unregister_task  # noqa: SLF001 - documented
            unregister(task)
            place = _place_of(task)
            found.append(words if place is None else f"{words.partition(';')[0]}; it is at {place}")
    return found
