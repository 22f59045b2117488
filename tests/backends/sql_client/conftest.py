"""Each test runs on all three dialects, unless it names some by `here`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.backends.sql_client.store import SqlClientStore
from tests.backends.sql_client.places import Place, place


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """An empty database."""
    async with place(request.param) as empty:
        yield empty


@pytest.fixture
def store(here: Place) -> SqlClientStore:
    return here.store()
