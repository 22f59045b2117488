"""How many more runs the queue limits let in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from perdure.model.records import QueueLimits


class Room:
    """Counts leased runs against the limits of their queues and limit keys."""

    def __init__(self, limits: Mapping[str, QueueLimits], leased: Iterable[tuple[str, str | None, int]]) -> None:
        self._limits = limits
        self._in_queue: Counter[str] = Counter()
        self._under_key: Counter[tuple[str, str | None]] = Counter()
        for queue, limit_key, number in leased:
            self._count(queue, limit_key, number)

    def queue_is_open(self, queue: str) -> bool:
        """Whether the queue takes one more."""
        limit = self._limits.get(queue, QueueLimits()).concurrency
        return limit is None or self._in_queue[queue] < limit

    def full_keys(self, queue: str) -> list[str]:
        """The limit keys of this queue that take no more."""
        limit = self._limits.get(queue, QueueLimits()).key_concurrency
        if limit is None:
            return []
        return sorted(key for (of, key), number in self._under_key.items() if of == queue and key is not None and number >= limit)

    def take(self, queue: str, limit_key: str | None) -> bool:
        """Count one more run in, unless that would be too many."""
        limit = self._limits.get(queue, QueueLimits()).key_concurrency
        is_full = limit is not None and limit_key is not None and self._under_key[queue, limit_key] >= limit
        if is_full or not self.queue_is_open(queue):
            return False
        self._count(queue, limit_key, 1)
        return True

    def give_back(self, queue: str, limit_key: str | None) -> None:
        """Count one less: somebody else had the run."""
        self._count(queue, limit_key, -1)

    def _count(self, queue: str, limit_key: str | None, number: int) -> None:
        self._in_queue[queue] += number
        self._under_key[queue, limit_key] += number
