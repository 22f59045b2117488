"""Threads for calls that block: plain step functions, and what stores do with files.

`concurrent.futures.ThreadPoolExecutor` is not used for these. Its `submit` queues a call before it starts a thread, so a call
whose `submit` raised is executed all the same, later and by another thread. In a forked child it waits for threads that only the
parent has. And at exit the interpreter joins its threads, so a process stays until the last blocking call has returned.

A `ThreadPool` starts or finds a thread before it queues a call, and a call that is cancelled before a thread has taken it is
never executed. A forked child begins without threads and without calls. The threads are daemon threads: the interpreter does not
join them at exit, and a call that is under way then is cut off.

A step that blocks until another run has ended keeps its thread. When all threads of a pool do that, no plain step can be called
until one of them returns, and the runs that they wait for may need one: `count_blocked` says so in a warning.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import logging
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from perdure.errors import PersistenceError

P = ParamSpec("P")
T = TypeVar("T")

log: Final = logging.getLogger("perdure")

# How soon a call that waits tries again to start a thread, in seconds: at first, and at most. Doubled with each failure.
RETRY_SECONDS: Final = (0.05, 2.0)
# How often a pool says that it gets no more threads, at most.
WARN_EVERY_SECONDS: Final = 60.0
# How many steps that block the threads are named in a warning.
MAX_NAMED_BLOCKED: Final = 5
STEP_THREADS: Final = 100
FILE_THREADS: Final = 32


class ThreadsClosed(Exception):
    """The pool takes no more calls, because it was closed or the process ends. The call was not executed."""


def start_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """A daemon thread that runs `target`. Raises `PersistenceError` when none can be started."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as reason:
        hint = "look at the limits of processes and memory (ulimit -u, pids.max)"
        raise PersistenceError(f"thread {name!r}", f"it could not be started: {reason}; {hint}") from reason
    return thread


# In a thread of a pool: `threads`, the pool's _PoolThreads.
_here: Final = threading.local()


class _Call(NamedTuple):
    """A function on its way to a thread, and what becomes of it. Cancelled before it is running, it is not called."""

    future: Future[Any]
    work: Callable[[], Any]


class _PoolThreads:
    """The threads of a pool. They refer to this and not to the pool, so that a pool that is dropped can end them."""

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        # Calls for the next free thread; None ends the threads. It can be used where no lock may be taken: in `__del__`.
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Guards everything below; held while a thread is started.
        self.lock = threading.Lock()
        self.count = 0
        # Threads that are free, less the calls in the queue.
        self.spare = 0
        self.is_closed = False
        self.ended: Future[None] = Future()
        # What blocks in a thread until another run has ended, by the number of the thread; and whether the warning was given.
        self.blocked: dict[int, str] = {}
        self._has_warned_of_blocked = False
        self._name = name
        self._numbers = itertools.count(1)
        self._warned_at: float | None = None

    def grow(self) -> PersistenceError | None:
        """Start one more thread if a call would wait for one otherwise; the reason if that failed. The caller holds the lock."""
        if self.spare > 0 or self.count >= self.limit:
            return None
        self._count_thread(1)  # before the start, which a KeyboardInterrupt may leave after the thread has begun
        try:
            start_thread(f"{self._name}-{next(self._numbers)}", _work, self)
        except PersistenceError as failure:
            self._count_thread(-1)
            if "interpreter shutdown" in str(failure):  # the error of starting a thread at that time, from Python 3.12 on
                raise ThreadsClosed(str(failure)) from failure
            return failure
        return None

    def _count_thread(self, change: int) -> None:
        self.count += change
        self.spare += change

    def warn(self, failure: PersistenceError) -> None:
        """Log that calls wait, once in a while."""
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at >= WARN_EVERY_SECONDS:
            self._warned_at = now
            log.warning("calls wait for one of %d %s threads: %s", self.count, self._name, failure)

    def block(self, what: str) -> None:
        with self.lock:
            self.blocked[threading.get_ident()] = what

    def unblock(self) -> None:
        with self.lock:
            del self.blocked[threading.get_ident()]
            self._has_warned_of_blocked = False

    def warn_if_all_blocked(self) -> None:
        """Warn, once until one of them is free again, if all threads are blocked and no more can be started."""
        with self.lock:
            is_stuck = len(self.blocked) >= self.count and (self.count >= self.limit or self.spare < 0)
            if not is_stuck or self._has_warned_of_blocked:
                return
            self._has_warned_of_blocked = True
            blocked = sorted(self.blocked.values())
        log.warning(
            "all %d %s threads block in run_sync or runtime.sync until other runs have ended (%s): until one of them returns, no "
            "plain step can be called here, nor for those runs; await runtime.run(...) in async steps, or raise concurrency=",
            len(blocked),
            self._name,
            ", ".join(blocked[:MAX_NAMED_BLOCKED]) + (", ..." if len(blocked) > MAX_NAMED_BLOCKED else ""),
        )

    def set_free(self) -> None:
        with self.lock:
            self.spare += 1

    def leave(self) -> None:
        with self.lock:
            self._count_thread(-1)
            is_over = self.is_closed and self.count == 0
        if is_over:
            self.ended.set_result(None)


