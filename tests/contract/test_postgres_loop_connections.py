"""The contract once more, where the loop that writes has connections of its own."""

from perdure.backends.postgres import PostgresStore
from perdure.store import FullStore
from perdure.testing.contract import contract_tests
from tests.contract.test_postgres import PostgresFactory


class OutpostFactory(PostgresFactory):
    """What is written on the loop that opens a store goes by an loop_pool; what is written elsewhere does not."""

    async def open(self, prefix: str = "") -> FullStore:
        store = await super().open(prefix)
        assert isinstance(store, PostgresStore)
        await store.setup()
        await store._loop_connections.open_here()
        assert store._loop_connections.here() is not None
        return store


test_contract = contract_tests(OutpostFactory)
