"""The event loop on which a store over a key-value store works, and what is checked before its first verb.

A store without compare-and-swap has one `Services` in this process, shared by all stores over it: only that makes its changes
atomic. Any other gets one for each store that is opened, which is then like another process to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Final, Self
from weakref import WeakSet, WeakValueDictionary

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.base.retries import WriteFailure
from perdure.backends.base.single_process import refuse_second_process
from perdure.backends.key_value.adapters import backend_of
from perdure.backends.key_value.backend import Backend, KeyValueTraits, NameIndex
from perdure.backends.key_value.claims import Claimer
from perdure.backends.key_value.emulated_cas import EmulatedBackend
from perdure.backends.key_value.index import ListedNames, PagedNames
from perdure.backends.key_value.keys import new_nonce, root_of
from perdure.backends.key_value.namespace import KeyValueNamespace
from perdure.backends.key_value.run_writer import RunWriter
from perdure.backends.key_value.schedules import Schedules
from perdure.errors import PerdureError, PersistenceError, StoreCapabilityError

STORE: Final = "key_value"
_PROBES: Final = 3


class Services:
    """Everything that works on one namespace: its writer, schedules and claimer. All of it runs on one event loop."""

    def __init__(self, backend: Backend, root: str, open_lifecycles: Callable[[], list[Lifecycle]]) -> None:
        self.is_alone = isinstance(backend, EmulatedBackend)
        names: NameIndex = PagedNames(backend, f"{root}/x/") if self.is_alone else ListedNames(backend, f"{root}/x/")
        self.namespace = KeyValueNamespace(backend, names, root, is_shared=not self.is_alone)
        self.writer = RunWriter(self.namespace)
        self.schedules = Schedules(self.namespace, self.writer)
        self.claimer = Claimer(self.namespace, self.writer, self.schedules)
        self._open_lifecycles = open_lifecycles
        # The content of the wake key as it was last read or written here.
        self._last_wake = ""
        self._must_write_wake = False
        self._wake_writer: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Wake the watchers here and, soon, in other processes."""
        self._wake_here()
        self._must_write_wake = not self.is_alone
        if self._must_write_wake and self._wake_writer is None:
            self._wake_writer = asyncio.ensure_future(self._write_wake())

    def _wake_here(self) -> None:
        for lifecycle in self._open_lifecycles():
            lifecycle.wake()

    async def _write_wake(self) -> None:
        while self._must_write_wake:
            self._must_write_wake = False
            self._last_wake = new_nonce()
            with contextlib.suppress(Exception):  # the change itself is done, and watchers look by themselves after a while
                await self.namespace.backend.write(self._wake_key, self._last_wake.encode())
        self._wake_writer = None

    async def finish_wake(self) -> None:
        """Wait until the wake key is written."""
        while self._wake_writer is not None:
            await asyncio.shield(self._wake_writer)

    async def poll_wake(self) -> None:
        """Wake the watchers here if another process has written the wake key since the last call."""
        found = await self.namespace.backend.read(self._wake_key)
        wake = "" if found is None else found.data.decode()
        if wake != self._last_wake and self._wake_writer is None:
            self._last_wake = wake
            self._wake_here()

    @property
    def _wake_key(self) -> str:
        return f"{self.namespace.root}/wake"


