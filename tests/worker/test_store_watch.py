"""The shared watch: how often a store is read while many calls wait for its runs, and that each of them hears of its run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from perdure import Context, Runtime, stores, workflow
from perdure.aio import store_watch
from perdure.aio.store_watch import TURNS, expect_change
from perdure.store import FullStore
from tests.backends.skewed import SkewedStore
from tests.patience import PATIENCE
from tests.worker.flows import ask, client

READS = ("get", "acquire", "journal", "inbox", "list")


@workflow
async def doze(ctx: Context, n: int) -> int:
    await ctx.sleep("nap", 0.3 + n / 2000)
    return n


async def reads_of(store: FullStore, number: int, way: str) -> float:
    """How often the store is read for each of so many runs that sleep, each of them awaited."""
    counted: Any = SkewedStore(store, 0)
    async with Runtime(counted, [doze], unload_grace=0, concurrency=number) as runtime:
        if way == "runtime":
            runs = [await runtime.start(doze, n, id=f"{number}-{n}") for n in range(number)]
        else:
            runs = [await doze.start(n, id=f"{number}-{n}", store=counted) for n in range(number)]
        assert await asyncio.wait_for(asyncio.gather(*runs), PATIENCE) == list(range(number))
    reads: int = sum(counted.calls[verb] for verb in READS)
    return reads / number


@pytest.mark.parametrize("way", ["runtime", "wf.start"])
async def test_awaiting_many_runs_reads_the_store_no_more_often_for_each(store: FullStore, way: str) -> None:
    few, many = await reads_of(store, 25, way), await reads_of(store, 250, way)
    assert many < 2 * few + 5, f"{few:.1f} reads for each of 25 runs, {many:.1f} for each of 250"


async def test_awaiting_runs_of_another_process_reads_the_store_at_a_bounded_rate(store: FullStore) -> None:
    counted: Any = SkewedStore(store.sibling(), 0)  # type: ignore[arg-type]  # of a full store it is one
    number, began = 250, time.monotonic()
    async with client(counted, doze) as other, Runtime(store, [doze], unload_grace=0, concurrency=number) as runtime:
        for n in range(number):
            await runtime.start(doze, n, id=f"run-{n}")
        runs = [await other.get(f"run-{n}") for n in range(number)]
        counted.calls.clear()
        outcomes = await asyncio.wait_for(asyncio.gather(*(run for run in runs if run is not None)), PATIENCE)
    assert outcomes == list(range(number))
    turns = TURNS * (time.monotonic() - began) / store_watch.TURNS_SECONDS
    assert counted.calls["get"] < 3 * number + turns
    assert counted.calls["watch"] < 200 + 2 * number


async def test_every_waiter_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "POLL_SECONDS", 0.05)
    store = stores.memory()
    changes = [expect_change(store) for _ in range(10 * TURNS)]
    await asyncio.wait_for(asyncio.gather(*changes), PATIENCE)  # nothing changes, so each looks when it has waited long enough
    await asyncio.sleep(0)
    assert not store_watch._watches


async def test_one_watch_serves_all_and_ends_with_the_last() -> None:
    store: Any = SkewedStore(stores.memory(), 0)
    changes = [expect_change(store) for _ in range(10)]
    await asyncio.sleep(0)
    assert store.calls["watch"] == 1
    for change in changes:
        change.cancel()
    await asyncio.sleep(0)
    assert not store_watch._watches
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "perdure-watch"] == []


class BusyStore:
    """A store that changes all the time."""

    def __init__(self) -> None:
        self.watches = 0

    async def watch(self, timeout: float) -> None:
        del timeout
        self.watches += 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", [2, TURNS, 3 * TURNS])
async def test_those_that_expect_the_next_change_at_once_take_turns_too(number: int) -> None:
    """As a drive does that waits for a signal: in the callback of the last change it expects the next."""
    store, looks, is_over, began = BusyStore(), 0, False, time.monotonic()

    def look(_: object = None) -> None:
        nonlocal looks
        looks += 1
        if not is_over:
            expect_change(store).add_done_callback(look)

    for _ in range(number):
        look()
    await asyncio.sleep(0.3)
    assert len(store_watch._watches) == 1
    is_over = True
    turns = TURNS * (2 + (time.monotonic() - began) / store_watch.TURNS_SECONDS)
    assert looks < number + turns
    assert store.watches < number + turns
    while store_watch._watches:  # noqa: ASYNC110 - what is looked at has no event
        await asyncio.sleep(0.001)


async def test_a_watch_that_fails_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "POLL_SECONDS", 0.02)
    store: Any = SkewedStore(stores.memory(), 0)

    async def fail(timeout: float) -> None:
        raise OSError(timeout)

    monkeypatch.setattr(store._store, "watch", fail)
    for _ in range(5):
        await asyncio.wait_for(expect_change(store), PATIENCE)
    assert store.calls["watch"] == 5


@pytest.mark.usefixtures("_no_polling")
async def test_a_signal_from_here_reaches_its_run_among_many_that_wait(store: FullStore) -> None:
    runs = [await ask.start(id=f"run-{n}", store=store) for n in range(3 * TURNS)]
    async with client(store, ask) as runtime:
        for run in reversed(runs):
            await runtime.signal(run.id, "answer", run.id)
    assert await asyncio.wait_for(asyncio.gather(*runs), PATIENCE) == [run.id for run in runs]
