"""Threads that cannot be started, as under `ulimit -u` or `pids.max`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from perdure.aio import loop_thread, threads
from perdure.aio.loop_thread import LoopThread
from perdure.aio.threads import ThreadPool
from perdure.backends.key_value.connections import KeyValueConnections
from perdure.engine import heartbeat

# Threads that tests start for themselves have other names.
PREFIXES: Final = ("perdure-", "asyncio_")


class FailingStarts:
    """Counts the starts of threads that perdure makes, and lets those fail that `fails` names by their number, from 1 on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried = 0
        self.failed = 0
        self.fails: Callable[[int], bool] = lambda _: False
        self._reason = "can't start new thread"
        # Several threads may start others at the same time.
        self._lock = threading.Lock()
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name.startswith(PREFIXES):
                with self._lock:
                    self.tried += 1
                    must_fail = self.fails(self.tried)
                    self.failed += must_fail
                if must_fail:
                    raise RuntimeError(self._reason)
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)

    def fail_all(self, reason: str = "can't start new thread") -> None:
        self._reason = reason
        self.fails = lambda _: True

    def fail_none(self) -> None:
        self.fails = lambda _: False


@contextmanager
def unstarted_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process where perdure has not started any thread: those that all stores and runs share are others meanwhile."""
    with monkeypatch.context() as patch:
        pools = [ThreadPool("perdure-step", 100), ThreadPool("perdure-io", 32)]
        loops = [LoopThread(name) for name in ("perdure-heartbeat", "perdure-sync", "perdure-key-value")]
        patch.setattr(threads, "_file_threads", pools[1])
        patch.setattr(heartbeat, "_thread", loops[0])
        patch.setattr(loop_thread, "_thread", loops[1])
        patch.setattr(KeyValueConnections, "THREAD", loops[2])
        yield
    for pool in pools:
        pool.close()
    for loop in loops:
        loop_thread._loop_threads.remove(loop)
        if loop._loop is not None and loop._thread is not None:
            loop.submit(cancel_all_tasks()).result(10)
            loop._loop.call_soon_threadsafe(loop._loop.stop)
            loop._thread.join(10)
            loop._loop.close()


async def cancel_all_tasks() -> None:
    """Cancel the tasks of this loop, which is about to be closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
