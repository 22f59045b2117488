import os
import secrets

import asyncpg  # type: ignore[import-untyped]  # it ships no types

from perdure.store import Store
from perdure.stores.postgres_store import PostgresStore
from perdure.testing.contract import StoreFactory, contract_tests
from perdure.testing.servers.postgres import VARIABLE, shared_server, with_search_path


class PostgresFactory(StoreFactory):
    capabilities = frozenset({"shared", "durable", "transaction"})

    def __init__(self) -> None:
        self.server = shared_server().dsn
        self.schema = f"contract_{secrets.token_hex(6)}"
        self.made = False

    async def open(self, prefix: str = "") -> Store:
        if not self.made:
            await self._run(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")
            self.made = True
        return PostgresStore(with_search_path(self.server, self.schema), prefix=prefix)

    async def close(self) -> None:
        await self._run(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")

    async def _run(self, sql: str) -> None:
        connection = await asyncpg.connect(self.server)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()


test_contract = contract_tests(PostgresFactory)


def test_the_server_is_ours_unless_the_environment_names_one() -> None:
    assert shared_server().is_ours == (VARIABLE not in os.environ)
