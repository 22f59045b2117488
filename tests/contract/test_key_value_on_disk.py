"""The contract over a store of py-key-value that keeps a file, for one process."""

from __future__ import annotations

import asyncio
import gc
import secrets
import shutil
import tempfile
from pathlib import Path

import pytest
from key_value.aio.stores.disk import DiskStore

from perdure.backends.key_value import KeyValueRunStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory
from tests.contract.sampling import sampled_contract_tests


@pytest.fixture(autouse=True)
def blocking_calls() -> list[str]:
    """No guard here: this store looks at the disk on the event loop, which is its own to change and not ours."""
    return []


class OurDisk(DiskStore):
    """As a store of py-key-value says nothing about it, its user may."""

    durability = "disk"


class DiskFactory(StoreFactory):
    capabilities = STANDARD_PARTS | {"durable"}

    def __init__(self) -> None:
        self.directory = Path(tempfile.gettempdir()) / f"perdure-key-value-{secrets.token_hex(8)}"
        self.kv = OurDisk(directory=self.directory)

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(self.kv, prefix=prefix)

    async def restart(self) -> None:
        await self.kv.close()
        gc.collect()
        self.kv = OurDisk(directory=self.directory)

    async def close(self) -> None:
        await self.kv.close()
        await asyncio.to_thread(shutil.rmtree, self.directory)


# The store is the same code as over a dict, whose suite is whole.
test_disk = sampled_contract_tests(DiskFactory)
