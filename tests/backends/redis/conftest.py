from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from perdure.backends.redis import RedisStore
from tests.servers.redis import RedisServer
from tests.wire import Wire


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    started = RedisServer()
    started.start()
    yield started
    started.remove()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Wire]:
    """A way to the server on which round trips are counted and replies can be lost."""
    opened = Wire(server.url)
    yield opened
    opened.close()


@pytest.fixture
def table() -> str:
    """A stem of its own for each test."""
    return f"perdure-{secrets.token_hex(8)}"


@pytest.fixture
async def store(server: RedisServer, table: str) -> AsyncIterator[RedisStore]:
    opened = RedisStore(server.url, table=table)
    await opened.setup()
    yield opened
    await opened.close()
