"""Signals and suspending race in thousands of seeded schedules; none is lost, none is delivered twice."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from perdure import Context, Ok, Runtime, Workflow, stores, workflow
from tests.campaign import times
from tests.engine.worlds import world
from tests.simulation import LoopClock, SlowStore, simulate


async def _collect(ctx: Context[Any], count: int) -> list[Any]:
    return [await ctx.wait_for_signal("news", key=f"news{n}") for n in range(count)]


collect = Workflow("collect", _collect)


async def _race(seed: int) -> None:
    rng = random.Random(seed)
    store = SlowStore(stores.memory(), rng)
    count = rng.randint(1, 3)
    async with Runtime(store, [collect], clock=LoopClock(), unload_grace=rng.choice([0, 0.003])) as runtime:
        run = await runtime.start(collect, count, id="run")

        async def send(n: int) -> None:
            await asyncio.sleep(rng.random() * 0.03)
            await runtime.signal("run", "news", n)

        await asyncio.gather(*(send(n) for n in range(count)))
        async with asyncio.timeout(0.9):  # less than the worker's polling interval: a wake-up that needs it counts as lost
            received = await run
        assert sorted(received) == list(range(count))


def test_no_schedule_of_signal_and_suspend_loses_a_wake_up() -> None:
    for seed in range(times(10_000)):
        try:
            simulate(_race(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def test_a_signal_sent_before_the_wait_is_delivered() -> None:
    async with world(collect) as here:
        await here.runtime.start(collect, 2, id="run")
        await here.runtime.signal("run", "news", "early")
        await here.runtime.sweep()
        await here.runtime.signal("run", "news", "late")
        assert await here.runtime.sweep() == {"run": Ok(["early", "late"])}


async def test_a_wait_that_is_given_up_because_of_what_is_recorded_takes_no_signal() -> None:
    """Both could end at the same rest. What was recorded is delivered first, and the body may act on it."""

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        patch = asyncio.create_task(ctx.patched("new"))
        wait = asyncio.create_task(ctx.wait_for_signal("go", key="first"))
        await asyncio.wait([patch, wait], return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
        await asyncio.wait([wait])
        return [wait.cancelled(), await ctx.wait_for_signal("go", key="second")]

    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.signal("run", "go", "news")
        assert await here.runtime.sweep() == {"run": Ok([True, "news"])}


async def test_signals_of_one_name_go_to_waits_in_the_order_they_were_opened() -> None:
    @workflow
    async def two(ctx: Context[Any]) -> list[Any]:
        return list(await asyncio.gather(ctx.wait_for_signal("go", key="first"), ctx.wait_for_signal("go", key="second")))

    async with world(two) as here:
        await here.runtime.run(two, id="run")
        for payload in ("a", "b"):
            await here.runtime.signal("run", "go", payload)
            outcomes = await here.runtime.sweep()
        assert outcomes == {"run": Ok(["a", "b"])}


async def test_a_repeated_dedupe_is_one_signal() -> None:
    async with world(collect) as here:
        await here.runtime.start(collect, 2, id="run")
        for _ in range(3):
            await here.runtime.signal("run", "news", "once", dedupe="delivery-1")
        await here.runtime.signal("run", "news", "other")
        assert await here.runtime.sweep() == {"run": Ok(["once", "other"])}
