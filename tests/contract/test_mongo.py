import atexit
import secrets
from functools import cache
from typing import Final

import pymongo
import pytest
from pymongo import pool_options

from perdure.backends.mongo import MongoStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory
from tests.contract.sampling import sampled_contract_tests
from tests.servers.mongo import shared_server, with_database

# The driver looks after the server so rarely that it needs fewer connections, which are what costs most in an emulated server.
RARE_LOOKS: Final = "serverMonitoringMode=poll&heartbeatFrequencyMS=600000"


@cache
def shared_database() -> str:
    """One database for all cases of this process: making collections and indexes takes longer than most cases."""
    dsn = with_database(shared_server().dsn, f"contract_{secrets.token_hex(6)}")
    atexit.register(_drop, dsn)
    return f"{dsn}{'&' if '?' in dsn else '?'}{RARE_LOOKS}"


def _drop(dsn: str) -> None:
    with pymongo.MongoClient[dict[str, object]](dsn) as client:
        client.drop_database(client.get_default_database().name)


@pytest.fixture(autouse=True)
def no_look_for_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver asks the disk whether it runs in a container, each time it opens a pool: one `stat`, on the store's own loop."""
    monkeypatch.setattr(pool_options, "get_container_env_info", dict)


class MongoFactory(StoreFactory):
    """A case has the collections to itself by a prefix that nobody else has."""

    capabilities = STANDARD_PARTS | {"shared", "durable"}
    longest_value = 16 << 20  # a document's limit

    def __init__(self) -> None:
        self.dsn = shared_database()
        self.prefix = secrets.token_hex(6)

    async def open(self, prefix: str = "") -> FullStore:
        return MongoStore(self.dsn, prefix=f"{self.prefix}/{prefix}")


test_contract = sampled_contract_tests(MongoFactory)
