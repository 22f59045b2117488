"""One server for the session, and a table stem of its own for each test."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from perdure.backends.base.retries import WriteFailure
from perdure.backends.libsql.address import parse_url
from perdure.backends.libsql.errors import classify_failure
from perdure.backends.libsql.hrana import HranaClient, ServerError, committed_results, in_transaction
from perdure.backends.sql.dialect import Statement
from tests.servers.libsql import LibsqlServer, shared_server


async def run(url: str, *sql: str) -> None:
    """Have these executed, again while the server is busy: during a checkpoint it tells so to everybody who writes."""
    target = parse_url(url)
    client = HranaClient(target.address, target.token, size=1)
    try:
        async with asyncio.timeout(30):
            while not await is_done(client, sql):  # noqa: ASYNC110 - nobody tells when a checkpoint is over
                await asyncio.sleep(0.05)
    finally:
        await client.close()


async def is_done(client: HranaClient, sql: Sequence[str]) -> bool:
    try:
        committed_results(await client.batch(in_transaction([Statement(text) for text in sql])))
    except ServerError as error:
        if classify_failure(error) is not WriteFailure.RETRY:
            raise
        return False
    return True


async def drop(url: str, stem: str) -> None:
    tables = [f"{stem}_{part}" for part in ("runs", "steps", "signals", "queues", "schedules", "items", "pieces", "meta")]
    await run(url, *(f'DROP TABLE IF EXISTS "{table}"' for table in tables))


@pytest.fixture(scope="session")
def server() -> LibsqlServer:
    return shared_server()


@pytest.fixture
def url(server: LibsqlServer) -> str:
    return server.url


@pytest.fixture
def table(server: LibsqlServer) -> Iterator[str]:
    stem = f"test_{secrets.token_hex(6)}"
    yield stem
    asyncio.run(drop(server.url, stem))


@pytest.fixture
async def client(url: str) -> AsyncIterator[HranaClient]:
    target = parse_url(url)
    client = HranaClient(target.address, target.token, size=4)
    yield client
    await client.close()


@pytest.fixture
def restartable() -> Iterator[LibsqlServer]:
    """A server that a test may stop and kill: always one of its own."""
    server = LibsqlServer(own=True)
    server.start()
    yield server
    server.remove()
