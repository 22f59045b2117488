"""`RestartingExecutor`: a pool of processes that survives the loss of one of them.

A `ProcessPoolExecutor` whose child was killed is broken for good: it fails the calls that it had, and refuses all others. In a
worker that runs for months, steps with that executor would fail until the worker is restarted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class RestartingExecutor(Executor):
    """An executor that is made anew after it broke: `RestartingExecutor(lambda: ProcessPoolExecutor(4))`.

    The calls that broke it, or were in it, fail with `BrokenExecutor`, so a step with `retry=` is tried again in the new one.
    """

    def __init__(self, make: Callable[[], Executor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        # Made for the first call, and None again after `shutdown`.
        self._executor: Executor | None = None
        self._is_shut_down = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._executor is None:
                self._executor = self._make()
            try:
                return self._executor.submit(fn, *args, **kwargs)
            except BrokenExecutor:
                self._executor.shutdown(wait=False)
                self._executor = self._make()
                return self._executor.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as in Executor
        with self._lock:
            self._is_shut_down = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait, cancel_futures=cancel_futures)
