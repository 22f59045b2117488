"""One server for the session, and a database of its own for each test."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import asyncmy
import pytest

from perdure.backends.mysql import MysqlStore
from perdure.backends.mysql.address import parse_address
from tests.servers.mysql import MysqlServer, shared_server, with_database


async def connect(dsn: str, **options: Any) -> Any:
    return await asyncmy.connect(**{**parse_address(dsn).arguments(), "autocommit": True, **options})


async def ask(dsn: str, sql: str) -> Sequence[Sequence[Any]]:
    """The rows that the server gives for one statement."""
    connection = await connect(dsn)
    try:
        async with connection.cursor() as cursor:
            await cursor.execute(sql)
            rows: Sequence[Sequence[Any]] = await cursor.fetchall()
            return rows
    finally:
        connection.close()


@pytest.fixture(scope="session")
def server() -> MysqlServer:
    return shared_server()


@pytest.fixture
def dsn(server: MysqlServer) -> Iterator[str]:
    database = f"test_{secrets.token_hex(6)}"
    asyncio.run(ask(server.dsn, f"CREATE DATABASE {database}"))
    yield with_database(server.dsn, database)
    asyncio.run(_drop(server.dsn, database))


async def _drop(dsn: str, database: str) -> None:
    """A test that failed may have left connections, and the server would wait for what is open there."""
    for (number,) in await ask(dsn, f"SELECT id FROM information_schema.processlist WHERE db = '{database}'"):
        with contextlib.suppress(asyncmy.errors.OperationalError):  # it has just gone
            await ask(dsn, f"KILL {number}")
    await ask(dsn, f"DROP DATABASE {database}")


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[MysqlStore]:
    store = MysqlStore(dsn)
    yield store
    await store.close()


@pytest.fixture
def restartable() -> Iterator[MysqlServer]:
    """A server that a test may stop and kill: always one of its own."""
    server = MysqlServer(own=True)
    server.start()
    yield server
    server.remove()
