"""Watchers of the stores whose server notifies them of changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

import pytest

from perdure.store import FullStore
from perdure.testing.contract.world import TTL, entry, new_run
from tests.backends.opening import store_at
from tests.backends.registry import MONGO, SERVER_BACKENDS, ServerBackend, on

PATIENCE: Final = 60.0

on_notifying_stores = on(*(backend for backend in SERVER_BACKENDS if backend.listener is not None))


def is_live(server_backend: ServerBackend, store: FullStore) -> bool:
    """Whether the store listens, so that it does not poll."""
    assert server_backend.listener is not None
    return bool(server_backend.listener(store).is_live)


@pytest.fixture
async def store(server_backend: ServerBackend, shared_dsn: str) -> AsyncIterator[FullStore]:
    async with store_at(shared_dsn) as store:
        await store.setup()
        await store.watch(5)  # starts to listen
        assert is_live(server_backend, store)
        yield store


@pytest.fixture
async def other(server_backend: ServerBackend, shared_dsn: str) -> AsyncIterator[FullStore]:
    async with store_at(shared_dsn) as store:
        yield store


@on_notifying_stores
async def test_a_watcher_is_notified_and_does_not_poll(server_backend: ServerBackend, store: FullStore, other: FullStore) -> None:
    for n in range(5):
        watching = asyncio.create_task(store.watch(3600))
        await asyncio.sleep(0)
        await other.create(new_run(f"run-{n}"))
        await asyncio.wait_for(watching, PATIENCE)
        assert is_live(server_backend, store)
    began = time.monotonic()
    await store.watch(1.5)  # nothing happens, and polling would have ended it sooner
    assert time.monotonic() - began >= 1.4


@on_notifying_stores
async def test_what_makes_no_run_due_wakes_no_watcher(server_backend: ServerBackend, store: FullStore, other: FullStore) -> None:
    claim = (await other.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    await asyncio.wait_for(store.watch(1), PATIENCE)
    watching = asyncio.create_task(store.watch(3600))
    await asyncio.sleep(0)
    await other.record(claim.lease, [entry(1)])
    await other.renew([claim.lease], TTL)
    if server_backend is MONGO:  # the others notify of every signal, also of one to a run that is driven
        await other.signal("run", "go", b"1")
    await asyncio.wait([watching], timeout=1)
    assert not watching.done()
    await other.finish(claim.lease, "completed", b"1")
    await asyncio.wait_for(watching, PATIENCE)