def _work(threads: _PoolThreads) -> None:
    """What a thread does: one call after the other. It counts as free before the caller of the last one can know the result."""
    _here.threads = threads
    while (call := threads.calls.get()) is not None:
        future, work = call
        if not future.set_running_or_notify_cancel():
            threads.set_free()
        else:
            try:
                value = work()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it and the thread lives on
                threads.set_free()
                future.set_exception(error)
            else:
                threads.set_free()
                future.set_result(value)
                del value
        del call, future, work  # an idle thread must not keep the last result alive
    threads.calls.put(None)  # for the next thread
    threads.leave()


class ThreadPool:
    """Up to `limit` daemon threads, each started when a call finds none free, and kept until the pool is closed or dropped."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._threads = _PoolThreads(name, limit)
        _pools.add(self)

    def __del__(self) -> None:
        self._threads.calls.put(None)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Call this in a thread. Raises `PersistenceError`, and has not called it, if there is no thread and none can be started.

        Called on an event loop. If a thread could not be started but others run, the call waits for one of these.
        """
        return self._submit(work, needs_thread=True)

    def submit_patiently(self, work: Callable[[], T]) -> Future[T]:
        """As `submit`, but without a thread the call waits until one can be started."""
        return self._submit(work, needs_thread=False)

    def _submit(self, work: Callable[[], T], *, needs_thread: bool) -> Future[T]:
        future: Future[T] = Future()
        threads = self._threads
        with threads.lock:
            if threads.is_closed:
                raise ThreadsClosed(f"the threads {self._name!r} were closed")
            failure = threads.grow()
            if failure is not None and needs_thread and not threads.count:
                raise failure
            threads.spare -= 1
            threads.calls.put(_Call(future, work))
        if failure is not None:
            threads.warn(failure)
            self._grow_later(threads, future, RETRY_SECONDS[0])
        return future

    def _grow_later(self, threads: _PoolThreads, future: Future[Any], pause: float) -> None:
        """Try again to start a thread while this call waits: those that run may be busy for hours, or wait for this call."""
        spread = pause * (0.5 + random.random())  # noqa: S311 - to spread out, not to hide
        asyncio.get_running_loop().call_later(spread, self._grow, threads, future, min(pause * 2, RETRY_SECONDS[1]))

    def _grow(self, threads: _PoolThreads, future: Future[Any], pause: float) -> None:
        if future.running() or future.done():
            return
        try:
            with threads.lock:
                failure = None if threads.is_closed or threads.spare >= 0 else threads.grow()
        except ThreadsClosed:
            self.close()
            return
        if failure is not None:
            self._grow_later(threads, future, pause)

    def close(self) -> Future[None]:
        """Take no more calls; those that wait fail with `ThreadsClosed`. The future is done when the threads have ended."""
        threads = self._threads
        with threads.lock:
            is_first, threads.is_closed = not threads.is_closed, True
            waiting = _take_all(threads.calls)
            is_over = is_first and threads.count == 0
        threads.calls.put(None)
        for call in waiting:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(ThreadsClosed(f"the threads {self._name!r} were closed"))
        if is_over:
            threads.ended.set_result(None)
        return threads.ended

    def start_over(self) -> None:
        """In a forked child: the threads, and the calls that wait for them, are the parent's."""
        was_closed = self._threads.is_closed
        self._threads = _PoolThreads(self._name, self._limit)
        if was_closed:
            self.close()


def _take_all(calls: queue.SimpleQueue[_Call | None]) -> list[_Call]:
    taken: list[_Call] = []
    while True:
        try:
            call = calls.get_nowait()
        except queue.Empty:
            return taken
        if call is not None:
            taken.append(call)


_pools: Final[weakref.WeakSet[ThreadPool]] = weakref.WeakSet()

# For plain step functions outside a Runtime.
step_threads: Final = ThreadPool("perdure-step", STEP_THREADS)
_file_threads: Final = ThreadPool("perdure-io", FILE_THREADS)


async def run_in_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What this short blocking call gives: `asyncio.to_thread` with threads of this module.

    Raises `PersistenceError`, and has not called it, when no thread can be started.
    """
    in_context = functools.partial(contextvars.copy_context().run, work, *args, **kwargs)
    return await asyncio.wrap_future(_file_threads.submit(in_context))


@contextmanager
def count_blocked(what: str) -> Iterator[Callable[[], None]]:
    """Count this thread as blocked by `what`, if it is one of a pool; the function that is yielded warns if now all are."""
    threads: _PoolThreads | None = getattr(_here, "threads", None)
    if threads is None:
        yield lambda: None
        return
    threads.block(what)
    try:
        yield threads.warn_if_all_blocked
    finally:
        threads.unblock()


def _start_over_in_child() -> None:
    for pool in list(_pools):
        pool.start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over_in_child)
