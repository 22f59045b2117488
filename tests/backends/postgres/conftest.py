"""One server for the session, and a schema of its own for each test."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.postgres import PostgresStore
from tests.servers.postgres import PostgresServer, shared_server, with_search_path


async def run(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def server() -> PostgresServer:
    return shared_server()


@pytest.fixture
def dsn(server: PostgresServer) -> Iterator[str]:
    schema = f"test_{secrets.token_hex(6)}"
    asyncio.run(run(server.dsn, f"CREATE SCHEMA {schema}"))
    yield with_search_path(server.dsn, schema)
    asyncio.run(run(server.dsn, f"DROP SCHEMA {schema} CASCADE"))


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(dsn)
    yield store
    await store.close()


@pytest.fixture
def restartable() -> Iterator[PostgresServer]:
    """A server that a test may stop and kill: always one of its own."""
    server = PostgresServer(own=True)
    server.start()
    yield server
    server.remove()
