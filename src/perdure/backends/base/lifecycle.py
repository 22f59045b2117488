"""The lifecycle of a store: what is under way, who watches for changes, and that nobody comes in once it was closed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future

from perdure.errors import PersistenceError


class Watcher:
    """Somebody who waits on an event loop, and is woken from any thread."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """End the wait."""
        with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Lifecycle:
    """Counts what one store has under way, until that is done and not only until its caller has gone.

    In a forked child nothing is under way and nobody watches; what was closed is closed.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._closed = False
        self._start_over()

    def _start_over(self) -> None:
        self._process = os.getpid()
        # Guards everything here; nobody waits and nothing is called back under it.
        self._lock = threading.Lock()
        self._inside = 0
        self._empty: Future[None] = Future()
        self._watchers: set[Watcher] = set()

    def _be_in_this_process(self) -> None:
        if self._process != os.getpid():
            self._start_over()

    @property
    def is_closed(self) -> bool:
        """Whether nobody comes in any more."""
        return self._closed

    def enter(self) -> None:
        """One more. Raises `PersistenceError` when the store was closed."""
        self._be_in_this_process()
        with self._lock:
            self._check()
            self._inside += 1

    def leave(self, _: object = None) -> None:
        """One less. Any thread may say so."""
        with self._lock:
            self._inside -= 1
            is_empty = self._closed and self._inside == 0
        if is_empty:
            self._empty.set_result(None)

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def watch(self) -> Watcher:
        """Somebody who is woken by `wake`, and when the store is closed. Raises `PersistenceError` when it was."""
        self._be_in_this_process()
        watcher = Watcher()
        with self._lock:
            self._check()
            self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Wake it no more."""
        with self._lock:
            self._watchers.discard(watcher)

    def wake(self) -> None:
        """Wake everybody who watches."""
        self._be_in_this_process()
        with self._lock:
            watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            watcher.wake()

    def close(self) -> Future[None] | None:
        """Let nobody in any more; the future is done when nothing is under way. None when it was closed before."""
        self._be_in_this_process()
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
            raise PersistenceError(self._label, "it was closed; open a new one")
