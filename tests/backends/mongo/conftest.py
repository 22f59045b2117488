"""One server for the session, and an empty database for each test."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeAlias

import pymongo
import pytest

from perdure.backends.mongo import MongoStore
from tests.servers.mongo import MongoServer, shared_server, with_database
from tests.wire import Wire

Client: TypeAlias = pymongo.MongoClient[dict[str, Any]]


@pytest.fixture(scope="session")
def server() -> MongoServer:
    return shared_server()


@pytest.fixture(scope="session")
def client(server: MongoServer) -> Iterator[Client]:
    with pymongo.MongoClient[dict[str, Any]](server.dsn) as client:
        yield client


@pytest.fixture(scope="session")
def database(client: Client) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    yield name
    client.drop_database(name)


@pytest.fixture
def dsn(server: MongoServer, client: Client, database: str) -> Iterator[str]:
    """A database without runs, that has its collections once a test has made them: that takes longer than most tests."""
    yield with_database(server.dsn, database)
    for name in client[database].list_collection_names():
        if not name.startswith("system.") and not name.endswith("_meta"):
            client[database][name].delete_many({})


@pytest.fixture
def new_dsn(server: MongoServer, client: Client) -> Iterator[str]:
    """A database that is not there yet, for one test."""
    name = f"test_{secrets.token_hex(6)}"
    yield with_database(server.dsn, name)
    client.drop_database(name)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[MongoStore]:
    store = MongoStore(dsn)
    yield store
    await store.close()


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    """A proxy before the server. The driver looks after the server in polls, so rarely that none falls into a test."""
    wire = Wire(f"{dsn}&serverMonitoringMode=poll&heartbeatFrequencyMS=600000")
    yield wire
    wire.close()
