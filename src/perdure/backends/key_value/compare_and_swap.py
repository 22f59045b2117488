"""Compare-and-swap: documents that are changed by it, and its emulation for stores that have none.

A `SwappedDocument` is one small JSON document (schedules and limits, the lock for claims). It is read, changed, and written
if no other writer was faster; otherwise all of that again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar
from weakref import WeakValueDictionary

import msgspec

from perdure.backends.key_value.backend import Backend, PlainBackend, StoredValue, Version
from perdure.backends.key_value.keys import new_nonce
from perdure.errors import PersistenceError

T = TypeVar("T")

_PATIENCE: Final = 60.0
_LONGEST_PAUSE: Final = 0.5
_NONCES: Final = 16
_REMEMBERED: Final = 10_000
# The version of a key under which nothing is stored.
_NOTHING: Final = b""


class NoncedDocument(msgspec.Struct, kw_only=True):
    """A document with the nonces of its last writes, by which a writer whose reply was lost finds its own write."""

    nonces: list[str] = []


D = TypeVar("D", bound=NoncedDocument)


class SwappedDocument(Generic[D]):
    """A document of one type under one key. All of it runs on one event loop."""

    def __init__(self, backend: Backend, key: str, kind: type[D]) -> None:
        self._backend = backend
        self._key = key
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        # Held during a change, so that the changes of this process do not compete with each other.
        self._changing = asyncio.Lock()

    async def read(self) -> D:
        """The document as it is now."""
        found = await self._backend.read(self._key)
        return self._kind() if found is None else self._decode(found.data)

    async def change(self, verb: Callable[[D], T]) -> T:
        """What the verb returns, once what it changed is written."""
        async with self._changing:
            return await self._change(verb)

    async def _change(self, verb: Callable[[D], T]) -> T:
        nonce, pause, deadline = new_nonce(), 0.005, asyncio.get_running_loop().time() + _PATIENCE
        while True:
            found = await self._backend.read(self._key)
            document = self._kind() if found is None else self._decode(found.data)
            before = msgspec.json.encode(document)
            value = verb(document)
            if msgspec.json.encode(document) == before:
                return value
            document.nonces = [*document.nonces[-_NONCES + 1 :], nonce]
            if await self._write(msgspec.json.encode(document), None if found is None else found.version, nonce):
                return value
            if asyncio.get_running_loop().time() > deadline:
                raise PersistenceError("the key-value store", f"others changed {self._key!r} for {_PATIENCE:g} s; try later")
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - to spread out, not to hide
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _write(self, data: bytes, version: Version | None, nonce: str) -> bool:
        """Whether this was written."""
        try:
            if await self._backend.write_if(self._key, data, version) is not None:
                return True
        except Exception:
            # The reply was lost: the nonces of the document say whether it was written.
            if nonce in (await self.read()).nonces:
                return True
            raise
        return nonce in (await self.read()).nonces

    def _decode(self, data: bytes) -> D:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError) as reason:
            raise PersistenceError("the key-value store", f"{self._key!r} cannot be read back ({reason})") from reason


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
