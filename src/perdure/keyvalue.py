"""Key-value stores: the least that is needed to keep text by key, and one in memory.

The methods of a `KeyValueStore` may be plain or async; a plain one runs on the event loop, so it should not wait for anything.
In a pattern every character stands for itself but `*`, which stands for any text.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import NamedTuple, Protocol, TypeVar, cast

from perdure.clock import Clock, SystemClock
from perdure.duration import Duration, microseconds

T = TypeVar("T")


class KeyValueStore(Protocol):
    """Text by key. A key whose ttl has passed is missing to every method."""

    def get(self, key: str) -> Awaitable[str | None] | str | None:
        """The text under `key`, or None."""
        ...

    def set(self, key: str, value: str, ttl: int | None = None) -> Awaitable[None] | None:
        """Keep the text, for `ttl` seconds or for good: the ttl it had before does not count any more."""
        ...

    def delete(self, key: str) -> Awaitable[bool] | bool:
        """Whether there was anything to delete."""
        ...

    def exists(self, key: str) -> Awaitable[bool] | bool:
        """Whether there is text under `key`."""
        ...

    def keys(self, pattern: str) -> Awaitable[list[str]] | list[str]:
        """The keys that fit the pattern, in any order."""
        ...


async def settled(answer: Awaitable[T] | T) -> T:
    """The answer of a method that may be plain or async."""
    return await cast("Awaitable[T]", answer) if inspect.isawaitable(answer) else answer


def fits(key: str, pattern: str) -> bool:
    """Whether a key fits a pattern in which only `*` is special. Takes no longer than their lengths multiplied."""
    first, *others = pattern.split("*")
    if not others:
        return key == pattern
    *middle, last = others
    if not key.startswith(first) or len(key) < len(first) + len(last) or not key.endswith(last):
        return False
    # The leftmost place for each part leaves the most room for the rest.
    at, end = len(first), len(key) - len(last)
    for part in middle:
        found = key.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class _Kept(NamedTuple):
    value: str
    expires_at: int | None


class MemoryKeyValueStore:
    """A `KeyValueStore` that lives as long as this object."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kept: dict[str, _Kept] = {}

    async def get(self, key: str) -> str | None:
        kept = self._live(key)
        return None if kept is None else kept.value

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        expires_at = None if ttl is None else self._clock.now() + microseconds(ttl, what="ttl")
        self._kept[key] = _Kept(value, expires_at)

    async def delete(self, key: str) -> bool:
        was_live = self._live(key) is not None
        self._kept.pop(key, None)
        return was_live

    async def exists(self, key: str) -> bool:
        return self._live(key) is not None

    async def keys(self, pattern: str) -> list[str]:
        return [key for key in list(self._kept) if self._live(key) is not None and fits(key, pattern)]

    def _live(self, key: str) -> _Kept | None:
        kept = self._kept.get(key)
        if kept is None or kept.expires_at is None or kept.expires_at > self._clock.now():
            return kept
        del self._kept[key]
        return None
