"""The threads in which the stores of one namespace do their work, and how the changes of one run share a frame.

The changes of one run are made one after the other: while a frame is being synced, those that arrive meanwhile are gathered into
the next frame. Changes of different runs, and reads, go in parallel. The threads are shared by all stores of this process on one
directory and namespace, and a forked child starts its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Generic, TypeVar

from perdure.aio.threads import ThreadPool
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.files.disk import map_error
from perdure.backends.files.namespace import FilesNamespace, LockedRun
from perdure.errors import PersistenceError

T = TypeVar("T")

THREADS: Final = 16
MAX_BATCH: Final = 1000


class RunChange(Generic[T]):
    """A change of one run that waits for its frame.

    `create`: the run need not exist. `wakes`: afterwards a run may be due or ended, so watchers are woken.
    """

    __slots__ = ("create", "future", "verb", "wakes")

    def __init__(self, verb: Callable[[LockedRun], T], *, create: bool, wakes: bool) -> None:
        self.verb = verb
        self.create = create
        self.wakes = wakes
        self.future: Future[T] = Future()


class FilesThreads:
    """The threads of one namespace. `on_wake` is called in one of them whenever a run may be due or ended."""

    def __init__(self, namespace: FilesNamespace, on_wake: Callable[[], None]) -> None:
        self._namespace = namespace
        self._on_wake = on_wake
        self.start_over()

    def start_over(self) -> None:
        """In a forked child: there are no threads, and no change is under way."""
        # Guards the changes that wait and the pool; no file is touched while it is held.
        self._lock = threading.Lock()
        # By run, only while a thread makes changes of it: those that go into its next frame.
        self._waiting: dict[str, deque[RunChange[Any]]] = {}
        self._pool: ThreadPool | None = None

    def submit(self, work: Callable[[], T], *, wakes: bool = False) -> Future[T]:
        """Run this in a thread, by itself. Raises `PersistenceError`, and does not run it, without a thread."""
        return self._get_pool().submit(partial(self._run, work, wakes=wakes))

    def change(self, run_id: str, change: RunChange[T]) -> Future[T]:
        """Make this change in the next frame of the run. Without a thread it fails with `PersistenceError`."""
        with self._lock:
            waiting = self._waiting.get(run_id)
            if waiting is not None:
                waiting.append(change)
                return change.future
            self._waiting[run_id] = deque([change])
        try:
            self._get_pool().submit(partial(self._write_frames, run_id))
        except Exception as failure:  # noqa: BLE001 - no thread, or the process ends: whatever waits for this one gets it
            with self._lock:
                changes = self._waiting.pop(run_id)
            for one in changes:
                if one.future.set_running_or_notify_cancel():
                    one.future.set_exception(type(failure)(*failure.args))  # each caller adds its own traceback
        return change.future

    def stop(self) -> Future[None] | None:
        """End the threads. The future is done when they have ended; None if there are none."""
        with self._lock:
            pool, self._pool = self._pool, None
        return None if pool is None else pool.close()

    def _get_pool(self) -> ThreadPool:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPool("perdure-files", THREADS)
            return self._pool

    def _run(self, work: Callable[[], T], *, wakes: bool) -> T:
        try:
            value = self._namespace.guard(work)
        except OSError as error:
            raise map_error(error, self._namespace.root) from error
        if wakes:
            self._wake()
        return value

    def _write_frames(self, run_id: str) -> None:
        """Write frames of the run until no change waits."""
        while True:
            with self._lock:
                waiting = self._waiting[run_id]
                changes = [waiting.popleft() for _ in range(min(len(waiting), MAX_BATCH))]
                if not changes:
                    del self._waiting[run_id]
                    return
            self._make_changes(run_id, [change for change in changes if change.future.set_running_or_notify_cancel()])

    def _make_changes(self, run_id: str, changes: list[RunChange[Any]]) -> None:
        if not changes:
            return
        verbs = [change.verb for change in changes]
        create = any(change.create for change in changes)
        try:
            outcomes = self._namespace.guard(lambda: self._namespace.change(run_id, verbs, create=create))
            if any(change.wakes and outcome.error is None for change, outcome in zip(changes, outcomes, strict=True)):
                self._wake()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers get it and the next frame is written
            self._fail(run_id, changes, error)
            return
        for change, outcome in zip(changes, outcomes, strict=True):
            if outcome.error is None:
                change.future.set_result(outcome.value)
            else:
                change.future.set_exception(outcome.error)

    def _fail(self, run_id: str, changes: list[RunChange[Any]], error: BaseException) -> None:
        """Fail only the change that caused the error: each is made once more by itself."""
        if len(changes) == 1 or isinstance(error, OSError | PersistenceError):
            for change in changes:  # an error for each, as each caller adds its own traceback
                one = PersistenceError(*error.args) if isinstance(error, PersistenceError) else error
                change.future.set_exception(map_error(one, self._namespace.root))
            return
        for change in changes:
            self._make_changes(run_id, [change])

    def _wake(self) -> None:
        self._namespace.wake()
        self._on_wake()


class SharedNamespace:
    """A namespace with its threads, and the lifecycles of the stores that use it."""

    def __init__(self, root: str, prefix: str) -> None:
        self.namespace = FilesNamespace(root, prefix)
        self.lifecycles: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
        self.users = 0
        # Weakly: the threads must not keep this alive when its last store was dropped.
        this = weakref.ref(self)
        self.threads = FilesThreads(self.namespace, lambda: _wake_watchers(this()))

    def start_over(self) -> None:
        """In a forked child: nothing is under way."""
        self.namespace.start_over()
        self.threads.start_over()


def _wake_watchers(shared: SharedNamespace | None) -> None:
    if shared is not None:
        for lifecycle in list(shared.lifecycles):
            lifecycle.wake()


_shared: Final[weakref.WeakValueDictionary[tuple[str, str], SharedNamespace]] = weakref.WeakValueDictionary()
# Guards the table and `users`; held over a fork.
_lock: Final = threading.Lock()


def join_namespace(root: str, prefix: str, lifecycle: Lifecycle) -> SharedNamespace:
    """The namespace in this directory, with one user more."""
    with _lock:
        shared = _shared.get((root, prefix))
        if shared is None:
            shared = _shared[root, prefix] = SharedNamespace(root, prefix)
        shared.users += 1
        shared.lifecycles.add(lifecycle)
        return shared


def leave_namespace(shared: SharedNamespace, lifecycle: Lifecycle) -> bool:
    """One user less. True for the last one, which must then stop the threads."""
    with _lock:
        shared.users -= 1
        shared.lifecycles.discard(lifecycle)
        if shared.users:
            return False
        _shared.pop((shared.namespace.root, shared.namespace.prefix), None)
        return True


def _after_fork_in_child() -> None:
    for shared in list(_shared.values()):
        shared.start_over()
    _lock.release()  # the forking thread took it, and that thread is this one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire,
        after_in_parent=_lock.release,
        after_in_child=_after_fork_in_child,
    )
