import asyncio
import atexit
import secrets
from functools import cache

import redis.asyncio

from perdure.backends.redis import RedisStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory
from tests.contract.sampling import sampled_contract_tests
from tests.servers.redis import RedisServer, configured_url


@cache
def server() -> RedisServer:
    """The one server of this session."""
    started = RedisServer()
    started.start()
    atexit.register(started.remove)
    return started


class RedisFactory(StoreFactory):
    capabilities = STANDARD_PARTS | {"shared", "durable"}

    def __init__(self) -> None:
        url = configured_url()
        self.is_ours = url is None
        self.url = url or server().url
        self.stem = f"perdure-{secrets.token_hex(8)}"

    async def open(self, prefix: str = "") -> FullStore:
        store = RedisStore(self.url, table=self.stem, prefix=prefix)
        await store.setup()  # only then it knows what the server does with what it is given
        return store

    async def close(self) -> None:
        async with redis.asyncio.Redis.from_url(self.url, driver_info=None) as client:
            async for key in client.scan_iter(f"{{{self.stem}:*", count=10_000):
                await client.unlink(key)

    async def restart(self) -> None:
        if self.is_ours:
            await asyncio.to_thread(_kill_and_start)


def _kill_and_start() -> None:
    server().kill()
    server().start()


test_contract = sampled_contract_tests(RedisFactory)
