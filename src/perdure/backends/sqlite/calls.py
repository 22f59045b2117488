"""What is handed to a thread, and how the answer comes back to the caller's event loop.

The thread answers through one wake-up of each event loop per batch. A caller that was cancelled, or whose loop is closed,
changes nothing: its verb runs or not, and nobody hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from perdure.aio.pending_write import Answer
from perdure.backends.sqlite.connection import map_error
from perdure.backends.sqlite.link import Link

T = TypeVar("T")


class Call(Answer[T]):
    """A verb under way, and the answer to it. `probe` may answer it from a plain read, without a transaction.

    Who waits for it can leave, unless it `is_certain`: then he is told before he may. It `keeps_fences` if it sees to it itself
    that no lease is taken for what it was.
    """

    __slots__ = ("is_certain", "keeps_fences", "needs_transaction", "probe", "verb", "wakes")

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
        super().__init__()
        self.verb = verb
        self.wakes = wakes
        self.needs_transaction = not alone and probe is None
        self.is_certain = is_certain
        self.keeps_fences = keeps_fences
        self.probe = probe

    def _new_coming(self) -> asyncio.Future[None]:
        return super()._new_coming() if self.is_certain else self.loop.create_future()

    def fail(self, error: BaseException, path: str) -> None:
        """Answer with the error, as the caller shall see it."""
        self.error = map_error(error, path)


class Watcher:
    """Somebody who waits for a change. `left` is set by the one who waits, and read by the thread."""

    __slots__ = ("future", "left", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.left = False

    def come(self) -> None:
        """Wake the one who waits. Runs on its loop."""
        if not self.future.done():
            self.future.set_result(None)


def _all_come(answered: Sequence[Call[Any] | Watcher]) -> None:
    """They are answered, on their loop."""
    try:
        for one in answered:
            one.come()
    except BaseException:  # an interrupt, which ends the loop: what is left is answered when it winds up
        answered[0].loop.call_soon(_all_come, answered)
        raise


def answer(answered: Sequence[Call[Any] | Watcher]) -> None:
    """Wake every loop concerned, once."""
    loops = {one.loop for one in answered}
    for loop in loops:
        _wake(loop, answered if len(loops) == 1 else [one for one in answered if one.loop is loop])


def _wake(loop: asyncio.AbstractEventLoop, answered: Sequence[Call[Any] | Watcher]) -> None:
    try:  # noqa: SIM105 - what the rule wants takes longer, for every step
        loop.call_soon_threadsafe(_all_come, answered)
    except RuntimeError:  # the loop was closed: nobody waits any more
        pass
