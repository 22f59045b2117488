"""Connections that fall silent: nothing arrives on them any more, and nothing says so. Others to the same server are fine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

import pytest

from perdure import Context, Ok, Runtime, workflow
from perdure.backends.base import change_listener, retries
from perdure.backends.libsql import hrana
from perdure.backends.redis import driver as redis_driver
from perdure.engine.heartbeat import MARGIN
from perdure.errors import PersistenceError
from perdure.options import LEASE_TTL
from perdure.store import FullStore
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run, outcomes
from tests.backends.opening import store_at
from tests.backends.registry import LIBSQL, MONGO, MYSQL, POSTGRES, SERVER_BACKENDS, ServerBackend, on
from tests.wire import Swallowed, Wire

# How long a server may be silent in these tests, instead of seconds.
SOON: Final = 0.4
PATIENCE: Final = 60.0
# How soon a silence is over, with that; an emulated server included.
WITHIN: Final = 10.0

both_ways = pytest.mark.parametrize("swallowed", ["requests", "replies"])


def limit_silence(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a connection be given up after so many seconds of silence, whatever the store."""
    for module, name in (
        (retries, "REPLY_WITHIN"), (hrana, "REQUEST_TIMEOUT"), (redis_driver, "REPLY_WITHIN"), (change_listener, "CHECK_EVERY"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def _impatient(server_backend: ServerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_silence(monkeypatch, SOON * server_backend.pace)


@pytest.fixture
async def store(server_backend: ServerBackend, wire: Wire, _impatient: None) -> AsyncIterator[FullStore]:
    """A store that has several connections, all of which have been used."""
    async with store_at(server_backend.through(wire)) as store:
        await asyncio.gather(*(store.create(new_run(f"warm-{n}")) for n in range(5)))
        await asyncio.gather(*(store.get(f"warm-{n}") for n in range(5)))
        yield store


@both_ways
async def test_a_step_is_recorded_on_another_connection_and_called_once(
    server_backend: ServerBackend, store: FullStore, wire: Wire, swallowed: Swallowed
) -> None:
    calls: list[float] = []

    def charge() -> int:
        calls.append(time.monotonic())
        wire.fall_silent(swallowed)
        return 1

    @workflow
    async def order(ctx: Context) -> int:
        return await ctx.step(charge)

    async with asyncio.timeout(PATIENCE):
        assert await order.run(id="order", store=store) == Ok(1)
    assert len(calls) == 1
    assert time.monotonic() - calls[0] < WITHIN


@both_ways
async def test_everything_that_is_in_flight_is_sent_again(store: FullStore, wire: Wire, swallowed: Swallowed) -> None:
    created = [await store.create(new_run(f"run-{n}"), ttl=PATIENCE) for n in range(4)]
    leases = [one.claim.lease for one in created if one.claim is not None]
    wire.fall_silent(swallowed)
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(
            *(store.record(lease, [entry(1)]) for lease in leases),
            store.signal("run-0", "go", b"1"),
            store.renew(leases, PATIENCE),
            store.create(new_run("another")),
            store.get("run-0"),
        )
    assert time.monotonic() - began < WITHIN
    assert [await store.journal(f"run-{n}") for n in range(4)] == [[entry(1)]] * 4
    assert len(await store.inbox("run-0")) == 1


@on(POSTGRES, MYSQL)
async def test_the_locks_of_a_silent_transaction_are_released(store: FullStore, wire: Wire) -> None:
    """Its server keeps it open: it has not heard that the connection was closed."""
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    lease = claim.lease

    async def record_in_silence() -> None:
        async with store.transaction(lease) as transaction:  # locks the run
            wire.fall_silent("requests")
            await transaction.record([entry(1)])

    async with asyncio.timeout(PATIENCE):
        assert isinstance((await outcomes([record_in_silence()]))[0], PersistenceError)
    async with asyncio.timeout(WITHIN):
        assert await store.acquire("run", TTL, now=EXPIRED) is not None
    assert await store.journal("run") == []


@on(*(backend for backend in SERVER_BACKENDS if backend.listener is not None))
async def test_a_watcher_does_not_rely_on_a_silent_connection(
    server_backend: ServerBackend, store: FullStore, shared_dsn: str, wire: Wire
) -> None:
    assert server_backend.listener is not None
    await store.watch(5)  # starts to listen
    assert server_backend.listener(store).is_live
    wire.fall_silent("replies")
    async with store_at(shared_dsn) as other, asyncio.timeout(WITHIN):
        await other.create(new_run())
        await store.watch(3600)
        while not server_backend.listener(store).is_live:  # listens again, after a pause since the connection was new
            await store.watch(3600)


@on(*(backend for backend in SERVER_BACKENDS if backend is not MONGO))  # emulated, it would take half a minute
async def test_a_lease_outlasts_a_silent_connection(
    server_backend: ServerBackend, shared_dsn: str, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store's own statements wait longer for a reply than the lease lasts.

    On libSQL they must not: a process writes there one statement after the other, renewals included.
    """
    ttl, calls = 2.0, 0
    limit_silence(monkeypatch, ttl * (0.4 if server_backend is LIBSQL else 1.5))

    async def charge() -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(ttl / 2)  # the heartbeat has a connection by now
        wire.fall_silent("requests")
        await asyncio.sleep(1.2 * ttl)
        return 1

    @workflow
    async def order(ctx: Context) -> int:
        return await ctx.step(charge)

    async with (
        asyncio.timeout(PATIENCE),
        store_at(server_backend.through(wire)) as store,
        Runtime(store, [order], lease_ttl=ttl) as runtime,
        store_at(shared_dsn) as direct,
    ):
        run = await runtime.start(order, id="order")
        async with Runtime(direct, [order]):  # would drive it again
            assert await run == 1
    assert calls == 1


def test_a_silence_on_libsql_ends_while_a_lease_can_still_be_renewed() -> None:
    assert LEASE_TTL / 3 + hrana.REQUEST_TIMEOUT < LEASE_TTL * (1 - MARGIN)
