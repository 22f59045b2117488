"""Text by key on a Redis or Valkey server, for any number of processes and machines.

A key is `{table}:values:{namespace}:{key}`, the namespace without colons. Redis itself expires what has a ttl, by its own clock.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, ClassVar, Final, Self

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.failures import WriteFailure
from perdure.backends.redis.driver import RedisAddress, address_of_client, driver, map_error, may_pass, open_client, parse_address
from perdure.errors import PerdureWarning
from perdure.kv.limits import check_namespace, escape_namespace
from perdure.kv.server_store import ServerKeyValueStore

_STEM: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SPECIAL: Final = re.compile(rb"[*?\[\]\\^-]")
_SCANNED_AT_ONCE: Final = 1000
_MICROSECONDS_PER_MILLISECOND: Final = 1000


class RedisKvConnections(ServerConnections):
    """A client of redis-py, on its loop."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-redis-values")

    def __init__(self, place: RedisAddress, *, url: str | None, client: Any, cluster: bool) -> None:
        super().__init__(str(place), is_borrowed=client is not None)
        self.place = place
        self._url = url
        self._cluster = cluster
        self._borrowed = client
        self.client = client

    def sibling(self) -> Self:
        return type(self)(self.place, url=self._url, client=self._borrowed, cluster=self._cluster)

    async def open(self, *, allowed: bool) -> None:  # noqa: ARG002 - there is nothing to create
        """Have a client, and a warning when the server may forget what it is given."""
        if self.client is None and self._url is not None:
            self.client = open_client(self._url, cluster=self._cluster)
        trouble = await self._forgets()
        if trouble is not None:
            warnings.warn(f"{self.label} {trouble}", PerdureWarning, stacklevel=2)

    async def _forgets(self) -> str | None:
        """How the server forgets, as far as it tells."""
        try:
            told = {**await self.client.info("persistence"), **await self.client.info("memory")}
        except driver().ResponseError:  # a managed server may not tell
            return None
        if str(told.get("maxmemory_policy", "")).startswith("allkeys") and told.get("maxmemory"):
            return f"throws keys away when its memory is full (maxmemory-policy {told['maxmemory_policy']}); set it to noeviction"
        if told.get("aof_enabled") == 0:
            return "has no append-only file, so a restart of the server loses what was set; set appendonly yes"
        return None

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None and self._borrowed is None:
            await client.aclose()

    def classify_failure(self, error: BaseException) -> WriteFailure:
        return WriteFailure.UNKNOWN if may_pass(error) else WriteFailure.PERMANENT

    def map_error(self, error: BaseException) -> BaseException:
        return map_error(error, self.place)


class RedisKeyValueStore(ServerKeyValueStore[RedisKvConnections]):
    """A `KeyValueStore` on a Redis or Valkey server.

    It takes a URL, or a `client` of `redis.asyncio` that stays the caller's: it is used on the event loop that runs when the
    store is made (or first used), and not closed. `table` begins the names of all keys, `namespace` keeps several users of one
    server apart. With `cluster=True` the URL is that of any node of a cluster. A server that forgets what it was given, when it
    is started again or its memory is full, is used with a `PerdureWarning`.
    """

    def __init__(
        self, url: str | None = None, *, client: Any = None, table: str = "perdure", namespace: str = "", cluster: bool = False
    ) -> None:
        if (url is None) == (client is None):
            raise ValueError("pass either the URL of a Redis server or client=")
        if not isinstance(table, str) or not _STEM.fullmatch(table):
            raise ValueError(f"table {table!r} must consist of 1 to 64 letters, digits, '_', '.' and '-'")
        driver()
        place = address_of_client(client) if url is None else parse_address(url)
        self._before = f"{table}:values:{escape_namespace(check_namespace(namespace))}:".encode()
        super().__init__(RedisKvConnections(place, url=url, client=client, cluster=cluster))

    @property
    def place(self) -> tuple[str, ...]:
        """Host, port, database, and what begins the names of all keys."""
        return ("redis", *self._connections.place, self._before.decode())

    async def _get(self, key: str) -> bytes | None:
        data: bytes | None = await self._connections.client.get(self._name(key))
        return data

    async def _set(self, key: str, data: bytes, length: int | None) -> None:
        if length == 0:  # which Redis does not take for a ttl
            await self._delete(key)
            return
        # Rounded up: a whole millisecond is the least there is.
        ttl = None if length is None else -(-length // _MICROSECONDS_PER_MILLISECOND)
        await self._connections.client.set(self._name(key), data, px=ttl)

    async def _delete(self, key: str) -> bool:
        return bool(await self._connections.client.delete(self._name(key)))

    async def _exists(self, key: str) -> bool:
        return bool(await self._connections.client.exists(self._name(key)))

    async def _keys_with_prefix(self, prefix: str) -> list[str]:
        pattern = _SPECIAL.sub(rb"\\\g<0>", self._name(prefix)) + b"*"
        # Redis may tell a key twice while it makes room.
        found = {name async for name in self._connections.client.scan_iter(pattern, count=_SCANNED_AT_ONCE)}
        return [name.removeprefix(self._before).decode() for name in found]

    def _name(self, key: str) -> bytes:
        return self._before + key.encode()
