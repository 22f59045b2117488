"""One JSON document that is changed by compare-and-swap: schedules and limits, and whose turn it is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from perdure.backends.key_value.backend import Backend
from perdure.backends.key_value.names import nonce
from perdure.errors import PersistenceError

T = TypeVar("T")

_PATIENCE: Final = 60.0
_LONGEST_PAUSE: Final = 0.5
_NONCES: Final = 16


class Signed(msgspec.Struct, kw_only=True):
    """A document that knows by whom it was last written."""

    nonces: list[str] = []


S = TypeVar("S", bound=Signed)


class Cell(Generic[S]):
    """A document of one type under one key. All of it runs on one event loop."""

    def __init__(self, backend: Backend, key: str, kind: type[S]) -> None:
        self._backend = backend
        self._key = key
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        # Held during a change, so that those of this process do not get into each other's way.
        self._changing = asyncio.Lock()

    async def read(self) -> S:
        """The document as it is now."""
        found = await self._backend.read(self._key)
        return self._kind() if found is None else self._decoded(found.data)

    async def change(self, verb: Callable[[S], T]) -> T:
        """What the verb gives, once what it changed is kept."""
        async with self._changing:
            return await self._change(verb)

    async def _change(self, verb: Callable[[S], T]) -> T:
        mark, pause, deadline = nonce(), 0.005, asyncio.get_running_loop().time() + _PATIENCE
        while True:
            found = await self._backend.read(self._key)
            document = self._kind() if found is None else self._decoded(found.data)
            before = msgspec.json.encode(document)
            answer = verb(document)
            if msgspec.json.encode(document) == before:
                return answer
            document.nonces = [*document.nonces[-_NONCES + 1 :], mark]
            if await self._written(msgspec.json.encode(document), None if found is None else found.version, mark):
                return answer
            if asyncio.get_running_loop().time() > deadline:
                raise PersistenceError("the key-value store", f"others changed {self._key!r} for {_PATIENCE:g} s; try later")
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - to spread out, not to hide
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _written(self, data: bytes, version: object, mark: str) -> bool:
        try:
            if await self._backend.write_if(self._key, data, version) is not None:
                return True
        except Exception:
            # The answer is lost: the document says whether it was written.
            if mark in (await self.read()).nonces:
                return True
            raise
        return mark in (await self.read()).nonces

    def _decoded(self, data: bytes) -> S:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError) as reason:
            raise PersistenceError("the key-value store", f"{self._key!r} cannot be read back ({reason})") from reason
