"""Threads that cannot be started, as under `ulimit -u` or `pids.max`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest


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
            if not thread.name.startswith(("perdure", "asyncio", "none", "few", "ending")):
                real(thread)
                return
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
