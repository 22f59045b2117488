import asyncio
import atexit
import secrets
from functools import cache

import redis.asyncio

from perdure.testing.keyvalue import key_value_tests
from tests.kv.places import Place
from tests.servers.redis import RedisClusterServers


@cache
def cluster() -> str:
    servers = RedisClusterServers()
    servers.start()
    atexit.register(servers.remove)
    return servers.url


class ClusterPlace(Place):
    """A name of its own on the cluster. Keys spread over all its nodes."""

    def __init__(self) -> None:
        self.url = cluster()
        self.table = f"perdure-{secrets.token_hex(8)}"
        self.dsn = f"{self.url}?table={self.table}&cluster=true"

    async def count(self) -> int:
        async with await self._client() as client:
            return len({name async for name in client.scan_iter(f"{self.table}:*", count=10_000)})

    async def _client(self) -> redis.asyncio.RedisCluster:
        return await asyncio.to_thread(redis.asyncio.RedisCluster.from_url, self.url, driver_info=None)


test_key_values = key_value_tests(ClusterPlace)
