"""The event loop on which a client lives. A client of our own lives in a thread of ours, a borrowed one where it was made.

A connection belongs to one event loop, but a store's verbs may be called from any; so each call goes to the client's loop, and a
caller's loop that blocks, or ends, holds up nobody else.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, Protocol, TypeVar

from perdure.aio.loop_thread import LoopThread

T = TypeVar("T")


# What a forked child got with its memory is the parent's, down to the selector on which the parent's loop waits: closing a
# connection here, as the garbage collector would, makes the parent deaf to it.
_of_the_parent: Final[list[object]] = []


def leave_to_parent(*things: object) -> None:
    """Never let go of these in this process."""
    _of_the_parent.extend(things)


class Home(Protocol):
    """A loop that can be reached from every thread."""

    def pin(self) -> None:
        """If it is not known yet which loop it is, it is the present one."""
        ...

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine there. Raises `RuntimeError` when that loop is closed."""
        ...


class OurLoop(LoopThread):
    """The loop of our own clients."""

    def pin(self) -> None:
        """It is known from the start."""


OURS: Final[Home] = OurLoop("perdure-redis")


class CallersLoop:
    """The loop of a borrowed client: the one that runs when the store is made or, if none does, when it is first used."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.pin()

    def pin(self) -> None:
        """Stay on the present loop from now on, if there is one and no other was there before."""
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                return

    def submit(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        self.pin()
        if self._loop is None or self._loop.is_closed():
            coro.close()
            raise RuntimeError("the event loop of the borrowed Redis client is closed; make a store with another client")
        if self._pid != os.getpid():
            coro.close()
            raise RuntimeError("the borrowed Redis client is on the event loop of the parent process; make another here")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)
