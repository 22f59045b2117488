"""Instruments that count operations instead of time, so that a busy machine changes nothing.

They count what the loop is asked for, which of perdure's functions are called, and which statements SQLite gets.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar, cast

import perdure

_OURS: Final = str(Path(perdure.__file__).parent)


F = TypeVar("F", bound=Callable[..., Any])


def _counted(name: str, method: F) -> F:
    @functools.wraps(method)
    def counting(self: CountingLoop, *args: Any, **kwargs: Any) -> Any:
        self.counts[name] += 1
        return method(self, *args, **kwargs)

    return cast("F", counting)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    call_soon = _counted("handles", asyncio.SelectorEventLoop.call_soon)
    call_at = _counted("timers", asyncio.SelectorEventLoop.call_at)
    call_soon_threadsafe = _counted("calls from other threads", asyncio.SelectorEventLoop.call_soon_threadsafe)
    create_task = _counted("tasks", asyncio.SelectorEventLoop.create_task)


@contextmanager
def counted_calls(counts: Counter[str]) -> Iterator[None]:
    """Count this thread's calls of perdure's functions, and what these call in C. A coroutine that goes on is a call again.

    Calls among other libraries are left out: how often asyncio looks around depends on how fast the disk is.
    """

    def note(frame: FrameType, event: str, _: object) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename.startswith(_OURS):
            counts["calls" if event == "call" else "calls into C"] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def counted_statements(counts: Counter[str]) -> Iterator[None]:
    """Count the statements of every connection to SQLite that is opened meanwhile."""
    connect = sqlite3.connect

    def note(statement: str) -> None:
        word = statement.split(None, 1)[0].upper()
        counts["transactions" if word == "COMMIT" else "" if word in {"BEGIN", "ROLLBACK"} else "statements"] += 1

    def connect_counted(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.set_trace_callback(note)
        return connection

    sqlite3.connect = connect_counted  # type: ignore[assignment]  # only for as long as this lasts
    try:
        yield
    finally:
        sqlite3.connect = connect


def counted(work: Callable[[], Coroutine[Any, Any, None]], prepare: Callable[[], Coroutine[Any, Any, None]]) -> Counter[str]:
    """What `work` takes, after `prepare`, on a loop of its own."""
    loop = CountingLoop()
    counts: Counter[str] = Counter()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, counted_statements(counts):
        runner.run(prepare())
        loop.counts.clear()
        counts.clear()

        async def watched() -> None:
            with counted_calls(counts):
                await work()

        runner.run(watched())
        counts.update(loop.counts)
    del counts[""]
    return counts
