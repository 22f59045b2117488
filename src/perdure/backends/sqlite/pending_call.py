"""A verb handed to a thread, and how its result gets back to the caller's event loop.

The thread wakes each event loop once per batch. A caller that was cancelled, or whose loop was closed, changes nothing: its verb
runs all the same, and the result is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from perdure.aio.pending_write import PendingWrite
from perdure.backends.sqlite.connection import map_error
from perdure.backends.sqlite.writer_connection import WriterConnection

T = TypeVar("T")


class PendingCall(PendingWrite[T]):
    """A verb in flight, and its result. `probe` may find the result by a plain read, without a transaction.

    One that `wakes` wakes the watchers; with "items" those that want to know of new items. A call that `is_certain` shields its
    waiter: cancelling takes effect only after the result has arrived. One that `keeps_fences` updates the connection's fences
    itself; after any other call they are cleared.
    """

    __slots__ = ("is_certain", "keeps_fences", "needs_transaction", "probe", "verb", "wakes")

    def __init__(
        self,
        verb: Callable[[WriterConnection], T],
        *,
        wakes: bool | Literal["items"] = False,
        alone: bool = False,
        is_certain: bool = False,
        keeps_fences: bool = False,
        probe: Callable[[WriterConnection], T | None] | None = None,
    ) -> None:
        super().__init__()
        self.verb = verb
        self.wakes = wakes
        self.needs_transaction = not alone and probe is None
        self.is_certain = is_certain
        self.keeps_fences = keeps_fences
        self.probe = probe

    def _new_waiter(self) -> asyncio.Future[None]:
        return super()._new_waiter() if self.is_certain else self.loop.create_future()

    def fail(self, error: BaseException, path: str) -> None:
        """Set the error that the caller gets."""
        self.error = map_error(error, path)


def deliver(calls: Sequence[PendingCall[Any]]) -> None:
    """Resolve these calls on their event loops, with one wake-up of each loop."""
    loops = {call.loop for call in calls}
    for loop in loops:
        _wake(loop, calls if len(loops) == 1 else [call for call in calls if call.loop is loop])


def _wake(loop: asyncio.AbstractEventLoop, calls: Sequence[PendingCall[Any]]) -> None:
    try:  # noqa: SIM105 - contextlib.suppress is slower, and this runs for every step
        loop.call_soon_threadsafe(_resolve_all, calls)
    except RuntimeError:  # the loop was closed, so nothing waits there any more
        pass


def _resolve_all(calls: Sequence[PendingCall[Any]]) -> None:
    """Resolve these calls, on their loop."""
    try:
        for call in calls:
            call.resolve()
    except BaseException:  # KeyboardInterrupt ends the loop here: the other calls are resolved while it shuts down
        calls[0].loop.call_soon(_resolve_all, calls)
        raise