class ServicesByLoop:
    """The services of one namespace, made on the event loop where they are used, and again on another when that is closed."""

    def __init__(self, kv: Any, traits: KeyValueTraits, prefix: str) -> None:
        self.kv = kv
        self.traits = traits
        self.prefix = prefix
        # Whether no other process can write here, so that nothing has to be polled.
        self.is_alone = isinstance(backend_of(kv), EmulatedBackend)
        self.token = new_nonce()
        # Guards the lifecycles of the stores that use this, and the loop.
        self._lock = threading.Lock()
        self._lifecycles: WeakSet[Lifecycle] = WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):  # none runs yet
            self._loop = asyncio.get_running_loop()
        self._current: tuple[asyncio.AbstractEventLoop, Services] | None = None

    def add_store(self, lifecycle: Lifecycle) -> None:
        """Count one more store, until its lifecycle is closed or it is dropped."""
        with self._lock:
            self._lifecycles.add(lifecycle)

    def open_lifecycles(self) -> list[Lifecycle]:
        """The lifecycles of the stores that are open."""
        with self._lock:
            return [lifecycle for lifecycle in self._lifecycles if not lifecycle.is_closed]

    def pinned_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of a key-value store that may belong to one: where it was made or first used, while that loop is open."""
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.get_running_loop()
            return self._loop

    @property
    def current(self) -> Services:
        """The services on the running loop."""
        loop = asyncio.get_running_loop()
        if self._current is None or self._current[0] is not loop:
            self._current = loop, Services(backend_of(self.kv), root_of(self.prefix), self.open_lifecycles)
        return self._current[1]


# The services of key-value stores that only one `Services` may change, by identity and prefix.
_alone: Final[WeakValueDictionary[tuple[str, ...], ServicesByLoop]] = WeakValueDictionary()
# Held while one is looked up or made.
_making: Final = threading.Lock()


def services_of(kv: Any, traits: KeyValueTraits, prefix: str) -> ServicesByLoop:
    """The services of this namespace of this key-value store."""
    services = ServicesByLoop(kv, traits, prefix)
    if not services.is_alone:
        return services
    with _making:
        return _alone.setdefault((*traits.identity, prefix), services)


def _is_in_use(token: str) -> bool:
    """Whether a store that is open in this process uses the services with this token."""
    with _making:
        return any(services.token == token and services.open_lifecycles() for services in _alone.values())


class KeyValueConnections(ServerConnections):
    """The event loop of one store.

    A key-value store with coroutine functions, or an asynchronous context manager, may belong to the loop where it was made; all
    others are used on a loop of ours.
    """

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-key-value")

    def __init__(self, by_loop: ServicesByLoop) -> None:
        self.by_loop = by_loop
        is_async = any(inspect.iscoroutinefunction(getattr(by_loop.kv, name, None)) for name in ("get", "read"))
        # The methods of a client of redis-py are plain functions that return awaitables.
        is_borrowed = is_async or hasattr(type(by_loop.kv), "__aenter__")
        super().__init__(f"the key-value store {type(by_loop.kv).__name__}", is_borrowed=is_borrowed)
        self.durability = by_loop.traits.durability

    @property
    def services(self) -> Services:
        """What works on the namespace. Only on the connections' loop."""
        return self.by_loop.current

    def sibling(self) -> Self:
        """Other connections to the same services."""
        return type(self)(self.by_loop)

    def _pin_loop(self) -> asyncio.AbstractEventLoop:
        return self.by_loop.pinned_loop()

    async def open(self, *, allowed: bool) -> None:  # noqa: ARG002 - there is no schema that could be forbidden
        """Check that the key-value store does what is expected of it."""
        services = self.services
        if services.is_alone:
            await refuse_second_user(self.by_loop, services.namespace.backend, self._owner_key)
        else:
            await refuse_ignored_conditions(services.namespace.backend, f"{services.namespace.root}/probe-{new_nonce()}")
            await services.poll_wake()

    async def close(self) -> None:
        """Let watchers be woken, and another process use the store. The key-value store itself is the caller's to close."""
        services = self.services
        await services.finish_wake()
        if services.is_alone and self.is_ready and not self.by_loop.open_lifecycles():
            with contextlib.suppress(Exception):  # then another process can use it when this one has ended
                await services.namespace.backend.remove(self._owner_key)

    @property
    def _owner_key(self) -> str:
        return f"{self.services.namespace.root}/owner"

    def classify_failure(self, error: BaseException) -> WriteFailure:  # noqa: ARG002 - clients of such stores retry by themselves
        """Nothing is retried here."""
        return WriteFailure.PERMANENT

    def map_error(self, error: BaseException) -> BaseException:
        """What the caller gets. Only the first line of the client's message: the others may show requests."""
        if isinstance(error, PerdureError) or not isinstance(error, Exception):
            return error
        lines = str(error).splitlines() or [""]
        mapped = PersistenceError(self.label, f"{type(error).__name__}: {lines[0][:300]}")
        mapped.__cause__ = error
        return mapped


async def refuse_second_user(by_loop: ServicesByLoop, backend: Backend, key: str) -> None:
    """Raise `StoreCapabilityError` if this namespace, for one process and one object in it, is known to be in use."""
    found = await backend.read(key)
    other, _, token = ("" if found is None else found.data.decode()).partition(" ")

    async def read() -> str:
        return other

    async def write(here: str) -> None:
        if other == here and token != by_loop.token and _is_in_use(token):
            raise StoreCapabilityError(STORE, "way to serve one place through two objects; open both stores over the same one")
        await backend.write(key, f"{here} {by_loop.token}".encode())

    await refuse_second_process(STORE, "compare-and-swap", read, write)


async def refuse_ignored_conditions(backend: Backend, key: str) -> None:
    """Raise `StoreCapabilityError` if the store accepts conditional writes but ignores the conditions.

    A write whose reply was lost looks like that too, but hardly each time.
    """
    for attempt in range(_PROBES):
        if await _keeps_conditions(backend, f"{key}-{attempt}"):
            return
    raise StoreCapabilityError(
        STORE, "compare-and-swap here: this object store does not keep to the condition of a conditional put"
    )


async def _keeps_conditions(backend: Backend, key: str) -> bool:
    try:
        first = await backend.write_if(key, b"1", None)
        is_honest = first is not None and await backend.write_if(key, b"2", None) is None
        second = await backend.write_if(key, b"3", first)
        return is_honest and second is not None and await backend.write_if(key, b"4", first) is None
    except NotImplementedError:
        return False
    finally:
        await backend.remove(key)
