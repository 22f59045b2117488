"""Text by key in this process's memory, with the same rules as every other key-value store.

A key or value that a server's store would refuse is refused here too, so a program finds out before it moves. Expired texts are
removed from memory.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from perdure.aio.fork_locks import new_fork_lock
from perdure.errors import StoreClosed
from perdure.kv.limits import check_key, encode_value, lifetime
from perdure.kv.patterns import literal_prefix, matches
from perdure.model.clock import Clock, SystemClock
from perdure.model.durations import Duration


class _StoredText(NamedTuple):
    value: str
    expires_at: int | None


class MemoryKeyValueStore:
    """A `KeyValueStore` that lives until it is closed, or as long as this object. Event loops of several threads may share it."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        # Guards the three below.
        self._lock = new_fork_lock()
        self._texts: dict[str, _StoredText] = {}
        # A heap of (expires_at, key). The pair of a replaced or deleted text stays in it, and is skipped when it comes due.
        self._expiring: list[tuple[int, str]] = []
        self._is_closed = False

    async def get(self, key: str) -> str | None:
        with self._lock:
            kept = self._live().get(check_key(key))
        return None if kept is None else kept.value

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        name, length = check_key(key), lifetime(ttl)
        encode_value(name, value)
        expires_at = None if length is None else self._clock.now() + length
        with self._lock:
            self._live()[name] = _StoredText(value, expires_at)
            self._note_expiry(name, expires_at)

    async def delete(self, key: str) -> bool:
        with self._lock:
            return self._live().pop(check_key(key), None) is not None

    async def exists(self, key: str) -> bool:
        with self._lock:
            return check_key(key) in self._live()

    async def keys(self, pattern: str) -> list[str]:
        if literal_prefix(pattern) is None:
            return []
        with self._lock:
            return [key for key in self._live() if matches(key, pattern)]

    async def close(self) -> None:
        """Forget all texts, and take no more calls."""
        with self._lock:
            self._is_closed = True
            self._texts, self._expiring = {}, []

    def _note_expiry(self, key: str, expires_at: int | None) -> None:
        if expires_at is not None:
            heapq.heappush(self._expiring, (expires_at, key))
        if len(self._expiring) > 2 * len(self._texts):  # most pairs are stale
            self._expiring = [(kept.expires_at, key) for key, kept in self._texts.items() if kept.expires_at is not None]
            heapq.heapify(self._expiring)

    def _live(self) -> dict[str, _StoredText]:
        """Return the texts, after removing those that have expired. Raises `StoreClosed`."""
        if self._is_closed:
            raise StoreClosed("the key-value store in memory")
        now = self._clock.now()
        while self._expiring and self._expiring[0][0] <= now:
            expires_at, key = heapq.heappop(self._expiring)
            kept = self._texts.get(key)
            if kept is not None and kept.expires_at == expires_at:
                del self._texts[key]
        return self._texts
