"""The fence of the SQL stores that lock rows, with a second transaction held open at the critical moment.

SQLite is not among them: it has one writer, so no second write transaction can be open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

import pytest

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest
from perdure.backends.postgres import claiming as postgres_claiming
from perdure.backends.postgres import recording as postgres_recording
from perdure.backends.postgres.channel import PostgresChannel
from perdure.backends.sql import claims, recording, runs
from perdure.backends.sql.recording import Write
from perdure.backends.sql.session import Session
from perdure.backends.sql.store import SqlStore
from perdure.errors import LeaseLost
from perdure.model.records import Lease, Pulse
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run, run_row
from tests.backends.opening import store_at
from tests.backends.registry import BACKENDS, MYSQL, POSTGRES, Backend, on

PATIENCE: Final = 60.0

Store: TypeAlias = SqlStore[Any]

on_row_locking_stores = on(POSTGRES, MYSQL, BACKENDS["sql_client-postgres"], BACKENDS["sql_client-mysql"])


@pytest.fixture
async def store(backend: Backend, shared_dsn: str) -> AsyncIterator[Store]:
    async with _store_at(shared_dsn) as store:
        yield store


@pytest.fixture
async def other(backend: Backend, shared_dsn: str) -> AsyncIterator[Store]:
    """A second handle, whose transactions are held open."""
    async with _store_at(shared_dsn) as store:
        yield store


@asynccontextmanager
async def _store_at(dsn: str) -> AsyncIterator[Store]:
    async with store_at(dsn) as store:
        assert isinstance(store, SqlStore)
        await store.setup()
        yield store


async def leased(store: Store, run_id: str = "run") -> Lease:
    claim = (await store.create(new_run(run_id), ttl=TTL, now=NOW)).claim
    assert claim is not None
    return claim.lease


@asynccontextmanager
async def held_open(store: Store, work: Callable[[Session], Awaitable[object]]) -> AsyncIterator[None]:
    """A transaction in which the work is done, and which is committed when the context is left."""
    # Futures of threads: the connections may have a loop of their own.
    is_done: Future[None] = Future()
    is_released: Future[None] = Future()

    async def hold(db: Session, _: bool) -> None:
        await work(db)
        is_done.set_result(None)
        await asyncio.wrap_future(is_released)

    connections = store._connections
    holding = asyncio.ensure_future(connections.run(connections.perform(store._namespace, hold)))
    await asyncio.wait([holding, asyncio.wrap_future(is_done)], return_when=asyncio.FIRST_COMPLETED)
    try:
        assert not holding.done()
        yield
    finally:
        is_released.set_result(None)
        await holding


async def is_held_up(task: asyncio.Future[Any]) -> bool:
    await asyncio.wait([task], timeout=0.2)
    return not task.done()


async def _record(db: Session, lease: Lease) -> None:
    writes = [Write.record(lease, [entry(1)], [])]
    record_all = postgres_recording.record_all if isinstance(db.channel, PostgresChannel) else recording.record_all
    (pulse,) = await record_all(db, writes)
    assert isinstance(pulse, Pulse)


async def _claim(db: Session) -> object:
    request = ClaimRequest(ClaimFilter.of([("flow", 1)], None), 1, 10**7, "taker", EXPIRED)
    if isinstance(db.channel, PostgresChannel):
        return await postgres_claiming._claim_unlimited(db, request)
    return await claims.claim(db, request)


async def _acquire(db: Session) -> object:
    return await claims.acquire(db, "run", 10**7, "taker", "token", EXPIRED, due_only=True)


async def _restore(db: Session) -> object:
    return await runs.restore(db, run_row(), [], [], EXPIRED)


@on_row_locking_stores
async def test_a_record_held_open_is_seen_by_the_takeover(store: Store, other: Store) -> None:
    lease = await leased(store)
    async with held_open(other, lambda db: _record(db, lease)):
        assert (await store.claim(1, TTL, [("flow", 1)], now=EXPIRED)).claims == []  # passed over while it is locked
        acquiring = asyncio.ensure_future(store.acquire("run", TTL, now=EXPIRED))
        assert await is_held_up(acquiring)
    claim = await acquiring
    assert claim is not None
    assert claim.journal == [entry(1)]
    with pytest.raises(LeaseLost):
        await store.record(lease, [entry(2)], now=EXPIRED)


@on_row_locking_stores
async def test_a_record_that_waits_for_a_takeover_is_refused_and_holds_up_no_other_run(store: Store, other: Store) -> None:
    lease, unlocked = await leased(store), await leased(store, "unlocked")
    async with held_open(other, _acquire):
        writing = asyncio.ensure_future(store.record(lease, [entry(1)], now=EXPIRED))
        assert await is_held_up(writing)
        async with asyncio.timeout(PATIENCE):
            await store.record(unlocked, [entry(1)], now=EXPIRED)
            await store.signal("unlocked", "go", b"1")
            await store.renew([unlocked], TTL)
        assert not writing.done()
    with pytest.raises(LeaseLost):
        await writing
    assert await store.journal("run") == []


async def _record_entry(store: Store, lease: Lease) -> None:
    await store.record(lease, [entry(1)], now=EXPIRED)


async def _finish(store: Store, lease: Lease) -> None:
    await store.finish(lease, "completed", b"1", entries=[entry(1)], now=EXPIRED)


async def _suspend(store: Store, lease: Lease) -> None:
    await store.suspend(lease, wake_at=None, entries=[entry(1)], now=EXPIRED)


@on_row_locking_stores
@pytest.mark.parametrize("write", [_record_entry, _finish, _suspend])
@pytest.mark.parametrize("take_over", [_claim, _acquire, _restore])
async def test_a_takeover_that_is_not_committed_yet_keeps_writes_waiting(
    store: Store,
    other: Store,
    take_over: Callable[[Session], Awaitable[object]],
    write: Callable[[Store, Lease], Coroutine[Any, Any, None]],
) -> None:
    lease = await leased(store)
    async with held_open(other, take_over):
        writing = asyncio.create_task(write(store, lease))
        assert await is_held_up(writing)
    with pytest.raises(LeaseLost):
        await writing
    assert await store.journal("run") == []
    row = await store.get("run")
    assert row is not None
    assert row.status in {"running", "pending"}  # as the takeover left it


@on_row_locking_stores
async def test_an_open_transaction_holds_up_neither_records_nor_renewals(store: Store) -> None:
    lease, unlocked = await leased(store), await leased(store, "unlocked")
    async with asyncio.timeout(PATIENCE), store.transaction(lease) as transaction:
        await store.record(lease, [entry(1)], now=NOW)
        assert await store.renew([lease, unlocked], TTL, now=NOW + 1) == [Pulse(0, False), Pulse(0, False)]
        assert not (await store.create(new_run(), now=NOW)).is_new
        await transaction.record([entry(2)])
    assert [line.seq for line in await store.journal("run")] == [1, 2]
    row = await store.get("unlocked")
    assert row is not None
    assert row.updated_at == NOW + 1


@on(POSTGRES, BACKENDS["sql_client-postgres"])
async def test_an_open_transaction_holds_up_neither_signals_nor_a_cancel(store: Store) -> None:
    lease = await leased(store)
    async with asyncio.timeout(PATIENCE), store.transaction(lease) as transaction:
        await store.signal("run", "go", b"1", now=NOW)
        await store.cancel("run", now=NOW)
        assert await transaction.record([entry(1)]) == Pulse(1, True)
