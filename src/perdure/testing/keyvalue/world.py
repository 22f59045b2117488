"""The world of a case: one fresh key-value store, and a handle on it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar, Final, NamedTuple

from perdure.kv.protocol import KeyValueStore, maybe_await

PATIENCE: Final = 30.0  # for a second to pass by the store's clock, and for what has expired to be removed
_EVERY: Final = 0.02


class KeyValueFactory(ABC):
    """One fresh store. The suite makes one for each case, opens handles on it, and closes those that can be closed.

    It takes no arguments, and keeps what it needs to reach the store but no open handle: it is pickled and sent to other
    processes, so its class must be importable by name.
    """

    is_shared: ClassVar[bool] = True
    """Whether other processes see the same."""
    most_bytes: ClassVar[int] = 64 << 20
    """How many bytes of UTF-8 a value may have; with more it must be refused."""

    @abstractmethod
    async def open(self) -> KeyValueStore:
        """Another handle on this store."""

    @abstractmethod
    async def count(self) -> int:
        """How many texts are physically there, expired ones too: in the table, the directory, the server's memory."""

    async def close(self) -> None:  # noqa: B027 - a store may have nothing to remove
        """Remove the store, once every handle is closed."""


class KeyValueWorld:
    """A store under test, and a handle on it."""

    def __init__(self, factory: KeyValueFactory, kv: KeyValueStore) -> None:
        self.factory = factory
        self.kv = kv

    async def seen(self, key: str) -> tuple[str | None, bool, list[str]]:
        """What three methods say about a key."""
        listed = await maybe_await(self.kv.keys("*"))
        return await maybe_await(self.kv.get(key)), await maybe_await(self.kv.exists(key)), [one for one in listed if one == key]

    async def expired(self, key: str) -> None:
        """Wait until the key has expired."""
        await until(lambda: _is_none(self.kv, key), f"{key!r} to expire")

    async def swept(self, left: int) -> None:
        """Write until expired texts are removed and this many are left."""

        async def is_swept() -> bool:
            await maybe_await(self.kv.set("writer", "1"))
            return await self.factory.count() == left

        await until(is_swept, f"all but {left} texts to be removed")


async def _is_none(kv: KeyValueStore, key: str) -> bool:
    return await maybe_await(kv.get(key)) is None


async def until(is_so: Callable[[], Awaitable[bool]], what: str) -> None:
    """Poll until the condition holds."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not await is_so():
        assert asyncio.get_running_loop().time() < deadline, f"waited {PATIENCE:g} s for {what}"
        await asyncio.sleep(_EVERY)


@asynccontextmanager
async def open_handle(factory: KeyValueFactory) -> AsyncIterator[KeyValueStore]:
    """Another handle, closed in the end if it can be."""
    kv = await factory.open()
    try:
        yield kv
    finally:
        close = getattr(kv, "close", None)
        if close is not None:
            await maybe_await(close())


class KeyValueCase(NamedTuple):
    """One promise."""

    name: str
    check: Callable[[KeyValueWorld], Awaitable[None]]
    needs_sharing: bool

    async def run(self, factory: KeyValueFactory) -> None:
        """Raise unless the fresh store keeps the promise."""
        try:
            async with open_handle(factory) as kv:
                await self.check(KeyValueWorld(factory, kv))
        finally:
            await factory.close()
