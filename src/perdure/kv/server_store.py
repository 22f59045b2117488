"""A key-value store on a server: its verbs are carried to the loop of its connections, and errors tell no credentials.

A `set` whose reply was lost is made again: it leaves the same text. A `delete` whose reply was lost and that finds nothing the
second time cannot say whether there was anything, and raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.aio.pending_write import answered
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.server_store import ServerBacked
from perdure.errors import PersistenceError
from perdure.kv.limits import MAX_VALUE_BYTES, checked_key, decoded, encoded, lifetime, literal_beginning
from perdure.kv.protocol import fits
from perdure.model.durations import Duration

T = TypeVar("T")
H = TypeVar("H", bound=ServerConnections)


class ServerKeyValueStore(ServerBacked[H], ABC):
    """What is alike in all key-value stores on a server. A subclass has one round trip for each verb, on the connections loop."""

    most_bytes = MAX_VALUE_BYTES

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connections.label!r})"

    @property
    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Two with the same place keep the same texts."""

    async def get(self, key: str) -> str | None:
        """The text under `key`, or None."""
        name = checked_key(key)
        data = await self._ask(lambda _: self._get(name))
        return None if data is None else decoded(data)

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        """Keep the text, for `ttl` or for good."""
        data, length = encoded(checked_key(key), value, most=self.most_bytes), lifetime(ttl)
        # Cancelled, it is known to be over all the same: a later `set` of the key must not be overtaken by it.
        await answered(self._ask(lambda _: self._set(key, data, length)))

    async def delete(self, key: str) -> bool:
        """Whether there was anything to delete."""
        name = checked_key(key)
        return await answered(self._ask(lambda repeated: self._delete_once(name, repeated=repeated)))

    async def exists(self, key: str) -> bool:
        """Whether there is text under `key`."""
        name = checked_key(key)
        return await self._ask(lambda _: self._exists(name))

    async def keys(self, pattern: str) -> list[str]:
        """The keys that fit the pattern, in any order."""
        beginning = literal_beginning(pattern)
        if beginning is None:
            return []
        found = await self._ask(lambda _: self._beginning_with(beginning))
        return [key for key in found if fits(key, pattern)]

    @abstractmethod
    async def _get(self, key: str) -> bytes | None: ...

    @abstractmethod
    async def _set(self, key: str, data: bytes, length: int | None) -> None:
        """`length` is in microseconds of the server's clock. None: for good."""

    @abstractmethod
    async def _delete(self, key: str) -> bool: ...

    @abstractmethod
    async def _exists(self, key: str) -> bool: ...

    @abstractmethod
    async def _beginning_with(self, beginning: str) -> list[str]:
        """The live keys that begin so, and maybe others."""

    async def _delete_once(self, key: str, *, repeated: bool) -> bool:
        was_there = await self._delete(key)
        if repeated and not was_there:
            reason = f"the reply to a first delete of {key!r} was lost: whether it was there is not known; it is gone now"
            raise PersistenceError(self._connections.label, reason)
        return was_there

    async def _ask(self, verb: Callable[[bool], Awaitable[T]]) -> T:
        """What the verb gives, made again after errors that pass; then it is told that it may have been done before."""
        return await self._submit(lambda: self._connections.retry_transient(verb))
