"""Who watches for changes, and the one subscription that wakes them.

Every script after which something may be due or ended publishes to the namespace's channel. The first watch subscribes, and
returns once that is so, since what was published meanwhile was not heard. While there is no subscription a watch is short, so
that whoever watches looks for himself.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from perdure.backends.base.lifecycle import Watcher
from perdure.backends.redis.client_loop import leave_to_parent
from perdure.backends.redis.lane import Batcher

# Without a subscription nobody sleeps longer than this.
_POLL: Final = 1.0
_LISTEN: Final = 5.0


class Changes:
    """The watchers of one store. Any thread may watch."""

    def __init__(self, lane: Batcher, channel: str) -> None:
        self._lane = lane
        self._channel = channel
        self._start_over()

    def _start_over(self) -> None:
        """Also in a forked child."""
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards everything below; nobody waits and nothing is called back under it
        self._watchers: set[Watcher] = set()
        self._listener: Future[None] | None = None
        self._subscribed = False
        self._closed = False

    async def watch(self, timeout: float) -> None:
        """Return when something was published since the call, and at the latest after `timeout` seconds."""
        if self._pid != os.getpid():
            leave_to_parent(self._listener)
            self._start_over()
        watcher = Watcher()
        with self._lock:
            if self._closed:
                return
            self._watchers.add(watcher)
            longest = timeout if self._subscribed else min(timeout, _POLL)
            if self._listener is None:
                self._listener = self._lane.submit(self._listen())
        try:
            await asyncio.wait([watcher.future], timeout=max(0.0, longest))
        finally:
            with self._lock:
                self._watchers.discard(watcher)

    def close(self) -> None:
        """End all watches, and the subscription."""
        if self._pid != os.getpid():
            leave_to_parent(self._listener)
            self._start_over()
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
        self._wake()
        if listener is not None:
            listener.cancel()

    def _wake(self, *, subscribed: bool | None = None) -> None:
        with self._lock:
            if subscribed is not None:
                self._subscribed = subscribed
            watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            watcher.wake()

    async def _listen(self) -> None:
        """Hear what is published, for as long as the store is open. Runs on the home loop."""
        while True:
            try:
                subscription = self._lane.client.pubsub()  # not every cluster's client has it
                try:
                    await subscription.subscribe(self._channel)
                    await self._hear(subscription)
                finally:
                    with suppress(Exception):
                        await subscription.aclose()
            except Exception:  # noqa: BLE001 - whatever it is, verbs will say it; here it means to poll, and to try again
                self._wake(subscribed=False)
            await asyncio.sleep(_POLL)

    async def _hear(self, subscription: Any) -> None:
        while True:
            if await subscription.get_message(timeout=_LISTEN) is not None:
                self._wake(subscribed=True)
