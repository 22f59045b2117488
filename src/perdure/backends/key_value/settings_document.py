"""A small JSON document for the whole namespace (schedules and limits, the lock for claims), changed by compare-and-swap.

It is read, changed, and written if no other writer was faster; otherwise all of that again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from perdure.backends.key_value.backend import Backend, Version
from perdure.backends.key_value.keys import new_nonce
from perdure.errors import PersistenceError

T = TypeVar("T")

_PATIENCE: Final = 60.0
_LONGEST_PAUSE: Final = 0.5
_NONCES: Final = 16


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
