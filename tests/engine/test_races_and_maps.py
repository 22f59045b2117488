"""BodyTasks that ctx knows of: who wins, who is cancelled, how many run at once, and that nobody runs twice."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Context, Ok, Retry, Suspended, WaitingFor, Workflow, workflow
from perdure.errors import DuplicateStep, RunDiverged
from tests.engine.replays import raised, twice
from tests.engine.steps import Steps
from tests.engine.worlds import world
from tests.simulation import simulate

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


async def test_the_winner_of_a_race_is_the_same_on_replay_and_the_losers_never_run_again() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> Any:
        first = await ctx.race(ctx.step("slow", steps.hang, "slow"), ctx.step("fast", steps.work, "fast"))
        second = await ctx.race("again", ctx.step("b", steps.work, "b", 0.002), ctx.step("c", steps.hang, "c"))
        return first, second

    assert await twice(body) == (("fast", "b"), ("fast", "b"))
    assert sorted(steps.started) == ["b", "c", "fast", "slow"]
    assert steps.cancelled == ["slow", "c"]


async def test_the_same_racer_wins_again_whoever_would_be_faster_now() -> None:
    lengths = [0.05, 0.001, 0.0, 0.05]
    ran: list[str] = []

    async def work(name: str) -> str:
        ran.append(name)
        await asyncio.sleep(lengths.pop(0))
        return name

    async def body(ctx: Context[Any]) -> Any:
        return await ctx.race(ctx.step("slow", work, "slow"), ctx.step("fast", work, "fast"))

    assert await twice(body) == ("fast", "fast")
    assert ran == ["slow", "fast"]


async def test_a_winner_that_raises_is_what_the_race_raises() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.race(ctx.step("slow", steps.hang, "slow"), ctx.step("bad", steps.fail, "bad")))
        return type(error), str(error)

    assert await twice(body) == ((ValueError, "bad"),) * 2
    assert steps.cancelled == ["slow"]


async def test_losers_are_cancelled_and_their_clean_up_has_ended_when_the_race_is_over() -> None:
    log: list[str] = []

    async def loser(ctx: Context[Any]) -> None:
        try:
            await ctx.wait_for_signal("never")
        finally:
            await asyncio.sleep(0)
            log.append("cleaned up")

    async def body(ctx: Context[Any]) -> Any:
        log.clear()
        await ctx.race(loser(ctx), ctx.sleep("nap", 0))
        return list(log)

    assert await twice(body) == (["cleaned up"], ["cleaned up"])


async def test_a_race_inside_a_race_gives_the_same_again() -> None:
    async def body(ctx: Context[Any]) -> Any:
        async def named(name: str, seconds: float) -> str:
            await ctx.sleep(name, seconds)
            return name

        return await ctx.race(
            "outer",
            ctx.race("one", named("a", "4h"), named("b", "3h")),  # type: ignore[arg-type]
            ctx.race("two", named("c", 0), named("d", "2h")),  # type: ignore[arg-type]
        )

    assert await twice(body) == ("c", "c")


async def test_a_race_between_waits_leaves_memory_and_is_decided_by_what_comes_first() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        won = await ctx.race(ctx.wait_for_signal("paid"), ctx.sleep("nap", "2h"), ctx.wait_for_signal("refused"))
        await ctx.sleep("end", "5h")
        return won

    async with world(flow) as here:
        waiting = Suspended("run", EPOCH + timedelta(hours=2), (WaitingFor("signal", "paid"), WaitingFor("signal", "refused")))
        assert await here.runtime.run(flow, id="run") == waiting
        await here.later("1h")
        await here.runtime.signal("run", "refused", "no")
        assert isinstance((await here.runtime.sweep())["run"], Suspended)
        await here.runtime.signal("run", "paid", "too late")
        assert await here.later("5h") == {"run": Ok("no")}


async def test_a_race_whose_winner_is_no_racer_any_more_stops_the_run() -> None:
    racers = [3]

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        naps = [ctx.sleep(f"{n}", 0 if n == 2 else "1h") for n in range(racers[0])]
        await ctx.race(*naps)
        await ctx.sleep("end", "30m")

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        racers[0] = 2
        await here.later("30m")
        here.clock.advance("1h")
        with pytest.raises(RunDiverged, match="'2' is recorded"):
            await here.runtime.resume("run")


async def test_a_race_takes_coroutines_and_two_need_two_names() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> list[Any]:
        refused: list[Any] = [(), ("name",), (5,), (asyncio.sleep,)]
        kinds = [type(await raised(ctx.race(*call))).__name__ for call in refused]
        await ctx.race(ctx.sleep("a", 0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kinds.append(type(await raised(ctx.race(ctx.sleep("b", 0)))).__name__)
            gc.collect()
        return kinds

    assert await flow() == ["TypeError"] * 4 + ["DuplicateStep"]


async def test_a_map_gives_results_in_the_order_of_the_items() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> Any:
        async def backwards(n: int) -> int:
            await steps.work(n, (10 - n) / 2000)
            return n * n

        return await ctx.map(backwards, range(10))

    expected = [n * n for n in range(10)]
    assert await twice(body) == (expected, expected)
    assert steps.ended != sorted(steps.ended), "they ended in another order than they were given"
    assert sorted(steps.started) == list(range(10))


@pytest.mark.parametrize("concurrency", [1, 2, 7, 32])
def test_a_map_never_runs_more_at_once_than_it_may_and_always_as_many(concurrency: int) -> None:
    async def main() -> tuple[int, list[Any]]:
        steps = Steps()

        async def flow(ctx: Context[Any]) -> Any:
            return await ctx.map("work", steps.work, range(50), concurrency=concurrency)

        assert await Workflow("flow", flow)() == list(range(50))
        return steps.most, steps.started

    most, started = simulate(main())
    assert most == concurrency
    assert started == list(range(50))


def test_the_window_of_a_map_slides_past_an_item_that_takes_long() -> None:
    async def main() -> None:
        steps = Steps()

        async def uneven(n: int) -> int:
            await steps.work(n, 100 if n == 0 else 1)
            return n

        async def flow(ctx: Context[Any]) -> Any:
            return await ctx.map(uneven, range(20), concurrency=2)

        await Workflow("flow", flow)()
        assert steps.ended == [*range(1, 20), 0]
        assert steps.most == 2
        assert asyncio.get_running_loop().time() == pytest.approx(100, abs=0.1)

    simulate(main())


async def test_a_map_keys_its_items_by_number_or_by_what_key_says() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        steps = Steps()
        await ctx.map("numbered", steps.work, ["x", "y"])
        await ctx.map("keyed", steps.work, ["x", "y"], key=lambda item: f"item {item}")
        await ctx.scope("s").map("scoped", steps.work, ["x"])
        duplicate = await raised(ctx.map("same", steps.work, [1, 2, 3], key=lambda _: "one"))
        keys: list[Any] = [lambda _: "", lambda _: 5]
        bad = [await raised(ctx.map("bad", steps.work, [1], key=key)) for key in keys]
        return [type(error).__name__ for error in (duplicate, *bad)]

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert outcome == Ok([DuplicateStep.__name__, "ValueError", "TypeError"])
        keys = await here.keys("run")
        assert keys[:5] == ["numbered[0]", "numbered[1]", "item x", "item y", "/s/scoped[0]"]


async def test_the_first_error_of_a_map_cancels_the_rest_and_replays_without_running_anything() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> Any:
        async def sometimes(n: int) -> int:
            if n == 2:
                await steps.fail(n)
            return int(await steps.work(n, 0 if n < 2 else 3600))

        error = await raised(ctx.map(sometimes, range(10), concurrency=4))
        return type(error), str(error)

    assert await twice(body) == ((ValueError, "2"),) * 2
    assert steps.started == [0, 1, 2, 3, 4, 5][: len(steps.started)], "and nothing was started twice"
    assert sorted(steps.cancelled) == sorted(set(steps.started) - {0, 1, 2})


async def test_the_error_of_a_map_is_the_first_also_when_cancelling_makes_others() -> None:
    async def body(ctx: Context[Any]) -> Any:
        async def touchy(n: int) -> None:
            if n == 1:
                raise ValueError("the first")
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise KeyError("while it was cancelled") from None

        return str(await raised(ctx.map(touchy, range(2))))

    assert await twice(body) == ("the first", "the first")


async def test_an_item_that_raises_cancelled_error_by_itself_has_failed() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        async def quits(n: int) -> int:
            if n == 1:
                raise asyncio.CancelledError
            return n

        return [str(each) for each in await ctx.map(quits, range(3), on_error="collect")]

    first, second, third = await flow()
    assert (first, third) == ("Ok(value=0)", "Ok(value=2)")
    assert "CancelledError" in second


async def test_a_map_that_collects_gives_every_outcome() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> Any:
        async def odd(n: int) -> int:
            return int(await (steps.fail(n) if n % 2 else steps.work(n)))

        results = await ctx.map(odd, range(5), on_error="collect", concurrency=2)
        return [result.value if isinstance(result, Ok) else repr(result.error) for result in results]

    expected = [0, "ValueError(1)", 2, "ValueError(3)", 4]
    first, second = await twice(body)
    assert first == second == expected
    assert sorted(steps.started) == [0, 1, 2, 3, 4]


async def test_a_map_takes_any_items_and_refuses_a_number_of_workers_that_makes_no_sense() -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2, 3)

    async def body(ctx: Context[Any]) -> Any:
        steps = Steps()
        maps = [
            await ctx.map("none", steps.work, []),
            await ctx.map("generated", steps.work, numbers()),
            await ctx.map("of a dict", steps.work, {"a": 1}),
            await ctx.map("none collected", steps.work, (), on_error="collect"),
            await ctx.map(str, [1, 2]),
        ]
        bad: list[Any] = [0, -1, True, 1.5, None]
        kinds = {type(await raised(ctx.map("bad", steps.work, [1], concurrency=number))) for number in bad}
        kinds.add(type(await raised(ctx.map("bad", steps.work, [1], on_error="ignore"))))  # type: ignore[call-overload]
        assert isinstance(await raised(ctx.map("bad", steps.work, [1], retries=1)), TypeError)  # type: ignore[call-overload]
        assert isinstance(await raised(ctx.map("bad", steps.work, 5)), TypeError)  # type: ignore[call-overload]
        return maps, kinds

    expected = ([[], [1, 2, 3], ["a"], [], ["1", "2"]], {ValueError})
    assert await twice(body) == (expected, expected)


async def test_a_map_of_waiting_steps_leaves_memory_and_goes_on_with_each() -> None:
    tried: list[int] = []

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        async def flaky(n: int) -> int:
            tried.append(n)
            if tried.count(n) == 1:
                raise ValueError
            return n

        return await ctx.map(flaky, range(3), retry=Retry(2, wait_initial="1h", wait_max="1h", wait_jitter=0))

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Suspended("run", EPOCH + timedelta(hours=1))
        assert await here.later("1h") == {"run": Ok([0, 1, 2])}
    assert sorted(tried) == [0, 0, 1, 1, 2, 2]
