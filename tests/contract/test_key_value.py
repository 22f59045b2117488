"""The contract over key-value stores without compare-and-swap, for one process."""

from __future__ import annotations

import asyncio
import gc
import secrets
import shutil
import tempfile

import pytest
from key_value.aio.stores.memory import MemoryStore as PyMemoryStore
from obstore.store import LocalStore, MemoryStore

from perdure.backends.key_value import KeyValueRunStore
from perdure.backends.key_value.backend import StoredValue, Version
from perdure.kv import FilesKeyValueStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory, contract_tests
from tests.contract.sampling import sampled_contract_tests


class PlainDict:
    """A `KeyValueStore` as people write them: plain methods over a dict."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self.kept.get(key)

    def set(self, key: str, value: str, ttl: int | None = None) -> None:
        assert ttl is None
        self.kept[key] = value

    def delete(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None

    def exists(self, key: str) -> bool:
        return key in self.kept

    def keys(self, pattern: str) -> list[str]:
        raise AssertionError(f"nobody may look through all keys, not even for {pattern!r}")


def new_directory() -> str:
    """Where a directory may be made."""
    return f"{tempfile.gettempdir()}/perdure-key-value-{secrets.token_hex(8)}"


class DictFactory(StoreFactory):
    capabilities = STANDARD_PARTS

    def __init__(self) -> None:
        self.kv = PlainDict()

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(self.kv, prefix=prefix)


class PyMemoryFactory(StoreFactory):
    capabilities = STANDARD_PARTS

    def __init__(self) -> None:
        self.kv = PyMemoryStore()

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(self.kv, prefix=prefix)


class LocalFactory(StoreFactory):
    capabilities = STANDARD_PARTS | {"durable"}

    def __init__(self) -> None:
        self.directory = new_directory()

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(LocalStore(self.directory, mkdir=True), prefix=prefix)

    async def restart(self) -> None:
        gc.collect()

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory)


class FilesFactory(StoreFactory):
    """Plain files, by the key-value store that is ours."""

    capabilities = STANDARD_PARTS | {"durable"}

    def __init__(self) -> None:
        self.directory = new_directory()
        self.kv = FilesKeyValueStore(self.directory)

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(self.kv, prefix=prefix)

    async def restart(self) -> None:
        gc.collect()
        self.kv = await asyncio.to_thread(FilesKeyValueStore, self.directory)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)  # made by the first write


class ObjectMemoryFactory(StoreFactory):
    """An object store with compare-and-swap, in which two handles are like two processes, though only in one."""

    capabilities = STANDARD_PARTS

    def __init__(self) -> None:
        self.kv = MemoryStore()

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(self.kv, prefix=prefix)


class OwnBackend:
    """A `ListedBackend` as somebody might write one, over a dict."""

    is_shared = False

    def __init__(self) -> None:
        self.kept: dict[str, tuple[bytes, int]] = {}
        self.version = 0

    async def read(self, key: str) -> StoredValue | None:
        return StoredValue(*self.kept[key]) if key in self.kept else None

    async def write(self, key: str, data: bytes) -> None:
        self.version += 1
        self.kept[key] = (data, self.version)

    async def write_if(self, key: str, data: bytes, version: Version | None) -> Version | None:
        found = self.kept.get(key)
        if (None if found is None else found[1]) != version:
            return None
        await self.write(key, data)
        return self.version

    async def remove(self, key: str) -> None:
        self.kept.pop(key, None)

    async def names(self, prefix: str) -> list[str]:
        return [key for key in self.kept if key.startswith(prefix)]


class OwnFactory(StoreFactory):
    capabilities = STANDARD_PARTS

    def __init__(self) -> None:
        self.kv = OwnBackend()

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(self.kv, prefix=prefix)


test_dict = contract_tests(DictFactory)
test_files = sampled_contract_tests(FilesFactory)
test_obstore_memory = sampled_contract_tests(ObjectMemoryFactory)
# These repeat what the suite finds out about the three above.
test_own_backend = pytest.mark.chaos(contract_tests(OwnFactory))
test_py_key_value_memory = pytest.mark.chaos(contract_tests(PyMemoryFactory))
test_obstore_local = pytest.mark.chaos(contract_tests(LocalFactory))
