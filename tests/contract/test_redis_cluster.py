import atexit
import secrets
from functools import cache

from perdure.backends.redis import RedisStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory
from tests.contract.sampling import sampled_contract_tests
from tests.servers.redis import RedisClusterServers


@cache
def cluster() -> RedisClusterServers:
    """The one cluster of this session."""
    started = RedisClusterServers()
    started.start()
    atexit.register(started.remove)
    return started


class RedisClusterFactory(StoreFactory):
    capabilities = STANDARD_PARTS | {"shared", "durable"}

    def __init__(self) -> None:
        self.url = cluster().url
        self.stem = f"perdure-{secrets.token_hex(8)}"

    async def open(self, prefix: str = "") -> FullStore:
        store = RedisStore(self.url, table=self.stem, prefix=prefix, cluster=True)
        await store.setup()  # only then it knows what the nodes do with what they are given
        return store


# The scripts are those of a single server, whose contract suite is whole.
test_contract = sampled_contract_tests(RedisClusterFactory)
