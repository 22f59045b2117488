"""A forked child finds the locks of what is in memory free, and what they guard whole."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from perdure.backends.memory.store import MemoryStore
from perdure.caches import MemoryCache
from perdure.kv.memory import MemoryKeyValueStore
from tests.patience import PATIENCE

STORE, CACHE, VALUES = MemoryStore(), MemoryCache(), MemoryKeyValueStore()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("lock", "use"),
    [
        (STORE._database.lock, lambda: STORE.get("run")),
        (CACHE._lock, lambda: CACHE.get("key")),
        (VALUES._lock, lambda: VALUES.get("key")),
    ],
    ids=["memory store", "memory cache", "memory values"],
)
def test_a_child_inherits_no_lock_that_another_thread_holds(
    lock: threading.Lock, use: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    is_held = threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            time.sleep(0.1)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        asyncio.run(use())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    holder.join()
    assert not lock.locked()
