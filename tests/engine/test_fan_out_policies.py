"""When `ctx.map` and `ctx.race` are over: all, the first, so many of them, or too many failures. A replay decides alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Context, Err, Ok, Workflow
from tests.engine.replays import raised, twice
from tests.engine.worlds import world


class Work:
    """Steps that end when told so, and a note of which began."""

    def __init__(self) -> None:
        self.began: list[int] = []

    async def even(self, number: int) -> int:
        """Even numbers succeed; the higher the number, the later it ends."""
        self.began.append(number)
        for _ in range(10 * number):
            await asyncio.sleep(0)
        if number % 2:
            raise ArithmeticError(number)
        return number

    async def hang(self, number: int) -> int:
        if number > 2:
            await asyncio.sleep(3600)
        return await self.even(number)


async def test_so_many_failures_are_tolerated() -> None:
    work = Work()

    async def body(ctx: Context) -> Any:
        return [str(each) for each in await ctx.map("even", work.even, range(4), max_failures=2)]

    first, again = await twice(body)
    assert first == again == [str(each) for each in (Ok(0), Err(ArithmeticError(1)), Ok(2), Err(ArithmeticError(3)))]


async def test_one_failure_more_is_raised_and_cancels_the_rest() -> None:
    async def body(ctx: Context) -> Any:
        work = Work()

        async def each(number: int) -> int:
            return await (work.hang(number) if number == 4 else work.even(number))

        error = await raised(ctx.map("each", each, range(5), max_failures=1))
        return repr(error)

    assert await twice(body) == ("ArithmeticError(3)", "ArithmeticError(3)")


async def test_enough_successes_cancel_the_rest() -> None:
    async def body(ctx: Context) -> Any:
        return [str(each) for each in await ctx.map("hang", Work().hang, range(5), enough=2)]

    first, again = await twice(body)
    assert first == again == [str(each) for each in (Ok(0), Err(ArithmeticError(1)), Ok(2), None, None)]


async def test_items_that_are_not_needed_never_begin() -> None:
    work = Work()

    async def body(ctx: Context) -> Any:
        return await ctx.map("even", work.even, [0, 2, 4, 6], enough=1, concurrency=1)

    assert (await twice(body))[1] == [Ok(0), None, None, None]
    assert work.began == [0]


async def test_too_few_successes_raise_the_error_that_makes_it_impossible() -> None:
    async def body(ctx: Context) -> Any:
        return repr(await raised(ctx.map("even", Work().even, [1, 3, 4, 6], enough=3)))

    assert await twice(body) == ("ArithmeticError(3)", "ArithmeticError(3)")


async def test_the_first_ones_of_a_race_win_in_the_order_in_which_they_end() -> None:
    async def body(ctx: Context) -> Any:
        work = Work()
        racers = [ctx.step(f"step {number}", work.even, number) for number in (4, 0, 2, 6)]
        return await ctx.race(*racers, wins=3)

    assert await twice(body) == ([0, 2, 4], [0, 2, 4])


async def test_an_error_ends_a_race_before_enough_have_won() -> None:
    async def body(ctx: Context) -> Any:
        work = Work()
        racers = [ctx.step(f"step {number}", work.even, number) for number in (4, 0, 1)]
        return repr(await raised(ctx.race(*racers, wins=2)))

    assert await twice(body) == ("ArithmeticError(1)", "ArithmeticError(1)")


async def test_policies_hold_for_children_and_cancel_them() -> None:
    async def piece(ctx: Context, number: int) -> int:
        if number > 2:
            await ctx.wait_for_signal("never")
        if number % 2:
            raise ArithmeticError(number)
        return number

    pieces = Workflow("piece", piece)

    async def body(ctx: Context) -> list[str]:
        return [str(each) for each in await ctx.map(pieces, range(5), enough=2)]

    flow = Workflow("parent", body)
    async with world(pieces, flow) as here:
        await here.runtime.start(flow, id="run")
        for _ in range(5):
            await here.later("1s")
        outcome = await here.runtime.resume("run")
        assert outcome == Ok([str(each) for each in (Ok(0), Err(ArithmeticError(1)), Ok(2), None, None)])
        ends = {info.id: info.status for info in await here.runtime.list(prefix="run/")}
        assert ends == {
            "run/piece[0]": "completed", "run/piece[1]": "failed", "run/piece[2]": "completed",
            "run/piece[3]": "cancelled", "run/piece[4]": "cancelled",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_failures": -1}, "at least 0"),
        ({"max_failures": True}, "at least 0"),
        ({"enough": 0}, "enough"),
        ({"enough": 4}, "enough=4 of 3 items"),
        ({"enough": 1, "max_failures": 1}, "without max_failures=|without enough="),
        ({"enough": 1, "on_error": "collect"}, "without on_error="),
        ({"on_error": "ignore"}, '"raise" or "collect"'),
    ],
    ids=str,
)
async def test_policies_that_cannot_be_are_refused(options: dict[str, Any], reason: str) -> None:
    async def body(ctx: Context) -> str:
        anything: Any = ctx
        return str(await raised(anything.map("even", Work().even, range(3), **options)))

    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(await Workflow("flow", body)())


async def test_no_more_can_win_a_race_than_take_part() -> None:
    async def body(ctx: Context) -> list[str]:
        return [str(await raised(ctx.race(ctx.step(f"{n}", Work().even, 0), wins=n))) for n in (0, 2)]

    none, two = await Workflow("flow", body)()
    assert "wins=0 of a race between 1" in none
    assert "wins=2 of a race between 1" in two
