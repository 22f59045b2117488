"""Purging while others use the runs that it found old, at every moment: between any two statements that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from perdure.errors import RunNotFound
from perdure.store import FullStore
from perdure.testing.contract.world import NOW, TTL, at, new_run, outcomes
from tests.backends.opening import store_at
from tests.backends.registry import MYSQL, POSTGRES, ServerBackend, on
from tests.wire import Wire

OLD: Final = 100.0
# More statements than any store needs for it.
MOST_REPLIES: Final = 20


@pytest.fixture
async def store(shared_dsn: str) -> AsyncIterator[FullStore]:
    async with store_at(shared_dsn) as store:
        yield store


@pytest.fixture
async def watched(server_backend: ServerBackend, wire: Wire, store: FullStore) -> AsyncIterator[FullStore]:
    """Another handle, behind the proxy, that has purged before: it has a connection, and the server knows its statements."""
    async with store_at(server_backend.through(wire)) as watched:
        await end(store, "warm")
        await watched.purge(OLD, now=at(2 * OLD))
        yield watched


async def end(store: FullStore, run_id: str) -> None:
    claim = (await store.create(new_run(run_id), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await store.finish(claim.lease, "failed", b"1", now=NOW)


async def end_again(store: FullStore, run_id: str) -> None:
    await store.reopen(run_id, (), now=at(OLD))
    claim = await store.acquire(run_id, TTL, now=at(OLD))
    assert claim is not None
    await store.finish(claim.lease, "failed", b"2", now=at(OLD))


@on(POSTGRES, MYSQL)  # the others lock it before they look
async def test_a_run_that_ends_again_while_purge_looks_is_not_deleted(store: FullStore, watched: FullStore, wire: Wire) -> None:
    kept = 0
    for number in range(1, MOST_REPLIES):
        run_id = f"run-{number}"
        await end(store, run_id)
        wire.hold(number)
        purging = asyncio.create_task(watched.purge(OLD, now=at(1.5 * OLD)))
        holding = asyncio.create_task(asyncio.to_thread(wire.held.wait))
        await asyncio.wait([purging, holding], return_when=asyncio.FIRST_COMPLETED)
        is_over = purging.done()
        ending = asyncio.create_task(end_again(store, run_id))
        await asyncio.wait([ending], timeout=0.1)  # it waits if purge has locked the run
        wire.let_go()
        await asyncio.wait([purging, holding])
        (answer,) = await outcomes([ending])
        row = await store.get(run_id)
        if row is None:
            assert isinstance(answer, RunNotFound)
        else:
            assert (answer, row.status, row.outcome) == (None, "failed", b"2")
        assert purging.result() == (row is None)
        kept += row is not None
        if is_over:
            break
    assert is_over
    assert kept
