"""The order in which a body creates its tasks, kept the same on every replay.

`asyncio.wait`, `as_completed` and TaskGroup put tasks into sets, which iterate by hash, and a task's hash is its address. So each
task of a body hashes by the number of its creation (`body/body_queue.py`).

`as_completed` also puts coroutines into a set before it makes tasks of them, and a coroutine's hash cannot be changed. But
it makes no difference to `as_completed` which of its tasks runs which of its coroutines. So they start in the order of
the list that it was given, which is read from its frame (the parameter `fs`), because no public interface tells it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
from collections import deque
from collections.abc import Collection, Iterable
from types import FrameType
from typing import Any, Final

from perdure.errors import PerdureWarning

_AS_COMPLETED: Final = asyncio.as_completed.__code__
# Between it and the task factory are only plain functions; code of a body is in one of these.
_OF_A_BODY: Final = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class TaskCreator:
    """What creates the tasks of a body. `number` is that of the first one, by which it hashes."""

    __slots__ = ("_given", "_left", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        # While `as_completed` makes its tasks: what it was given, and the coroutines in it that have no task yet.
        self._given: Iterable[Any] | None = None
        self._left: deque[Any] | None = None

    def next_to_start(self, coro: Any) -> Any:
        """What the task that is asked for with `coro` has to run: another coroutine of the same `as_completed`, if one asks."""
        given = _given_to_as_completed()
        if given is None:
            return coro
        if given is not self._given:
            self._given, self._left = given, deque(_coroutines_in_order(given))
        if not self._left:
            return coro
        first = self._left.popleft()
        if not self._left:
            self._given = None
        return first


def _given_to_as_completed() -> Iterable[Any] | None:
    """What `as_completed` was given, if it is what creates a task right now."""
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - documented; what called the task factory
    while frame is not None:
        if frame.f_code is _AS_COMPLETED:
            given: Iterable[Any] = frame.f_locals["fs"]
            return given
        frame = None if frame.f_code.co_flags & _OF_A_BODY else frame.f_back
    return None


def _coroutines_in_order(given: Iterable[Any]) -> list[Any]:
    """The coroutines among what `as_completed` was given; none, with a warning, when their order cannot be known any more."""
    is_ordered = isinstance(given, Collection) and not isinstance(given, set | frozenset)
    if is_ordered and all(asyncio.iscoroutine(each) or asyncio.isfuture(each) for each in given):
        return [each for each in dict.fromkeys(given) if asyncio.iscoroutine(each)]
    message = (
        f"the body of a workflow gave asyncio.as_completed a {type(given).__name__}: its coroutines start in another order on a "
        "replay; pass a list of coroutines, or tasks"
    )
    warnings.warn(message, PerdureWarning, stacklevel=6)
    return []
