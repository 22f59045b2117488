import asyncio
import atexit
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from perdure.backends.sql.dialect import MYSQL, POSTGRES, SQLITE
from perdure.backends.sql_client.store import SqlClientStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory, contract_tests
from tests.backends.sql_client.clients import MysqlClient, PostgresClient, SqliteClient
from tests.contract.sampling import sampled_contract_tests
from tests.servers import mysql, postgres

TEMPORARY: Final = Path(tempfile.gettempdir())


class ClientFactory(StoreFactory):
    """A store does not close its client, so these do. What is sent to other processes has no clients."""

    capabilities = STANDARD_PARTS | {"shared", "durable", "transaction", "outbox"}

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

    async def open(self, prefix: str = "") -> FullStore:
        await asyncio.to_thread(self.directory.mkdir, exist_ok=True)
        client = SqliteClient(str(self.directory / "runs.db"))
        self.clients.append(client)
        return SqlClientStore(client, SQLITE, prefix=prefix)

    async def close(self) -> None:
        await self.restart()
        await asyncio.to_thread(shutil.rmtree, self.directory)


class ServerFactory(ClientFactory):
    """A case has the tables to itself by a prefix that nobody else has."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = secrets.token_hex(6)

    async def close(self) -> None:
        await self.restart()


class PostgresClientFactory(ServerFactory):
    def __init__(self) -> None:
        super().__init__()
        self.dsn = postgres_schema()

    async def open(self, prefix: str = "") -> FullStore:
        client = PostgresClient(self.dsn)
        self.clients.append(client)
        return SqlClientStore(client, POSTGRES, prefix=f"{self.prefix}/{prefix}")


class MysqlClientFactory(ServerFactory):
    longest_value = (9 << 20) - 1  # of quotes, which the client escapes: more than the max_allowed_packet of 16 MiB

    def __init__(self) -> None:
        super().__init__()
        self.dsn = mysql_database()

    async def open(self, prefix: str = "") -> FullStore:
        client = MysqlClient(self.dsn)
        self.clients.append(client)
        return SqlClientStore(client, MYSQL, prefix=f"{self.prefix}/{prefix}")


# One place on each server for all cases of this process: making the tables takes longer than most cases.


@cache
def postgres_schema() -> str:
    server, schema = postgres.shared_server().dsn, f"contract_{secrets.token_hex(6)}"
    asyncio.run(_run(PostgresClient, server, f"CREATE SCHEMA {schema}"))
    atexit.register(lambda: asyncio.run(_run(PostgresClient, server, f"DROP SCHEMA {schema} CASCADE")))
    return postgres.with_search_path(server, schema)


@cache
def mysql_database() -> str:
    server, database = mysql.shared_server().dsn, f"contract_{secrets.token_hex(6)}"
    asyncio.run(_run(MysqlClient, server, f"CREATE DATABASE {database}"))
    atexit.register(lambda: asyncio.run(_run(MysqlClient, server, f"DROP DATABASE {database}")))
    return mysql.with_database(server, database)


async def _run(kind: type[PostgresClient | MysqlClient], server: str, sql: str) -> None:
    client = kind(server)
    try:
        await client.query(sql, ())
    finally:
        await client.close()


# The client is the same code, and the dialects are those of the databases' own stores, whose contract suites are whole.
test_contract_on_postgres = sampled_contract_tests(PostgresClientFactory)
test_contract_on_sqlite = pytest.mark.chaos(contract_tests(SqliteClientFactory))
test_contract_on_mysql = pytest.mark.chaos(contract_tests(MysqlClientFactory))
