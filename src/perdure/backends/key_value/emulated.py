"""Compare-and-swap for a store that has none, right as long as one process uses it.

What was last written or read under a key is remembered by its hash, so that a change costs no more than its write.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final
from weakref import WeakValueDictionary

from perdure.backends.key_value.backend import Found, Plain, Version

_REMEMBERED: Final = 10_000
# As the version of a key under which nothing is kept.
_NOTHING: Final = b""


class Emulated:
    """A `Backend` over a plain store. All of it runs on one event loop."""

    def __init__(self, plain: Plain) -> None:
        self._plain = plain
        self._known: OrderedDict[str, bytes] = OrderedDict()
        # Held from looking at a key until it is written.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, key: str) -> Found | None:
        """What is kept, or None."""
        async with self._lock(key):
            data = await self._plain.read(key)
            self._remember(key, data)
            return None if data is None else Found(data, _hash(data))

    async def write(self, key: str, data: bytes) -> None:
        """Keep this instead of what is there."""
        async with self._lock(key):
            await self._put(key, data)

    async def write_if(self, key: str, data: bytes, version: Version | None) -> Version | None:
        """Keep this if nobody else has written since."""
        async with self._lock(key):
            if key not in self._known:
                self._remember(key, await self._plain.read(key))
            if self._known[key] != (_NOTHING if version is None else version):
                return None
            await self._put(key, data)
            return self._known[key]

    async def remove(self, key: str) -> None:
        """Keep nothing."""
        async with self._lock(key):
            self._known.pop(key, None)
            await self._plain.remove(key)

    async def _put(self, key: str, data: bytes) -> None:
        self._known.pop(key, None)  # until it is answered nobody knows what is there
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
