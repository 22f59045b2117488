"""The undocumented parts of asyncio that the engine reads, in one place. `tests/engine/test_asyncio_internals.py` tests each.

A body is at rest when its own ready queue is empty (`body_queue`), which needs none of this. These tell what a resting task waits
for, whether a task is about to be cancelled, and which timers a replay has to repeat.
"""

from __future__ import annotations

import asyncio
from asyncio import futures, tasks
from collections.abc import Callable, Iterator
from contextvars import Context
from types import CellType, CodeType
from typing import Any, Final

# The future of `asyncio.gather`.
GatheringFuture: Final[type[asyncio.Future[Any]]] = tasks._GatheringFuture  # type: ignore[attr-defined]  # noqa: SLF001


def is_about_to_be_cancelled(task: asyncio.Task[Any]) -> bool:
    """Return whether the running task gets a CancelledError at its next await."""
    return bool(task._must_cancel)  # type: ignore[attr-defined]  # noqa: SLF001


def waited_for(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    """Return the future that the task waits for, or None if it is ready to run or has ended."""
    waited: asyncio.Future[Any] | None = task._fut_waiter  # type: ignore[attr-defined]  # noqa: SLF001
    return waited


def callbacks_of(future: asyncio.Future[Any]) -> list[tuple[Callable[..., object], Context]]:
    """Return what is called when the future is done, each with the context that it is called in."""
    return list(future._callbacks or ())  # noqa: SLF001


def gatherings_around(task: asyncio.Task[Any]) -> list[asyncio.Future[Any]]:
    """Return every `asyncio.gather` that the task waits for or that waits for it, also through `asyncio.shield`."""
    found: list[asyncio.Future[Any]] = []
    seen: set[int] = set()
    unseen: list[object] = [task, waited_for(task)]
    while unseen:
        future = unseen.pop()
        if (
            not isinstance(future, asyncio.Future)
            or id(future) in seen
            or (future is not task and isinstance(future, asyncio.Task))
        ):
            continue
        seen.add(id(future))
        if isinstance(future, GatheringFuture):
            found.append(future)
            unseen += future._children  # type: ignore[attr-defined]  # noqa: SLF001
        for callback, _ in callbacks_of(future):
            unseen += map(_contents, getattr(callback, "__closure__", None) or ())
    return found


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def do_not_log_destruction(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging that this task was destroyed while it was pending."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001


def owner_of(callback: Callable[..., object] | None) -> object:
    """Return the task whose step or wake-up this callback is, or whatever object it is bound to."""
    return getattr(callback, "__self__", None)


async def _nothing() -> None:
    pass


class _SeenCallback:
    """Stands in for a loop while a task is made, and keeps the callback by which it takes its first turn."""

    callback: object = None

    def call_soon(self, callback: object, *_: object, **__: object) -> None:
        self.callback = callback

    def get_debug(self) -> bool:
        return False


def _type_of_steps() -> type:
    """Return the type of the callback by which a new task takes its first turn."""
    seen, coroutine = _SeenCallback(), _nothing()
    loop: Any = seen
    task = asyncio.Task(coroutine, loop=loop)
    do_not_log_destruction(task)
    tasks._unregister_task(task)  # noqa: SLF001 - documented, for those who extend asyncio
    coroutine.close()
    return type(seen.callback)


# The type of the callback that runs a task; a bound method where asyncio is not written in C.
TaskStep: Final = _type_of_steps()


def _is_limit_of_anyio(owner: object) -> bool:
    kind = type(owner)
    return kind.__name__ == "CancelScope" and kind.__module__.startswith("anyio.")


def _is_limit_of_async_timeout(owner: object) -> bool:
    kind = type(owner)
    return kind.__name__ == "Timeout" and kind.__module__.partition(".")[0] == "async_timeout"


def _codes_in(function: Callable[..., Any]) -> Iterator[CodeType]:
    """Return the code of the functions that are defined in this one."""
    return (each for each in function.__code__.co_consts if isinstance(each, CodeType))


# Functions that asyncio's own sleeps and time limits give to a timer.
_FUNCTIONS: Final = frozenset(
    [
        futures._set_result_unless_cancelled,  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio.sleep
        tasks._release_waiter,  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio.wait, and wait_for before Python 3.12
    ]
)
# As closures: of asyncio.as_completed before Python 3.13.
_CLOSURES: Final = frozenset(code for code in _codes_in(asyncio.as_completed) if code.co_name == "_on_timeout")
# As methods: of asyncio.timeout, and of asyncio.as_completed from Python 3.13 on.
_OWNERS: Final = tuple(kind for kind in (asyncio.Timeout, getattr(tasks, "_AsCompletedIterator", None)) if isinstance(kind, type))


def is_time_limit(callback: Callable[..., object]) -> bool:
    """Return whether this is what a sleep or a time limit of asyncio, anyio or async_timeout gives to its timer.

    A timer of any other library may depend on what the process shares, such as a pool of connections.
    """
    owner = owner_of(callback)
    if owner is None:
        return callback in _FUNCTIONS or getattr(callback, "__code__", None) in _CLOSURES
    return isinstance(owner, _OWNERS) or _is_limit_of_anyio(owner) or _is_limit_of_async_timeout(owner)
