import asyncio
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Final

from perdure.backends.files import FilesStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory, contract_tests

TEMPORARY: Final = Path(tempfile.gettempdir())


class FilesFactory(StoreFactory):
    capabilities = STANDARD_PARTS | {"shared", "durable"}

    def __init__(self) -> None:
        self.directory = TEMPORARY / f"perdure-{secrets.token_hex(8)}"

    async def open(self, prefix: str = "") -> FullStore:
        return await asyncio.to_thread(FilesStore, self.directory, prefix=prefix)  # finding the real path looks at the disk

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


test_contract = contract_tests(FilesFactory)
