"""A server that does not answer, and a driver that loses a cancellation: nothing is waited for without end."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener

from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.mongo import MongoStore
from perdure.backends.mongo.address import MongoAddress
from perdure.backends.mongo.change_stream import ChangeStream
from perdure.backends.mongo.connections import MongoConnections
from perdure.errors import PersistenceError
from perdure.testing.contract.world import new_run
from tests.servers.mongo import MongoServer

Silence: TypeAlias = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def silence(server: MongoServer, monkeypatch: pytest.MonkeyPatch) -> Silence:
    """Stops the server for a while; everything that waits for it has little patience."""
    if not server.is_ours:
        pytest.skip("the server is somebody else's, and must not be stopped")

    @contextmanager
    def silent() -> Iterator[None]:
        # Only now: setting a store up may take an emulated server longer than this.
        with monkeypatch.context() as patch:
            patch.setattr("perdure.backends.mongo.connections.MongoConnections.PATIENCE", 0.0)
            patch.setattr("perdure.backends.mongo.connections._ATTEMPT_WITHIN", 1.0)
            patch.setattr("perdure.backends.mongo.connections._CLOSE_WITHIN", 0.5)
            patch.setattr("perdure.backends.base.change_listener._END_WITHIN", 0.5)
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                yield
            finally:
                os.kill(server.process.pid, signal.SIGCONT)

    return silent


async def refused_in_time(store: MongoStore) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(PersistenceError):
            await store.get("run")
        with pytest.raises(PersistenceError):
            await store.create(new_run("another"))


async def test_a_verb_ends_though_the_server_is_silent(new_dsn: str, silence: Silence) -> None:
    store = MongoStore(f"{new_dsn}&socketTimeoutMS=500&connectTimeoutMS=500&serverSelectionTimeoutMS=500")
    await store.create(new_run())
    with silence():
        await refused_in_time(store)
    assert await store.get("run") is not None
    await store.close()


async def test_a_verb_ends_also_on_a_borrowed_client_that_would_wait_for_ever(new_dsn: str, silence: Silence) -> None:
    client: AsyncMongoClient[dict[str, Any]] = await asyncio.to_thread(AsyncMongoClient, new_dsn)
    store = MongoStore(client=client, database=urlsplit(new_dsn).path[1:])
    await store.create(new_run())
    with silence():
        await refused_in_time(store)
    assert await store.get("run") is not None
    await store.close()
    await client.close()


async def test_a_store_that_watches_is_closed_though_the_server_is_silent(new_dsn: str, silence: Silence) -> None:
    store = MongoStore(new_dsn)
    await store.create(new_run())
    await store.watch(5)
    assert store._change_stream.is_live
    with silence():
        async with asyncio.timeout(20):
            await store.close()


class AfterTheStreamOpened(CommandListener):
    """Does something so many turns of the event loop after the server has opened a change stream."""

    def __init__(self, turns: int, action: Callable[[], object]) -> None:
        self._turns = turns
        self._action: Callable[[], object] | None = action

    def succeeded(self, event: Any) -> None:
        if event.command_name == "aggregate":
            self._turn(self._turns)

    def _turn(self, left: int) -> None:
        if left:
            asyncio.get_running_loop().call_soon(self._turn, left - 1)
        elif self._action is not None:
            action, self._action = self._action, None
            action()

    def started(self, event: Any) -> None: ...
    def failed(self, event: Any) -> None: ...


@pytest.mark.parametrize("turns", range(6))
async def test_listening_ends_whenever_it_is_closed(dsn: str, turns: int) -> None:
    """Before Python 3.12 a cancellation is lost in the turn in which the driver has sent something."""
    closing: list[asyncio.Task[None]] = []
    has_begun = asyncio.Event()

    def close() -> None:
        closing.append(asyncio.ensure_future(listener.close()))
        has_begun.set()

    opened = AfterTheStreamOpened(turns, close)
    url = f"{dsn}&socketTimeoutMS=30000"  # as a store's own client has it; without one the driver sends without `wait_for`
    client: AsyncMongoClient[dict[str, Any]] = await asyncio.to_thread(AsyncMongoClient, url, event_listeners=[opened])
    place = MongoAddress("borrowed", urlsplit(dsn).path[1:])
    listener = ChangeStream(MongoConnections(place, "perdure", url=None, client=client), Lifecycle("a store"))
    await listener.start()
    async with asyncio.timeout(20):
        await has_begun.wait()
    await asyncio.wait(closing, timeout=20)  # which does not cancel it once more
    assert closing[0].done()
    assert not listener.is_live, "it ended, and was not left behind"
    await client.close()
