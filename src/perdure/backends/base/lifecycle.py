"""The lifecycle of a store: which verbs are in flight, who watches for changes, and that a closed store takes no more verbs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from perdure.errors import StoreClosed

T = TypeVar("T")


class Watcher:
    """A wait on an event loop that any thread can end."""

    __slots__ = ("_loop", "future", "wants_items")

    def __init__(self, *, wants_items: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        # Whether new items of a stream wake it too.
        self.wants_items = wants_items
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """End the wait."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits there any more
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Lifecycle:
    """Counts the verbs of one store that are in flight: until each has ended, not only until its caller has left.

    A forked child starts with none in flight and no watchers; a store that was closed stays closed there.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._closed = False
        self._start_over()
        _lifecycles.add(self)

    def _start_over(self) -> None:
        # Guards everything here. Nothing waits while holding it.
        self._lock = threading.Lock()
        self._inside = 0
        self._empty: Future[None] = Future()
        self._watchers: set[Watcher] = set()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more verbs."""
        return self._closed

    def enter(self) -> None:
        """Count one more. Raises `StoreClosed` when the store was closed."""
        with self._lock:
            self._check()
            self._inside += 1

    def leave(self, _: object = None) -> None:
        """Count one less. Any thread may call this."""
        with self._lock:
            self._inside -= 1
            is_empty = self._closed and self._inside == 0
        if is_empty:
            self._empty.set_result(None)

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def hand_over(self, put: Callable[[T], None], message: T) -> None:
        """Call `put(message)`, which must not block, before a `close` can begin. Raises `PersistenceError` after one."""
        with self._lock:
            if self._closed:
                self._check()
            put(message)

    def watch(self, *, items: bool = False) -> Watcher:
        """A watcher that `wake` and `close` wake. Raises `StoreClosed` when the store was closed."""
        watcher = Watcher(wants_items=items)
        with self._lock:
            self._check()
            self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Forget this watcher."""
        with self._lock:
            self._watchers.discard(watcher)

    def wake(self, *, only_items: bool = False) -> None:
        """Wake all watchers; with `only_items` those that want to know of new items."""
        with self._lock:
            watchers = {watcher for watcher in self._watchers if watcher.wants_items} if only_items else self._watchers
            self._watchers = self._watchers - watchers
        for watcher in watchers:
            watcher.wake()

    def close(self) -> Future[None] | None:
        """Take no more verbs; the future is done when none is in flight. None when it was closed before."""
        with self._lock:
            if self._closed:
                return None
            self._closed = True
            is_empty = self._inside == 0
        self.wake()
        if is_empty:
            self._empty.set_result(None)
        return self._empty

    def _check(self) -> None:
        if self._closed:
            raise StoreClosed(self._label)


_lifecycles: Final[weakref.WeakSet[Lifecycle]] = weakref.WeakSet()


def _start_over_in_child() -> None:
    # In the child the locks may be held by threads that it does not have.
    for lifecycle in list(_lifecycles):
        lifecycle._start_over()  # noqa: SLF001 - of the same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over_in_child)
