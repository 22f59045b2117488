"""The gate of a store: who is inside, and that nobody comes in once it was closed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from perdure.backends.sqlite.calls import Watcher, answer
from perdure.errors import PersistenceError

T = TypeVar("T")


class Gate:
    """Counts the verbs of one store that are under way; entering it when it was closed raises `PersistenceError`.

    `watchers` are those who wait outside for a change; closing ends their wait.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._closed = False
        self.start_over()
        _gates.add(self)

    def start_over(self) -> None:
        """In a forked child: nothing is under way."""
        self._lock = threading.Lock()
        self._inside = 0
        self.watchers: set[Watcher] = set()
        self._empty: Watcher | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._check()
            self._inside += 1

    def hand_over(self, put: Callable[[T], None], message: T) -> None:
        """Put the message somewhere, which takes no time, if the gate was not closed before."""
        with self._lock:
            if self._closed:
                self._check()
            put(message)

    def _check(self) -> None:
        if self._closed:
            raise PersistenceError(f"SQLite store {self._path!r}", "it was closed; open a new one")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            empty = self._empty if self._inside == 0 else None
        if empty is not None:
            answer([empty])

    def close(self, empty: Watcher) -> bool:
        """Let nobody in any more, and tell `empty` when nobody is inside. False when it was closed before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._empty = empty
            told = [*self.watchers, empty] if self._inside == 0 else [*self.watchers]
        answer(told)
        return True


_gates: Final[weakref.WeakSet[Gate]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for gate in list(_gates):
        gate.start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
