"""Tasks of perdure's own: they are no tasks of a body, although the code of a body may be what caused them.

A task inherits the context of the code that creates it, and what is created in the context of a body ends with that body. But a
body may call `runtime.start`, or be the first to use a store: what these start serves others as well, and a write that was sent
must not be cut off because a run leaves memory. So such tasks get a context that is marked. All other context variables are
inherited: the caller may have set some for its database client or its traces.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable
from typing import Final, TypeVar

T = TypeVar("T")

_is_own: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar("perdure_is_own", default=False)


def own_context() -> contextvars.Context:
    """A copy of the present context, in which no task belongs to a body."""
    context = contextvars.copy_context()
    context.run(_is_own.set, True)
    return context


def body_context() -> contextvars.Context:
    """A copy of the present context, for a body that starts here: perdure's own tasks are what starts bodies."""
    context = contextvars.copy_context()
    context.run(_is_own.set, False)
    return context


def is_own_context(context: contextvars.Context | None) -> bool:
    """Whether a task in this context, or in the present one if it is None, is of perdure's own."""
    return _is_own.get() if context is None else context.get(_is_own, False)


def start_own_task(work: Awaitable[T]) -> asyncio.Future[T]:
    """The work as a task, which ends by itself whatever becomes of the caller."""
    return own_context().run(asyncio.ensure_future, work)
