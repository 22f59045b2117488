"""Text by key on a Redis or Valkey server, for any number of processes and machines.

A key is `{table}:values:{namespace}:{key}`, the namespace without colons. Redis itself expires what has a ttl, by its own clock.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, ClassVar, Final

from perdure.aio.loop_thread import LoopThread
from perdure.backends.redis.address import address_of_client, check_source, parse_address
from perdure.backends.redis.connections import RedisConnections
from perdure.backends.redis.driver import driver
from perdure.backends.redis.keys import Keys
from perdure.errors import PerdureWarning
from perdure.kv.limits import check_namespace, escape_colons
from perdure.kv.server_store import ServerKeyValueStore

_SPECIAL: Final = re.compile(rb"[*?\[\]\\^-]")
_SCANNED_AT_ONCE: Final = 1000
_MICROSECONDS_PER_MILLISECOND: Final = 1000


class RedisKvConnections(RedisConnections):
    """The client of a key-value store."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-redis-values")

    async def open(self, *, allowed: bool) -> None:  # noqa: ARG002 - there is nothing to create
        """Make a client, and warn when the server may forget what it is given."""
        self.connect()
        risk = await self._find_data_loss()
        if risk is not None:
            warnings.warn(f"{self.label} {risk}", PerdureWarning, stacklevel=2)

    async def _find_data_loss(self) -> str | None:
        """How the server may lose what it was given, as far as it says."""
        try:
            settings = {**await self.client.info("persistence"), **await self.client.info("memory")}
        except driver().ResponseError:  # a managed server may refuse
            return None
        policy = str(settings.get("maxmemory_policy", ""))
        if policy.startswith("allkeys") and settings.get("maxmemory"):
            return f"throws keys away when its memory is full (maxmemory-policy {policy}); set it to noeviction"
        if settings.get("aof_enabled") == 0:
            return "has no append-only file, so a restart of the server loses what was set; set appendonly yes"
        return None


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
        keys = Keys(table, "")
        driver()
        check_source(url, client, cluster=cluster)
        address = address_of_client(client) if url is None else parse_address(url)
        self._before = f"{keys.stem}:values:{escape_colons(check_namespace(namespace))}:".encode()
        super().__init__(RedisKvConnections(address, keys, url=url, client=client, cluster=cluster))

    @property
    def place(self) -> tuple[str, ...]:
        """Host, port, database, and what begins the names of all keys."""
        return ("redis", *self._connections.address, self._before.decode())

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
        # SCAN may return a key twice while the server resizes its table.
        found = {name async for name in self._connections.client.scan_iter(pattern, count=_SCANNED_AT_ONCE)}
        return [name.removeprefix(self._before).decode() for name in found]

    def _name(self, key: str) -> bytes:
        return self._before + key.encode()
