"""The contract through PgBouncer in transaction mode, where two statements in a row may reach two sessions."""

import atexit
import functools
import secrets

import asyncpg  # type: ignore[import-untyped]  # it ships no types

from perdure.store import Store
from perdure.stores.postgres_store import PostgresStore
from perdure.stores.postgres_store.schema import TABLES
from perdure.testing.contract import StoreFactory, contract_tests
from perdure.testing.servers.pgbouncer import PgBouncer
from perdure.testing.servers.postgres import shared_server


@functools.cache
def pooler() -> PgBouncer:
    pooler = PgBouncer(shared_server().dsn)
    pooler.start()
    atexit.register(pooler.remove)
    return pooler


class PgBouncerFactory(StoreFactory):
    capabilities = frozenset({"shared", "durable", "transaction"})

    def __init__(self) -> None:
        self.server = shared_server().dsn
        self.pooler = pooler().dsn
        self.table = f"t_{secrets.token_hex(6)}"

    async def open(self, prefix: str = "") -> Store:
        return PostgresStore(self.pooler, table=self.table, prefix=prefix)

    async def close(self) -> None:
        connection = await asyncpg.connect(self.server)
        for table in ("contract_effects", *(f"{self.table}_{part}" for part in TABLES)):
            await connection.execute(f"DROP TABLE IF EXISTS {table}")
        await connection.close()


test_contract = contract_tests(PgBouncerFactory)


async def test_it_is_noticed() -> None:
    factory = PgBouncerFactory()
    through, direct = await factory.open(), PostgresStore(factory.server, table=factory.table)
    assert isinstance(through, PostgresStore)
    await through.setup()
    await direct.setup()
    assert (through._home.behind_pooler, direct._home.behind_pooler) == (True, False)
    await through.close()
    await direct.close()
    await factory.close()
