"""Whose code runs, and tasks of perdure's own, which are no tasks of a body although its code may be what caused them.

A task inherits the context of the code that creates it, and what is created in the context of a body ends with that body. But a
body may call `runtime.start`, or be the first to use a store: what these start serves others as well, and a write that was sent
must not be cut off because a run leaves memory. So such tasks get a context in which no body is named. All other context
variables are inherited: the caller may have set some for its database client or its traces.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable
from typing import Final, TypeVar

T = TypeVar("T")

# In a step's function its StepInfo, in a run's body that body's BodyQueue, elsewhere None.
current: Final[contextvars.ContextVar[object]] = contextvars.ContextVar("perdure_current", default=None)


def own_context() -> contextvars.Context:
    """Return a copy of the present context, in which no task belongs to a body."""
    context = contextvars.copy_context()
    context.run(current.set, None)
    return context


def start_own_task(work: Awaitable[T]) -> asyncio.Future[T]:
    """Run the work as a task, which ends by itself whatever becomes of the caller."""
    return own_context().run(asyncio.ensure_future, work)
