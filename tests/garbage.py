"""Garbage whose finalizer makes a syntax tree, as one does that prints a traceback."""

from __future__ import annotations

import ast
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def _pause() -> Iterator[None]:
    yield


def _make_tree(frames: int) -> None:
    """Make it from deeper in the stack: the depth of a tree is counted from there."""
    if frames:
        _make_tree(frames - 1)
    else:
        ast.parse("made")


async def _unfinished() -> None:
    try:
        await _pause()
    finally:
        _make_tree(50)


def leave_coroutine_in_cycle() -> None:
    """Leave a coroutine that has not ended to the garbage collector."""
    coroutine = _unfinished()
    coroutine.send(None)
    cycle: list[Any] = [coroutine]
    cycle.append(cycle)


def with_collections(call: Callable[[], T]) -> Iterator[T]:
    """Yield what the call returns, again and again. Each time the collection comes a little later in it."""
    thresholds = gc.get_threshold()
    try:
        for later in range(10, 2000, 10):
            gc.disable()
            gc.collect(0)
            leave_coroutine_in_cycle()
            gc.set_threshold(later)
            gc.enable()
            yield call()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
