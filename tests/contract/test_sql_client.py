import asyncio
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import asyncpg  # type: ignore[import-untyped]  # it ships no types

from perdure.store import Store
from perdure.stores.sql_store.client import SqlClientStore
from perdure.stores.sql_store.dialect import MYSQL, POSTGRES, SQLITE
from perdure.testing.contract import StoreFactory, contract_tests
from perdure.testing.servers import mysql
from perdure.testing.servers.postgres import shared_server, with_search_path
from tests.sql_client.clients import MysqlClient, PostgresClient, SqliteClient

TEMPORARY: Final = Path(tempfile.gettempdir())


class ClientFactory(StoreFactory):
    """A store does not close its client, so these do. What is sent to other processes has no clients."""

    capabilities = frozenset({"shared", "durable", "transaction"})

    def __init__(self) -> None:
        self.clients: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "clients": []}

    async def restart(self) -> None:
        for client in self.clients:
            await client.close()
        self.clients.clear()


class SqliteClientFactory(ClientFactory):
    def __init__(self) -> None:
        super().__init__()
        self.directory = TEMPORARY / f"perdure-{secrets.token_hex(8)}"

    async def open(self, prefix: str = "") -> Store:
        await asyncio.to_thread(self.directory.mkdir, exist_ok=True)
        client = SqliteClient(str(self.directory / "runs.db"))
        self.clients.append(client)
        return SqlClientStore(client, SQLITE, prefix=prefix)

    async def close(self) -> None:
        await self.restart()
        await asyncio.to_thread(shutil.rmtree, self.directory)


class PostgresClientFactory(ClientFactory):
    def __init__(self) -> None:
        super().__init__()
        self.server = shared_server().dsn
        self.schema = f"contract_{secrets.token_hex(6)}"

    async def open(self, prefix: str = "") -> Store:
        await self._run(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")
        client = PostgresClient(with_search_path(self.server, self.schema))
        self.clients.append(client)
        return SqlClientStore(client, POSTGRES, prefix=prefix)

    async def close(self) -> None:
        await self.restart()
        await self._run(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")

    async def _run(self, sql: str) -> None:
        connection = await asyncpg.connect(self.server)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()


class MysqlClientFactory(ClientFactory):
    def __init__(self) -> None:
        super().__init__()
        self.server = mysql.shared_server().dsn
        self.database = f"contract_{secrets.token_hex(6)}"

    async def open(self, prefix: str = "") -> Store:
        await self._run(f"CREATE DATABASE IF NOT EXISTS {self.database}")
        client = MysqlClient(mysql.with_database(self.server, self.database))
        self.clients.append(client)
        return SqlClientStore(client, MYSQL, prefix=prefix)

    async def close(self) -> None:
        await self.restart()
        await self._run(f"DROP DATABASE IF EXISTS {self.database}")

    async def _run(self, sql: str) -> None:
        client = MysqlClient(self.server)
        try:
            await client.query(sql, ())
        finally:
            await client.close()


test_contract_on_sqlite = contract_tests(SqliteClientFactory)
test_contract_on_postgres = contract_tests(PostgresClientFactory)
test_contract_on_mysql = contract_tests(MysqlClientFactory)
