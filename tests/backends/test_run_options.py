"""On each store: deadlines by the store's clock, runs that are started together or by a signal, and progress."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Final

import pytest

from perdure import Context, Ok, Runtime, Suspended, workflow
from perdure.errors import DeadlineExceeded, RunConflict
from perdure.model.durations import MICROSECOND
from perdure.model.records import deadline_in_force
from tests.backends import jobs
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.registry import POSTGRES, SQLITE, Backend, on

PATIENCE: Final = 60.0


@workflow
async def collect(ctx: Context, expected: int) -> list[str]:
    items: list[str] = []
    for n in range(expected):
        ctx.set_progress({"collected": n, "of": expected})
        items.append(await ctx.wait_for_signal("item", key=f"item {n}"))
    ctx.set_progress({"collected": expected})
    return items


@pytest.mark.same_everywhere
async def test_a_run_ends_at_its_deadline_whichever_worker_has_it(backend: Backend, shared_dsn: str) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        here, there = [await stack.enter_async_context(store_at(shared_dsn)) for _ in range(2)]
        client = Runtime(here, [collect], concurrency=0)
        length = 0.3 * min(backend.pace, 3)
        started = await client.start_many(collect, [(1,)] * 4, ids=[f"run-{n}" for n in range(4)], deadline=length)
        runtimes = [await stack.enter_async_context(Runtime(store, [collect], unload_grace=0)) for store in (here, there)]
        for run in started:
            with pytest.raises(DeadlineExceeded):
                await run
            row = await here.get(run.id)
            assert row is not None
            assert row.deadline is not None
            assert row.updated_at >= row.deadline  # both by the store's clock
            assert row.deadline <= row.created_at + length * MICROSECOND + 1000  # the clock of some stores has whole milliseconds
        retried = await runtimes[0].retry("run-1")
        with pytest.raises(DeadlineExceeded):
            await retried
        row = await there.get("run-1")
        assert row is not None
        assert row.deadline is not None
        in_force = deadline_in_force(row, await there.journal("run-1"))
        assert in_force is not None
        assert row.updated_at >= in_force > row.deadline  # it had its time again


async def test_a_signal_starts_its_run_or_finds_it(backend: Backend, shared_dsn: str) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        here, there = [await stack.enter_async_context(store_at(shared_dsn)) for _ in range(2)]
        a, b = (Runtime(store, [collect], concurrency=0) for store in (here, there))
        calls = [
            runtime.signal_with_start(collect, 4 + n, id="cart", signal="item", payload=f"{n}", dedupe=f"{n}")
            for n, runtime in enumerate((a, b, a, b))
        ]
        await asyncio.gather(*calls)
        await a.signal_with_start(collect, 4, id="cart", signal="item", payload="again", dedupe="0")
        assert sorted(row.payload for row in await here.inbox("cart")) == [b'"0"', b'"1"', b'"2"', b'"3"']
        with pytest.raises(RunConflict):
            await a.start_many(collect, [(99,), (1,)], ids=["cart", "other"])  # the other one is started all the same
        assert {info.id for info in await a.list()} == {"cart", "other"}


async def test_a_run_shows_its_progress_to_other_processes(backend: Backend, shared_dsn: str) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        here, there = [await stack.enter_async_context(store_at(shared_dsn)) for _ in range(2)]
        worker, client = Runtime(here, [collect], concurrency=0, unload_grace=0), Runtime(there, concurrency=0)
        assert isinstance(await worker.run(collect, 2, id="cart"), Suspended)
        run = await client.get("cart")
        assert run is not None
        assert await run.progress() == {"collected": 0, "of": 2}
        for item in ("tea", "milk"):
            await run.signal("item", item)
        assert await worker.resume("cart") == Ok(["tea", "milk"])
        assert await run.progress() == {"collected": 2}


@on(SQLITE, POSTGRES)
def test_a_run_whose_worker_was_killed_ends_at_its_deadline(backend: Backend, dsn: str, start: Start) -> None:
    """It is taken over after the deadline, and no step of it is called again."""
    worker = start(jobs.hanging_worker, dsn, backend.lease_ttl)
    assert worker.receive() == "the step is running"
    worker.kill()
    time.sleep(jobs.HANGING_DEADLINE)

    async def take_over() -> None:
        async with (
            store_at(dsn) as store,
            Runtime(store, [jobs.hangs], lease_ttl=backend.lease_ttl) as runtime,
            asyncio.timeout(PATIENCE),
        ):
            run = await runtime.get("run")
            assert run is not None
            with pytest.raises(DeadlineExceeded):
                await run
            assert await run.progress() == "hanging"

    jobs.hang_calls.clear()
    asyncio.run(take_over())
    assert jobs.hang_calls == []
