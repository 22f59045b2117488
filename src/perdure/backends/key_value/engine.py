"""What works on one namespace of a key-value store, on one event loop, and who is to be woken.

A store without compare-and-swap has one engine in this process, whoever opens it: only that makes its changes atomic. Any other
gets one for each store that is opened, which is then like another process to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.key_value.adapters import backend_of
from perdure.backends.key_value.backend import Backend, Names, Trait
from perdure.backends.key_value.claims import Claimer
from perdure.backends.key_value.emulated import Emulated
from perdure.backends.key_value.index import ListedNames
from perdure.backends.key_value.lanes import Lanes
from perdure.backends.key_value.names import nonce, root_of
from perdure.backends.key_value.pages import PagedNames
from perdure.backends.key_value.place import Place
from perdure.backends.key_value.settings import SettingsBook
from perdure.backends.key_value.telling import Teller


class Engine:
    """Everything that works on one namespace. All of it runs on one event loop."""

    def __init__(self, backend: Backend, root: str, open_gates: Callable[[], list[Lifecycle]]) -> None:
        self.is_alone = isinstance(backend, Emulated)
        names: Names = PagedNames(backend, f"{root}/x/") if self.is_alone else ListedNames(backend, f"{root}/x/")
        self.place = Place(backend, names, root, is_shared=not self.is_alone)
        self.lanes = Lanes(self.place)
        self.settings = SettingsBook(self.place, self.lanes)
        self.teller = Teller(self.place, self.lanes)
        self.claimer = Claimer(self.place, self.lanes, self.settings, self.teller)
        self._open_gates = open_gates
        # What the others were last seen to have said, or what was said to them.
        self._last_wake = ""
        self._is_to_tell = False
        self._telling: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Wake those who watch, here and, soon, in other processes."""
        self._wake_here()
        self._is_to_tell = not self.is_alone
        if self._is_to_tell and self._telling is None:
            self._telling = asyncio.ensure_future(self._tell())

    def _wake_here(self) -> None:
        for lifecycle in self._open_gates():
            lifecycle.wake()

    async def _tell(self) -> None:
        while self._is_to_tell:
            self._is_to_tell = False
            self._last_wake = nonce()
            with contextlib.suppress(Exception):  # what was to be told is done, and those who watch look by themselves
                await self.place.backend.write(self._wake_key, self._last_wake.encode())
        self._telling = None

    async def settle(self) -> None:
        """Wait until the others were told."""
        while self._telling is not None:
            await asyncio.shield(self._telling)

    async def listen(self) -> None:
        """Wake those who watch here if another process said so since the last time."""
        found = await self.place.backend.read(self._wake_key)
        said = "" if found is None else found.data.decode()
        if said != self._last_wake and self._telling is None:
            self._last_wake = said
            self._wake_here()

    @property
    def _wake_key(self) -> str:
        return f"{self.place.root}/wake"


class EngineRoom:
    """The engine of one namespace, made on the loop where it is used, and again on another when that loop is closed."""

    def __init__(self, kv: Any, trait: Trait, prefix: str) -> None:
        self.kv = kv
        self.trait = trait
        self.prefix = prefix
        # Whether nobody else can change what is here, so that nobody need be asked.
        self.is_alone = isinstance(backend_of(kv), Emulated)
        self.token = nonce()
        # Guards the gates of those who are here, and the loop.
        self._lock = threading.Lock()
        self._gates: WeakSet[Lifecycle] = WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):  # none runs yet
            self._loop = asyncio.get_running_loop()
        self._engine: tuple[asyncio.AbstractEventLoop, Engine] | None = None

    def enter(self, lifecycle: Lifecycle) -> None:
        """One more store is here, until its lifecycle is closed or it is dropped."""
        with self._lock:
            self._gates.add(lifecycle)

    def open_gates(self) -> list[Lifecycle]:
        """The gates of those who are here."""
        with self._lock:
            return [lifecycle for lifecycle in self._gates if not lifecycle.is_closed]

    def pinned(self) -> asyncio.AbstractEventLoop:
        """The loop of a store that may belong to one: where it was made or first used, while that loop lives."""
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.get_running_loop()
            return self._loop

    @property
    def engine(self) -> Engine:
        """The engine of the loop that runs now."""
        loop = asyncio.get_running_loop()
        if self._engine is None or self._engine[0] is not loop:
            self._engine = loop, Engine(backend_of(self.kv), root_of(self.prefix), self.open_gates)
        return self._engine[1]


# Rooms of stores that only one engine may change, by place and prefix.
_alone: Final[WeakValueDictionary[tuple[str, ...], EngineRoom]] = WeakValueDictionary()
# Held while one is looked up or made.
_making: Final = threading.Lock()


def room_of(kv: Any, trait: Trait, prefix: str) -> EngineRoom:
    """The room of this namespace of this store."""
    room = EngineRoom(kv, trait, prefix)
    if not room.is_alone:
        return room
    with _making:
        return _alone.setdefault((*trait.place, prefix), room)


def is_in_use(token: str) -> bool:
    """Whether a store that is open in this process is in the room with this token."""
    with _making:
        return any(room.token == token and room.open_gates() for room in _alone.values())
