import asyncio
import atexit
import functools
import secrets

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.store import STANDARD_PARTS, Durability, FullStore
from perdure.testing.contract import StoreFactory, all_cases
from perdure.testing.contract.cases import Case
from tests.backends.libsql.conftest import drop, run
from tests.contract.sampling import sampled_contract_tests
from tests.servers.libsql import LibsqlServer, shared_server

DURABLE = [case for case in all_cases() if "durable" in case.needs]


class LibsqlFactory(StoreFactory):
    """sqld does not sync at a commit, so a store on it does not call itself durable."""

    capabilities = STANDARD_PARTS | {"shared", "transaction"}

    def __init__(self) -> None:
        self.url = shared_server().url
        self.table = f"contract_{secrets.token_hex(6)}"

    async def open(self, prefix: str = "") -> FullStore:
        return LibsqlStore(self.url, table=self.table, prefix=prefix)

    async def close(self) -> None:
        await drop(self.url, self.table)
        await run(self.url, "DROP TABLE IF EXISTS contract_effects")  # what the cases with transactions make


class SyncedStore(LibsqlStore):
    """A store as it would be on a server that syncs. What such a server promises of restarts, sqld keeps too."""

    @property
    def durability(self) -> Durability:
        return "disk"


class KilledFactory(LibsqlFactory):
    """Where the suite wants a restart, the server is killed and started again."""

    capabilities = STANDARD_PARTS | {"shared", "transaction", "durable"}

    def __init__(self) -> None:
        super().__init__()
        self.url = killable().url

    async def open(self, prefix: str = "") -> FullStore:
        return SyncedStore(self.url, table=self.table, prefix=prefix)

    async def restart(self) -> None:
        await asyncio.to_thread(killable().kill)
        await asyncio.to_thread(killable().start)


@functools.cache
def killable() -> LibsqlServer:
    server = LibsqlServer(own=True)
    server.start()
    atexit.register(server.remove)
    return server


# The statements are SQLite's, whose contract suite is whole.
test_contract = sampled_contract_tests(LibsqlFactory)


@pytest.mark.parametrize("case", DURABLE, ids=[case.name for case in DURABLE])
def test_what_is_acknowledged_survives_the_death_of_the_server(case: Case) -> None:
    asyncio.run(case.run(KilledFactory()))
