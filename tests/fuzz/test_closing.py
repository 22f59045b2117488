"""What happens while a run is closed, by programs that the fuzzer has found: nothing gets lost and nothing gets stuck."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import Context, Err, Retry, Runtime, Suspended, Workflow, step, stores
from perdure.testing import ManualClock


async def test_a_run_that_is_cancelled_between_two_tries_of_a_compensation_ends() -> None:
    tries = 0

    async def done() -> str:
        return "done"

    @step(retry=Retry(attempts=3, wait_initial=10))
    async def undo(_: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("not yet")

    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(done, compensate=undo)
        raise KeyError("the function fails")

    clock = ManualClock()
    workflow = Workflow("flow", flow)
    runtime = Runtime(stores.memory(), [workflow], clock=clock, unload_grace=0, concurrency=0)
    async with asyncio.timeout(5):
        first = await runtime.run(workflow, id="run")
        assert isinstance(first, Suspended), first
        await runtime.cancel("run")
        clock.advance("1h")
        assert isinstance(await runtime.resume("run"), Err)
    assert tries == 2
    await runtime.close()


async def test_a_detached_child_that_ends_while_the_run_waits_for_another_one_does_not_keep_it_from_ending() -> None:
    may_end = asyncio.Event()

    async def quick(ctx: Context[Any]) -> None:
        await ctx.step(str, 1)

    async def slow(ctx: Context[Any]) -> None:
        await ctx.step(may_end.wait)

    async def flow(ctx: Context[Any]) -> str:
        ctx.start_child(quick_flow, detached=True)
        ctx.start_child(slow_flow)
        return "done"

    quick_flow, slow_flow, workflow = Workflow("quick", quick), Workflow("slow", slow), Workflow("flow", flow)
    async with asyncio.timeout(5), Runtime(stores.memory(), [workflow, quick_flow, slow_flow]) as runtime:
        handle = await runtime.start(workflow, id="run")
        await asyncio.sleep(0.2)
        may_end.set()
        assert await handle == "done"
