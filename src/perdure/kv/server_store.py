"""The base of key-value stores on a server: its methods run on the loop of its connections, and errors show no credentials.

A `set` whose reply was lost is repeated, because it leaves the same text. A `delete` whose reply was lost and that finds nothing
the second time cannot know whether there was anything, and raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.aio.pending_write import await_reply
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.server_store import ServerBacked
from perdure.errors import PersistenceError
from perdure.kv.limits import MAX_VALUE_BYTES, check_key, decode_value, encode_value, lifetime
from perdure.kv.patterns import literal_prefix, matches
from perdure.model.durations import Duration

T = TypeVar("T")
H = TypeVar("H", bound=ServerConnections)


class ServerKeyValueStore(ServerBacked[H], ABC):
    """What key-value stores on a server share. A subclass has one round trip for each method, on the loop of the connections."""

    most_bytes = MAX_VALUE_BYTES

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connections.label!r})"

    @property
    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Two stores with the same place hold the same texts."""

    async def get(self, key: str) -> str | None:
        """The text under `key`, or None."""
        name = check_key(key)
        data = await self._call(lambda _: self._get(name))
        return None if data is None else decode_value(data)

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        """Store the text, for `ttl` or without expiry."""
        name, length = check_key(key), lifetime(ttl)
        data = encode_value(name, value, most=self.most_bytes)
        # A cancelled `set` ends only when its reply has arrived, so that it cannot overwrite a later `set` of the key.
        await await_reply(self._call(lambda _: self._set(name, data, length)))

    async def delete(self, key: str) -> bool:
        """Whether there was anything to delete."""
        name = check_key(key)
        return await await_reply(self._call(lambda repeated: self._delete_once(name, repeated=repeated)))

    async def exists(self, key: str) -> bool:
        """Whether there is text under `key`."""
        name = check_key(key)
        return await self._call(lambda _: self._exists(name))

    async def keys(self, pattern: str) -> list[str]:
        """The keys that match the pattern, in any order."""
        prefix = literal_prefix(pattern)
        if prefix is None:
            return []
        found = await self._call(lambda _: self._keys_with_prefix(prefix))
        return [key for key in found if matches(key, pattern)]

    @abstractmethod
    async def _get(self, key: str) -> bytes | None: ...

    @abstractmethod
    async def _set(self, key: str, data: bytes, length: int | None) -> None:
        """`length` is in microseconds, by the server's clock. None: no expiry."""

    @abstractmethod
    async def _delete(self, key: str) -> bool: ...

    @abstractmethod
    async def _exists(self, key: str) -> bool: ...

    @abstractmethod
    async def _keys_with_prefix(self, prefix: str) -> list[str]:
        """The live keys with this prefix, and maybe others."""

    async def _delete_once(self, key: str, *, repeated: bool) -> bool:
        was_there = await self._delete(key)
        if repeated and not was_there:
            reason = f"the reply to a first delete of {key!r} was lost, so whether the key existed is unknown; it is deleted now"
            raise PersistenceError(self._connections.label, reason)
        return was_there

    async def _call(self, verb: Callable[[bool], Awaitable[T]]) -> T:
        """The verb's result. It is repeated after transient errors, and then called with True: it may have been done already."""
        return await self._submit(lambda: self._connections.retry_transient(verb))
