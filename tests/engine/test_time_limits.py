"""A time limit around a block cuts it off at its deadline, at the same place on every replay, and never otherwise."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, Workflow, stores, workflow
from tests.engine.own_waits import own_wait
from tests.engine.replays import twice
from tests.engine.steps import Steps
from tests.engine.worlds import world
from tests.simulation import LoopClock, simulate

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


async def test_a_block_that_ends_in_time_is_left_alone_also_when_replayed_after_its_deadline() -> None:
    steps = Steps()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        async with ctx.timeout("limit", "1h"):
            both = await asyncio.gather(ctx.step("a", steps.work, 1), ctx.step("b", steps.work, 2))
            await ctx.sleep("short", "30m")
        for n in range(3):
            await ctx.sleep(f"long{n}", "5h")
        return both

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        assert isinstance((await here.later("30m"))["run"], Suspended)
        for _ in range(2):
            assert isinstance((await here.later("5h"))["run"], Suspended)
        assert await here.later("5h") == {"run": Ok([1, 2])}
        assert "limit" not in await here.keys("run")


async def test_a_block_that_takes_too_long_is_cut_off_at_the_same_place_on_every_replay() -> None:
    cut: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            async with ctx.timeout("limit", "1h"):
                await ctx.sleep("a", "40m")
                try:
                    await ctx.sleep("b", "40m")
                except asyncio.CancelledError:
                    cut.append("b")
                    raise
        except TimeoutError as error:
            await ctx.sleep("end", "1h")
            return str(error)
        return "in time"

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Suspended("run", EPOCH + timedelta(minutes=40))
        assert await here.later("40m") == {"run": Suspended("run", EPOCH + timedelta(hours=1))}
        cut.clear()
        assert isinstance((await here.later("20m"))["run"], Suspended)
        assert await here.later("1h") == {"run": Ok("the time limit 'limit' of run 'run' has passed")}
    assert cut == ["b", "b"]


@pytest.mark.parametrize(("outer", "inner", "expected"), [("1h", "2h", "outer"), ("2h", "1h", "inner")])
async def test_of_two_nested_limits_the_one_that_is_over_is_the_one_that_raises(outer: str, inner: str, expected: str) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        said = "nothing"
        try:
            async with ctx.timeout("outer", outer):
                try:
                    async with ctx.timeout("inner", inner):
                        await ctx.wait_for_signal("never")
                except TimeoutError:
                    said = "inner"
        except TimeoutError:
            said = "outer"
        await ctx.sleep("end", "5h")
        return said

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        assert isinstance((await here.later("1h"))["run"], Suspended)
        assert await here.later("5h") == {"run": Ok(expected)}


async def test_of_two_limits_over_at_once_the_outer_raises_on_every_replay() -> None:
    said: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        try:
            async with ctx.timeout("outer", "1h"), ctx.timeout("inner", "1h"):
                await ctx.wait_for_signal("never")
        except TimeoutError as error:
            said.append(str(error))
        await ctx.sleep("end", "1h")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        assert isinstance((await here.later("1h"))["run"], Suspended)
        assert await here.later("1h") == {"run": Ok(None)}
    assert len(said) == 2
    assert all("'outer'" in each for each in said)


@pytest.mark.parametrize("way", ["step", "gather", "map", "race"])
async def test_a_step_in_flight_when_the_time_is_up_is_cancelled_and_never_started_again(way: str) -> None:
    steps = Steps()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            async with ctx.timeout("limit", "1h"):
                match way:
                    case "step":
                        await ctx.step("a", steps.hang, "a")
                    case "gather":
                        await asyncio.gather(ctx.step("a", steps.hang, "a"), ctx.sleep("nap", "2h"))
                    case "map":
                        await ctx.map("m", steps.hang, ["a"])
                    case _:
                        await ctx.race(ctx.step("a", steps.hang, "a"), ctx.sleep("nap", "2h"))
        except TimeoutError:
            await ctx.sleep("end", "1h")
            return "too long"

    async with world(flow) as here:
        running = asyncio.create_task(here.runtime.run(flow, id="run"))
        await steps.has_started.wait()
        here.clock.advance("1h")
        assert isinstance(await running, Suspended)
        assert await here.later("1h") == {"run": Ok("too long")}
        assert await here.keys("run") == ["limit", "end"]
    assert steps.started == steps.cancelled == ["a"]


async def test_an_error_inside_a_limit_is_that_error() -> None:
    async def body(ctx: Context[Any]) -> Any:
        try:
            async with ctx.timeout("limit", "1h"):
                await ctx.step("fail", Steps().fail, "x")
        except ValueError as error:
            return str(error)

    assert await twice(body) == ("x", "x")


async def test_a_cancellation_of_ones_own_inside_a_limit_is_not_a_timeout() -> None:
    async def limited(ctx: Context[Any]) -> None:
        async with ctx.timeout("limit", "30m"):
            await asyncio.Event().wait()

    async def body(ctx: Context[Any]) -> bool:
        task = asyncio.create_task(limited(ctx))
        await ctx.step("begun", asyncio.sleep, 0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert await twice(body) == (True, True)


async def test_a_cancellation_that_comes_with_the_end_of_a_limit_is_not_swallowed() -> None:
    async def limited(ctx: Context[Any]) -> None:
        async with ctx.timeout("limit", 0):
            try:
                await ctx.wait_for_signal("never")
            finally:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()

    async def body(ctx: Context[Any]) -> bool:
        task = asyncio.create_task(limited(ctx))
        await asyncio.wait([task])
        return task.cancelled()

    assert await twice(body) == (True, True)


@pytest.mark.parametrize("is_limited", [False, True])
def test_a_body_busy_with_something_of_its_own_stays_in_memory_until_it_is_done(is_limited: bool) -> None:
    async def flow(ctx: Context[Any]) -> str:
        if is_limited:
            async with ctx.timeout("limit", "1h"):
                await own_wait(60)
        else:
            await own_wait(60)
        await ctx.step("work", asyncio.sleep, 0)
        return "done"

    async def main() -> None:
        definition = Workflow("flow", flow)
        runtime = Runtime(stores.memory(), [definition], clock=LoopClock(), concurrency=0)
        assert await runtime.run(definition, id="run") == Ok("done")
        await runtime.close()

    simulate(main())
