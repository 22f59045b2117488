"""Runs that were lost with their workers are driven one at a time, beside any number of others."""

from __future__ import annotations

import asyncio

from perdure import Context, Runtime, stores, workflow
from perdure.store import FullStore
from tests.patience import PATIENCE


async def lose(store: FullStore, run_id: str, times: int) -> None:
    """So many workers claim the run, and are lost."""
    for _ in range(times):
        assert await store.acquire(run_id, 0.001) is not None
        await asyncio.sleep(0.002)


async def test_a_sweep_drives_one_suspect() -> None:
    @workflow
    async def flow(ctx: Context, n: int) -> int:
        return n

    store = stores.memory()
    runtime = Runtime(store, workflows=[flow], concurrency=0)
    for n in range(6):
        await runtime.start(flow, n, id=f"run-{n}")
    for n in range(3):
        await lose(store, f"run-{n}", 2)
    await lose(store, "run-3", 1)
    assert set(await runtime.sweep()) == {"run-0", "run-3", "run-4", "run-5"}
    assert set(await runtime.sweep()) == {"run-1"}
    assert set(await runtime.sweep()) == {"run-2"}


async def test_a_worker_drives_one_suspect_until_it_records_something() -> None:
    driven: list[str] = []
    first_may_record, may_end = asyncio.Event(), asyncio.Event()

    async def step(run_id: str) -> None:
        driven.append(run_id)
        if run_id == "lost-0":
            await first_may_record.wait()

    @workflow
    async def flow(ctx: Context, run_id: str) -> None:
        await ctx.step(step, run_id)
        await ctx.step(may_end.wait)

    async def until(ids: set[str]) -> None:
        async with asyncio.timeout(PATIENCE):
            while set(driven) != ids:
                await store.watch(0.05)

    store = stores.memory()
    client = Runtime(store, workflows=[flow], concurrency=0)
    for run_id in ("lost-0", "lost-1", "new"):
        await client.start(flow, run_id, id=run_id)
    await lose(store, "lost-0", 2)
    await lose(store, "lost-1", 2)
    async with Runtime(store, workflows=[flow], concurrency=10):
        await until({"lost-0", "new"})
        await client.start(flow, "newer", id="newer")
        await until({"lost-0", "new", "newer"})
        first_may_record.set()
        await until({"lost-0", "new", "newer", "lost-1"})
        may_end.set()
    assert driven[-1] == "lost-1"
