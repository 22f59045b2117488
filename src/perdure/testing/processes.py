"""Real processes for cases that need several: they share nothing with the test, and can be killed.

A process is forked from a server that has imported what `multiprocessing.set_forkserver_preload` names and nothing of the test:
it starts within milliseconds. Where the platform has no such server, every process starts from nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

_METHOD: Final = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def process_pool(number: int) -> ProcessPoolExecutor:
    """An executor with this many processes."""
    return ProcessPoolExecutor(number, mp_context=multiprocessing.get_context(_METHOD))


async def call_in_processes(*calls: Callable[[], T]) -> list[T]:
    """What each call returns, each in a process of its own and all at once. The calls are pickled.

    Raises `BrokenProcessPool` when a process dies.
    """

    def call_all() -> list[T]:
        with process_pool(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    return await asyncio.to_thread(call_all)


def kill_this_process() -> None:
    """Die without any clean-up, as by a crash."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
