"""Text by key in this process's memory, held to the same rules as every other key-value store.

So a program meets what not every store can hold before it moves, and what has expired takes no room.
"""

from __future__ import annotations

import heapq
import threading
from typing import NamedTuple

from perdure.kv.limits import checked_key, encoded, lifetime
from perdure.kv.protocol import fits
from perdure.model.clock import Clock, SystemClock
from perdure.model.durations import Duration


class _Kept(NamedTuple):
    value: str
    expires_at: int | None


class MemoryKeyValueStore:
    """A `KeyValueStore` that lives as long as this object. Event loops of several threads may share it."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        # Guards the two below.
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        # A heap of what expires when. A text that was replaced or deleted stays in it, with an instant that is not its own.
        self._expiring: list[tuple[int, str]] = []

    async def get(self, key: str) -> str | None:
        with self._lock:
            kept = self._live().get(checked_key(key))
        return None if kept is None else kept.value

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        encoded(checked_key(key), value)
        length = lifetime(ttl)
        expires_at = None if length is None else self._clock.now() + length
        with self._lock:
            self._live()[key] = _Kept(value, expires_at)
            self._note_expiry(key, expires_at)

    async def delete(self, key: str) -> bool:
        with self._lock:
            return self._live().pop(checked_key(key), None) is not None

    async def exists(self, key: str) -> bool:
        with self._lock:
            return checked_key(key) in self._live()

    async def keys(self, pattern: str) -> list[str]:
        with self._lock:
            return [key for key in self._live() if fits(key, pattern)]

    def _note_expiry(self, key: str, expires_at: int | None) -> None:
        if expires_at is not None:
            heapq.heappush(self._expiring, (expires_at, key))
        if len(self._expiring) > 2 * len(self._kept):  # most of it is out of date
            self._expiring = [(kept.expires_at, key) for key, kept in self._kept.items() if kept.expires_at is not None]
            heapq.heapify(self._expiring)

    def _live(self) -> dict[str, _Kept]:
        """What is kept, once what has expired is forgotten."""
        now = self._clock.now()
        while self._expiring and self._expiring[0][0] <= now:
            expires_at, key = heapq.heappop(self._expiring)
            kept = self._kept.get(key)
            if kept is not None and kept.expires_at == expires_at:
                del self._kept[key]
        return self._kept
