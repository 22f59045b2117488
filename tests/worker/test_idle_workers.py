"""A worker with nothing to do: how often it asks its store, and what it notices although nothing reports it. Time is virtual."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import pytest

from perdure import Context, Runtime, stores, workflow
from perdure.backends.base.change_listener import CHECK_EVERY
from perdure.options import LEASE_TTL
from perdure.store import FullStore
from perdure.worker.scheduler import LOOK_SECONDS
from tests.simulation import LoopClock, simulate
from tests.worker.test_every_fault import VERBS, FaultyStore

MINUTES: Final = 30
QUERIES_PER_SECOND: Final = 0.2
TAKE_OVER_SECONDS: Final = 12.0


@workflow
async def answer(ctx: Context) -> None:
    """Waits for a signal."""
    await ctx.wait_for_signal("go")


@workflow
async def tick(ctx: Context) -> None:
    """Does nothing."""


def calls_of(store: FaultyStore, since: float) -> Counter[str]:
    """How often each verb was called, without `watch`, which sends nothing where the store is notified."""
    return Counter(name for at, name in store.calls if at >= since and name != "watch")


@pytest.mark.parametrize("sleepers", [0, 100])
def test_an_idle_worker_asks_a_store_that_notifies_it_once_in_five_seconds(sleepers: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("tests.worker.test_every_fault.VERBS", VERBS | {"due", "schedules", "count", "put_worker", "workers"})

    async def work(store: FaultyStore) -> Counter[str]:
        async with Runtime(store, [answer], clock=LoopClock()) as runtime:
            for _ in range(sleepers):
                await runtime.start(answer)
            await asyncio.sleep(60)
            since = asyncio.get_running_loop().time()
            await asyncio.sleep(MINUTES * 60)
            return calls_of(store, since)

    calls = simulate(work(FaultyStore(stores.memory())))
    checks = MINUTES * 60 / CHECK_EVERY  # of the connection that listens
    assert sum(calls.values()) + checks <= QUERIES_PER_SECOND * MINUTES * 60, calls
    assert calls["put_worker"] >= 2 * MINUTES - 1  # a sign of life every 30 s
    assert calls["claim"] >= MINUTES * 60 / LEASE_TTL  # a lease that nothing reported is known before it ends


@pytest.mark.parametrize("phase", [0.0, 0.5, 2.5, 6.0, 9.5, 13.0, 18.0, 24.5])
def test_a_lease_that_nothing_reported_is_taken_over_in_time(phase: float) -> None:
    """A process leases a suspended run, which wakes no watcher, and dies at once."""

    async def work(store: FullStore) -> float:
        clock, loop = LoopClock(), asyncio.get_running_loop()
        async with Runtime(store, [answer], clock=clock) as runtime:
            run = await runtime.start(answer)
            await asyncio.sleep(60 + phase)
            claim = await store.acquire(run.id, LEASE_TTL, due_only=False, now=clock.store_now())
            assert claim is not None
            died_at = loop.time()
            while await run.status() == "running":  # noqa: ASYNC110 - an event would wake the worker
                await asyncio.sleep(0.1)
            assert await run.status() == "suspended"
            return loop.time() - died_at

    assert LEASE_TTL - 1 < simulate(work(stores.memory())) <= TAKE_OVER_SECONDS


@pytest.mark.parametrize("phase", [0.0, 7.0, 13.0, 29.0])
def test_a_schedule_that_another_process_made_is_known_soon(phase: float) -> None:
    async def work(store: FullStore) -> None:
        clock = LoopClock()
        async with Runtime(store, [tick], clock=clock) as runtime, Runtime(store, [tick], clock=clock, concurrency=0) as other:
            await asyncio.sleep(60 + phase)
            await other.schedule(tick, every=LOOK_SECONDS + 5)
            await asyncio.sleep(2 * (LOOK_SECONDS + 5) + 1)
            assert len(await runtime.list(status="completed")) == 2

    simulate(work(stores.memory()))
