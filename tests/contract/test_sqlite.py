import asyncio
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Final

from perdure.backends.sqlite import SQLiteStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory, contract_tests

TEMPORARY: Final = Path(tempfile.gettempdir())


class SQLiteFactory(StoreFactory):
    capabilities = STANDARD_PARTS | {"shared", "durable", "transaction", "outbox"}

    def __init__(self) -> None:
        self.directory = TEMPORARY / f"perdure-{secrets.token_hex(8)}"

    async def open(self, prefix: str = "") -> FullStore:
        return await asyncio.to_thread(self._open, prefix)  # finding the file's real path looks at the disk

    def _open(self, prefix: str) -> FullStore:
        self.directory.mkdir(exist_ok=True)
        return SQLiteStore(self.directory / "runs.db", prefix=prefix)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory)


test_contract = contract_tests(SQLiteFactory)
