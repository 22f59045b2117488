"""Coroutines that are begun before their task, which would never enter them when it is cancelled before its first step."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def first_step() -> Generator[None, None, None]:
    """Return in the first step of the task. Raises what comes before that, such as a cancellation."""
    yield


def begun(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """A coroutine that awaits `first_step` before anything else, and has come so far."""
    work.send(None)
    return work
