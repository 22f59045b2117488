"""Stores whose verbs run on the loop of their connections, and what that means for closing, forking and dropping them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

from perdure.backends.base.batching import Batcher, Request
from perdure.backends.base.change_listener import POLL_EVERY, ChangeListener
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.lifecycle import Lifecycle
from perdure.errors import PersistenceError
from perdure.model.id_checks import ChecksIds
from perdure.model.ids import check_namespace
from perdure.snapshots.save_load import SavesSnapshots
from perdure.store import Durability

T = TypeVar("T")
H = TypeVar("H", bound=ServerConnections)
Q = TypeVar("Q", bound=Request)
A = TypeVar("A")

_logger: Final = logging.getLogger("perdure")


class ServerBacked(Generic[H]):
    """A client of a server, whose verbs run on the loop of its connections."""

    def __init__(self, connections: H, *, auto_migrate: bool = True) -> None:
        self._auto_migrate = auto_migrate
        self._attach(connections)

    def _attach(self, connections: H) -> None:
        self._connections = connections
        self._lifecycle = Lifecycle(connections.label)
        self._process = os.getpid()
        self._on_attach()
        # A store that is dropped without `close` closes its connections too.
        self._release = weakref.finalize(self, connections.abandon, self._make_closer())
        self._release.atexit = False

    def _on_attach(self) -> None:
        """Create what belongs to the present connections and lifecycle: batchers, listeners."""

    def _make_closer(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """A function that closes everything, on the connections loop. It must not refer to this object."""
        return self._connections.close

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be pickled: send its DSN, and open one by it in the other process")

    async def close(self) -> None:
        """Wait for what was submitted, and close the connections unless they were borrowed."""
        empty = self._lifecycle.close()
        if empty is None:
            return
        await asyncio.shield(asyncio.wrap_future(empty))
        self._release.detach()
        if self._connections.is_reachable:
            await self._connections.run(self._make_closer()())

    async def _submit(self, verb: Callable[[], Coroutine[Any, Any, T]], *, needs_schema: bool = True) -> T:
        """Run the verb on the connections loop. It is inside the lifecycle until it has ended, also when the caller has left."""
        self._enter()
        try:
            running = self._connections.start(self._inside(verb, needs_schema=needs_schema))
        except PersistenceError:
            self._lifecycle.leave()
            raise
        return await asyncio.shield(running)

    def _enqueue(self, batcher: Callable[[], Batcher[Q, A]], request: Q) -> Awaitable[A]:
        """The batcher's reply: just a future of the caller's loop, as every step waits for one.

        `batcher` is a function because a forked child has other batchers after `_submit` has reopened it.
        """
        if not self._connections.is_ready or self._process != os.getpid():
            return self._submit(lambda: _put_and_wait(batcher(), request))
        return self._enter_or_fail() or batcher().put_threadsafe(request, self._connections.call, self._lifecycle.leave)

    def _enter_or_fail(self) -> asyncio.Future[Any] | None:
        """None after entering the lifecycle; or a future with the error that it is closed."""
        try:
            self._lifecycle.enter()
        except PersistenceError as closed:
            return _failed_future(closed)
        return None

    def _enter(self) -> None:
        self._reopen_if_forked()
        self._lifecycle.enter()

    def _reopen_if_forked(self) -> None:
        if self._process != os.getpid():
            self._reopen_in_child()

    def _reopen_in_child(self) -> None:
        """In a forked child: the connections, and what was in flight on them, are the parent's."""
        connections = self._connections
        if connections.is_borrowed:
            raise PersistenceError(
                connections.label, "borrowed connections cannot be used in a forked process; open others there"
            )
        self._release.detach()
        connections.leak_after_fork()
        self._attach(connections.sibling())

    async def _inside(self, verb: Callable[[], Coroutine[Any, Any, T]], *, needs_schema: bool) -> T:
        lifecycle = self._lifecycle
        try:
            if needs_schema and not self._connections.is_ready:
                await self._connections.ensure_open(allowed=self._auto_migrate)
            return await verb()
        finally:
            lifecycle.leave()


async def _put_and_wait(batcher: Batcher[Q, A], request: Q) -> A:
    return await batcher.put(request)


def _failed_future(error: PersistenceError) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


class ServerStore(ServerBacked[H], ChecksIds, SavesSnapshots):
    """What all stores on a server share. A subclass has the verbs."""

    def __init__(self, connections: H, *, prefix: str, auto_migrate: bool) -> None:
        self._namespace = check_namespace(prefix)
        super().__init__(connections, auto_migrate=auto_migrate)

    def _attach(self, connections: H) -> None:
        self._owner = f"{socket.gethostname()}/{os.getpid()}"
        super()._attach(connections)

    @property
    def durability(self) -> Durability:
        """What an acknowledged write survives, as the server said at set-up; `disk` before that."""
        return self._connections.durability

    async def setup(self) -> None:
        """Create or upgrade the schema, also with `auto_migrate=False`."""
        await self._submit(lambda: self._connections.set_up(allowed=True), needs_schema=False)

    def sibling(self) -> Self:
        """Another handle on the same runs, with connections of its own; with borrowed ones it shares those, and their loop."""
        sibling = object.__new__(type(self))
        sibling._namespace = self._namespace
        sibling._auto_migrate = self._auto_migrate
        sibling._attach(self._connections.sibling())
        return sibling

    async def _submit_renewal(self, ttl: float, renew: Callable[[], Awaitable[T]]) -> T:
        """Renew leases. When the event loop of borrowed connections was blocked for long, warn of it."""
        called_at = time.monotonic()

        async def on_time() -> T:
            late = time.monotonic() - called_at
            if self._connections.is_borrowed and late > ttl / 3:
                _logger.warning("the event loop of the borrowed pool was blocked for %.1f s; leases may be lost by that", late)
            return await renew()

        return await self._submit(on_time)

    async def _watch(self, listener: ChangeListener, timeout: float, *, items: bool) -> None:
        """Return when something may be due, at the latest after `timeout` seconds; where nothing is heard, after a short one."""
        watcher = self._lifecycle.watch(items=items)  # from here on closing the store ends the wait
        try:
            if listener.is_live:
                await asyncio.wait([watcher.future], timeout=max(0.0, timeout))
                return
            # A change made before the listener was live may be what the caller waits for, so this wait ends with the start.
            starting = asyncio.ensure_future(self._submit(listener.start))
            starting.add_done_callback(_retrieve_exception)
            await asyncio.wait([starting], timeout=max(0.0, timeout))
            if not listener.is_live:
                await asyncio.wait([watcher.future], timeout=max(0.0, min(timeout, POLL_EVERY)))
        finally:
            self._lifecycle.unwatch(watcher)


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Keep asyncio from logging it: the watcher meets the error at its next verb."""
    if not task.cancelled():
        task.exception()
