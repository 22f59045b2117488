"""The contract once more, where the loop that writes has connections of its own.

The statements and their batchers are those of `test_postgres.py`; only the connections differ, so this is left to `make chaos`.
"""

import pytest

from perdure.backends.postgres import PostgresStore
from perdure.store import FullStore
from perdure.testing.contract import contract_tests
from tests.contract.test_postgres import PostgresFactory

pytestmark = pytest.mark.chaos


class LoopConnectionsFactory(PostgresFactory):
    """Writes on the loop that opens a store go by its own connections; writes elsewhere do not."""

    async def open(self, prefix: str = "") -> FullStore:
        store = await super().open(prefix)
        assert isinstance(store, PostgresStore)
        await store.setup()
        await store._loop_connections.open_here()
        assert store._loop_connections.here() is not None
        return store


test_contract = contract_tests(LoopConnectionsFactory)
