"""Compare-and-swap emulated for a key-value store that has none, right as long as one process uses it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final
from weakref import WeakValueDictionary

from perdure.backends.key_value.backend import PlainBackend, StoredValue, Version

_REMEMBERED: Final = 10_000
# The version of a key under which nothing is stored.
_NOTHING: Final = b""


class EmulatedBackend:
    """A `Backend` over a store without compare-and-swap, right as long as one process uses it. It runs on one event loop.

    The hash of what was last written or read under a key is remembered, so that a change costs no more than its write.
    """

    def __init__(self, plain: PlainBackend) -> None:
        self._plain = plain
        self._known: OrderedDict[str, bytes] = OrderedDict()
        # By key. Held from reading a key until it is written.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, key: str) -> StoredValue | None:
        """What is stored, or None."""
        async with self._lock(key):
            data = await self._plain.read(key)
            self._remember(key, data)
            return None if data is None else StoredValue(data, _hash(data))

    async def write(self, key: str, data: bytes) -> None:
        """Store this in place of what is there."""
        async with self._lock(key):
            await self._put(key, data)

    async def write_if(self, key: str, data: bytes, version: Version | None) -> Version | None:
        """Store this if the version is still the same."""
        async with self._lock(key):
            if key not in self._known:
                self._remember(key, await self._plain.read(key))
            if self._known[key] != (_NOTHING if version is None else version):
                return None
            await self._put(key, data)
            return self._known[key]

    async def remove(self, key: str) -> None:
        """Delete what is there."""
        async with self._lock(key):
            self._known.pop(key, None)
            await self._plain.remove(key)

    async def _put(self, key: str, data: bytes) -> None:
        self._known.pop(key, None)  # until the store replies, what is there is not known
        await self._plain.write(key, data)
        self._remember(key, data)

    def _remember(self, key: str, data: bytes | None) -> None:
        self._known[key] = _NOTHING if data is None else _hash(data)
        self._known.move_to_end(key)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
