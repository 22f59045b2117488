"""Where the verbs of a store over a key-value store run, and what is made sure before the first of them does."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import ClassVar, Final, Self

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.failures import WriteFailure
from perdure.backends.base.process_owner import Owner, Owners
from perdure.backends.key_value.backend import Backend
from perdure.backends.key_value.engine import Engine, EngineRoom, is_in_use
from perdure.backends.key_value.names import nonce
from perdure.errors import PerdureError, PersistenceError, StoreCapabilityError

STORE: Final = "key_value"
_PROBES: Final = 3


class KeyValueConnections(ServerConnections):
    """The loop of one store. What has coroutine functions may belong to the loop where it was made; all else lives on ours."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-key-value")

    def __init__(self, room: EngineRoom) -> None:
        self.room = room
        is_borrowed = any(inspect.iscoroutinefunction(getattr(room.kv, name, None)) for name in ("get", "read"))
        super().__init__(f"the key-value store {type(room.kv).__name__}", is_borrowed=is_borrowed)
        self.durability = room.trait.durability

    @property
    def engine(self) -> Engine:
        """What works here. Only on the connections loop."""
        return self.room.engine

    def sibling(self) -> Self:
        """Another way to the same engine."""
        return type(self)(self.room)

    def _pin_loop(self) -> asyncio.AbstractEventLoop:
        return self.room.pinned()

    async def open(self, *, allowed: bool) -> None:  # noqa: ARG002 - there is no schema that could be forbidden
        """Make sure that the store does what is expected of it."""
        engine = self.engine
        if engine.is_alone:
            await refuse_company(self.room, engine.place.backend, self._owner_key)
        else:
            await refuse_pretence(engine.place.backend, f"{engine.place.root}/probe-{nonce()}")
            await engine.listen()

    async def close(self) -> None:
        """Let those who watch be told, and others have the place. The key-value store is the caller's to close."""
        engine = self.engine
        await engine.settle()
        if engine.is_alone and self.is_ready and not self.room.open_gates():
            with contextlib.suppress(Exception):  # then others can have it when this process has ended
                await engine.place.backend.remove(self._owner_key)

    @property
    def _owner_key(self) -> str:
        return f"{self.engine.place.root}/owner"

    def classify_failure(self, error: BaseException) -> WriteFailure:  # noqa: ARG002 - clients of such stores try again by themselves
        """Nothing is tried again here."""
        return WriteFailure.PERMANENT

    def map_error(self, error: BaseException) -> BaseException:
        """What the caller gets. Only the first line of what the store says: the others may show requests."""
        if isinstance(error, PerdureError) or not isinstance(error, Exception):
            return error
        lines = str(error).splitlines() or [""]
        told = PersistenceError(self.label, f"{type(error).__name__}: {lines[0][:300]}")
        told.__cause__ = error
        return told


async def refuse_company(room: EngineRoom, backend: Backend, key: str) -> None:
    """Raise `StoreCapabilityError` if this place, which only one process may use through one object, is known to be in use.

    That is certain only of processes on this machine; that there is none elsewhere is up to whoever starts them.
    """
    owners = Owners()
    here = await asyncio.to_thread(lambda: owners.here)
    found = await backend.read(key)
    other, _, token = ("" if found is None else found.data.decode()).partition(" ")
    if other == here and token != room.token and is_in_use(token):
        raise StoreCapabilityError(STORE, "way to serve one place through two objects; open both stores over the same one")
    if other not in ("", here) and await asyncio.to_thread(_lives_here, owners, other):
        known = Owner.parse(other)
        who = other if known is None else known.label
        raise StoreCapabilityError(STORE, f"way to serve two processes without compare-and-swap, and {who} has it open")
    await backend.write(key, f"{here} {room.token}".encode())


def _lives_here(owners: Owners, text: str) -> bool:
    """Whether this surely is a process of this machine that has not ended."""
    owner, here = Owner.parse(text), Owner.parse(owners.here)
    if owner is None or here is None or "-" in (owner.boot, owner.start, owner.namespaces):
        return False
    return owner[:3] == here[:3] and not owners.gone(text)


async def refuse_pretence(backend: Backend, key: str) -> None:
    """Raise `StoreCapabilityError` if a store takes conditional writes but does not mind the conditions.

    A write whose answer was lost looks like that too, but hardly each time.
    """
    for attempt in range(_PROBES):
        if await _minds_conditions(backend, f"{key}-{attempt}"):
            return
    raise StoreCapabilityError(
        STORE, "compare-and-swap here: this object store does not keep to the condition of a conditional put"
    )


async def _minds_conditions(backend: Backend, key: str) -> bool:
    try:
        first = await backend.write_if(key, b"1", None)
        is_honest = first is not None and await backend.write_if(key, b"2", None) is None
        second = await backend.write_if(key, b"3", first)
        return is_honest and second is not None and await backend.write_if(key, b"4", first) is None
    except NotImplementedError:
        return False
    finally:
        await backend.remove(key)
