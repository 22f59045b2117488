"""The threads in which a store does its work, and how changes of one run share a frame.

Changes of one run stand in one lane: while one is being synced, those that arrive meanwhile are gathered into the next frame.
Lanes of different runs, and reads, go side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Final, Generic, TypeVar

from perdure.backends.files.disk import map_error
from perdure.backends.files.place import LockedRun, Place
from perdure.errors import PersistenceError

T = TypeVar("T")

THREADS: Final = 16
MAX_BATCH: Final = 1000


class Change(Generic[T]):
    """A change of one run on its way. `create`: the run need not be there yet. `wakes`: something may be due or ended then."""

    __slots__ = ("create", "future", "verb", "wakes")

    def __init__(self, verb: Callable[[LockedRun], T], *, create: bool, wakes: bool) -> None:
        self.verb = verb
        self.create = create
        self.wakes = wakes
        self.future: Future[T] = Future()


class Lanes:
    """The threads of one place. `on_wake` is called in one of them whenever something may be due or ended."""

    def __init__(self, place: Place, on_wake: Callable[[], None]) -> None:
        self._place = place
        self._on_wake = on_wake
        self.start_over()

    def start_over(self) -> None:
        """In a forked child: there are no threads, and nothing is under way."""
        self._lock = Lock()
        self._waiting: dict[str, deque[Change[Any]]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], T], *, wakes: bool = False) -> Future[T]:
        """Have this done by a thread, by itself."""
        return self._threads().submit(self._do, work, wakes=wakes)

    def change(self, run_id: str, change: Change[T]) -> Future[T]:
        """Have this done when the run's lane comes to it."""
        with self._lock:
            lane = self._waiting.get(run_id)
            if lane is not None:
                lane.append(change)
                return change.future
            self._waiting[run_id] = deque([change])
        self._threads().submit(self._serve, run_id)
        return change.future

    def stop(self) -> None:
        """Wait for the threads to end."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="perdure-files")
            return self._pool

    def _do(self, work: Callable[[], T], *, wakes: bool) -> T:
        try:
            value = self._place.guarded(work)
        except OSError as error:
            raise map_error(error, self._place.root) from error
        if wakes:
            self._wake()
        return value

    def _serve(self, run_id: str) -> None:
        while True:
            with self._lock:
                lane = self._waiting[run_id]
                changes = [lane.popleft() for _ in range(min(len(lane), MAX_BATCH))]
                if not changes:
                    del self._waiting[run_id]
                    return
            self._make(run_id, [change for change in changes if change.future.set_running_or_notify_cancel()])

    def _make(self, run_id: str, changes: list[Change[Any]]) -> None:
        if not changes:
            return
        verbs = [change.verb for change in changes]
        create = any(change.create for change in changes)
        try:
            outcomes = self._place.guarded(lambda: self._place.change(run_id, verbs, create=create))
            if any(change.wakes and outcome.error is None for change, outcome in zip(changes, outcomes, strict=True)):
                self._wake()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers hear of it and the lane goes on
            self._fail(run_id, changes, error)
            return
        for change, outcome in zip(changes, outcomes, strict=True):
            if outcome.error is None:
                change.future.set_result(outcome.value)
            else:
                change.future.set_exception(outcome.error)

    def _fail(self, run_id: str, changes: list[Change[Any]], error: BaseException) -> None:
        """Only the culprit fails: the others are made again, each by itself."""
        if len(changes) == 1 or isinstance(error, OSError | PersistenceError):
            for change in changes:  # an error for each, as each caller adds its own traceback
                one = PersistenceError(*error.args) if isinstance(error, PersistenceError) else error
                change.future.set_exception(map_error(one, self._place.root))
            return
        for change in changes:
            self._make(run_id, [change])

    def _wake(self) -> None:
        self._place.wake()
        self._on_wake()
