from perdure.backends.memory.database import MemoryDatabase
from perdure.backends.memory.store import MemoryStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory, contract_tests


class MemoryFactory(StoreFactory):
    capabilities = STANDARD_PARTS

    def __init__(self) -> None:
        self.database = MemoryDatabase()

    async def open(self, prefix: str = "") -> FullStore:
        return MemoryStore(self.database, prefix=prefix)

    async def restart(self) -> None:
        self.database = MemoryDatabase()


test_contract = contract_tests(MemoryFactory)
