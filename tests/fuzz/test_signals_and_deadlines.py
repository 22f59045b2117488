"""A signal that the store accepted before the deadline of a wait wins, however late the run notices both."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure import Context, Ok, Runtime, Suspended, Workflow, stores
from perdure.testing import ManualClock
from tests.patience import PATIENCE


async def wait(ctx: Context[Any]) -> str:
    value: str = await ctx.wait_for_signal("a", timeout="1h", default="late")
    return value


async def test_a_suspended_run_gets_a_signal_that_came_before_the_deadline() -> None:
    clock, workflow = ManualClock(), Workflow("wait", wait)
    runtime = Runtime(stores.memory(), [workflow], clock=clock, unload_grace=0, concurrency=0)
    assert isinstance(await runtime.run(workflow, id="run"), Suspended)
    clock.advance("59m")
    await runtime.signal("run", "a", "in time")
    clock.advance("2h")
    assert await runtime.resume("run") == Ok("in time")
    await runtime.close()


async def test_a_run_in_memory_gets_a_signal_whose_deadline_passes_before_the_run_hears_of_it() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        begun.set()
        await may_end.wait()

    async def flow(ctx: Context[Any]) -> str:
        value, _ = await asyncio.gather(wait(ctx), ctx.step(hold))
        return value

    clock, workflow, store = ManualClock(), Workflow("flow", flow), stores.memory()
    runtime = Runtime(store, [workflow], clock=clock, unload_grace=0, concurrency=0)
    async with asyncio.timeout(PATIENCE):
        running = asyncio.create_task(runtime.run(workflow, id="run"))
        await begun.wait()
        await store.signal("run", "a", b'"in time"', now=clock.now())
        clock.advance("2h")
        may_end.set()
        assert await running == Ok("in time")
    await runtime.close()
