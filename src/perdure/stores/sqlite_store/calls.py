"""What is handed to a thread, and how the answer comes back to the caller's event loop.

The thread answers through one wake-up of each event loop per batch. A caller that was cancelled, or whose loop is closed,
changes nothing: its verb runs or not, and nobody hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from perdure.answers import Answer
from perdure.stores.sqlite_store.connection import mapped
from perdure.stores.sqlite_store.link import Link

T = TypeVar("T")


class Call(Generic[T]):
    """A verb under way. `probe` may answer it from a plain read, without a transaction.

    Who waits for it can leave, unless it `is_certain`: then he is told before he may. It `keeps_fences` if it sees to it itself
    that no lease is taken for what it was.
    """

    __slots__ = ("error", "future", "keeps_fences", "loop", "needs_transaction", "probe", "result", "verb", "wakes")

    def __init__(
        self,
        verb: Callable[[Link], T],
        *,
        wakes: bool = False,
        alone: bool = False,
        is_certain: bool = False,
        keeps_fences: bool = False,
        probe: Callable[[Link], T | None] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: Answer[T] | asyncio.Future[T] = Answer(self.loop) if is_certain else self.loop.create_future()
        self.verb = verb
        self.wakes = wakes
        self.needs_transaction = not alone and probe is None
        self.keeps_fences = keeps_fences
        self.probe = probe
        self.result: T | None = None
        self.error: BaseException | None = None

    def fail(self, error: BaseException, path: str) -> None:
        """Answer with the error, as the caller shall see it."""
        self.error = mapped(error, path)

    def settle(self) -> None:
        """Answer the caller. Runs on its loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]  # set by the verb whenever there is no error


class Watcher:
    """Somebody who waits for a change. `left` is set by the one who waits, and read by the thread."""

    __slots__ = ("future", "left", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.left = False

    def settle(self) -> None:
        """Wake the one who waits. Runs on its loop."""
        if not self.future.done():
            self.future.set_result(None)


def _settle_all(answered: Sequence[Call[Any] | Watcher]) -> None:
    """Answer them, on their loop."""
    try:
        for one in answered:
            one.settle()
    except BaseException:  # an interrupt, which ends the loop: what is left is answered when it winds up
        answered[0].loop.call_soon(_settle_all, answered)
        raise


def answer(answered: Sequence[Call[Any] | Watcher]) -> None:
    """Wake every loop concerned, once."""
    loops = {one.loop for one in answered}
    for loop in loops:
        _wake(loop, answered if len(loops) == 1 else [one for one in answered if one.loop is loop])


def _wake(loop: asyncio.AbstractEventLoop, answered: Sequence[Call[Any] | Watcher]) -> None:
    try:  # noqa: SIM105 - what the rule wants takes longer, for every step
        loop.call_soon_threadsafe(_settle_all, answered)
    except RuntimeError:  # the loop was closed: nobody waits any more
        pass
