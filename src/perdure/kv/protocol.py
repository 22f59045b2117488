"""Key-value stores: the least that is needed to keep text by key. Ready-made ones are in `perdure.kv`.

The methods of a `KeyValueStore` may be plain or async; a plain one runs on the event loop, so it should not wait for anything.
In a pattern every character stands for itself but `*`, which stands for any text.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Protocol, TypeVar, cast

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
