import asyncio
import atexit
import secrets
from functools import cache

import asyncpg  # type: ignore[import-untyped]  # it ships no types

from perdure.backends.postgres import PostgresStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory
from tests.contract.sampling import sampled_contract_tests
from tests.servers.postgres import shared_server, with_search_path


@cache
def shared_schema() -> str:
    """One schema for all cases of this process: making the tables takes longer than most cases."""
    server, schema = shared_server().dsn, f"contract_{secrets.token_hex(6)}"
    asyncio.run(_run(server, f"CREATE SCHEMA {schema}"))
    atexit.register(lambda: asyncio.run(_run(server, f"DROP SCHEMA {schema} CASCADE")))
    return with_search_path(server, schema)


async def _run(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


class PostgresFactory(StoreFactory):
    """A case has the tables to itself by a prefix that nobody else has."""

    capabilities = STANDARD_PARTS | {"shared", "durable", "transaction", "outbox"}

    def __init__(self) -> None:
        self.dsn = shared_schema()
        self.prefix = secrets.token_hex(6)

    async def open(self, prefix: str = "") -> FullStore:
        return PostgresStore(self.dsn, prefix=f"{self.prefix}/{prefix}")


test_contract = sampled_contract_tests(PostgresFactory)
