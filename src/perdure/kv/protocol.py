"""`KeyValueStore`: the few methods that a store of text by key needs. Ready-made ones are in `perdure.kv`.

The methods may be plain or async; a plain one runs on the event loop, so it should not wait for anything. In a pattern every
character stands for itself except `*`, which stands for any text.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Protocol, TypeVar, cast

from perdure.model.durations import Duration

T = TypeVar("T")


class KeyValueStore(Protocol):
    """Text by key. A key whose ttl has passed is missing to every method."""

    def get(self, key: str) -> Awaitable[str | None] | str | None:
        """The text under `key`, or None."""
        ...

    def set(self, key: str, value: str, ttl: int | None = None) -> Awaitable[None] | None:
        """Store the text, for `ttl` seconds or without expiry. A ttl from an earlier `set` does not apply any more."""
        ...

    def delete(self, key: str) -> Awaitable[bool] | bool:
        """Whether there was anything to delete."""
        ...

    def exists(self, key: str) -> Awaitable[bool] | bool:
        """Whether there is text under `key`."""
        ...

    def keys(self, pattern: str) -> Awaitable[list[str]] | list[str]:
        """The keys that match the pattern, in any order."""
        ...


class OpenedKeyValueStore(KeyValueStore, Protocol):
    """A ready-made key-value store: its methods are coroutine functions, and it can be closed."""

    async def get(self, key: str) -> str | None: ...
    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None: ...
    async def delete(self, key: str) -> bool: ...
    async def exists(self, key: str) -> bool: ...
    async def keys(self, pattern: str) -> list[str]: ...

    async def close(self) -> None:
        """Take no more calls, and return when none is in flight. Closing again does nothing."""
        ...


def as_text(value: str | bytes) -> str:
    """The text of a key-value store. A client of Redis is one too, and gives bytes unless it was made to decode them."""
    return value.decode() if isinstance(value, bytes) else value


async def maybe_await(result: Awaitable[T] | T) -> T:
    """The result of a method that may be plain or async."""
    return await cast("Awaitable[T]", result) if inspect.isawaitable(result) else result
