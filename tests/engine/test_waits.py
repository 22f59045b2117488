"""Sleeping and waiting for signals: by the clock, once, and the same again on every replay."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from perdure import Context, Ok, Suspended, WaitingFor, workflow
from perdure.errors import InvalidInput
from tests.engine.replays import raised
from tests.engine.worlds import world

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Decision:
    approved: bool
    by: str = "nobody"


@pytest.mark.parametrize(
    ("at", "wakes_at"),
    [
        (EPOCH + timedelta(hours=1), EPOCH + timedelta(hours=1)),
        (datetime(2026, 1, 1, 3, tzinfo=timezone(timedelta(hours=2))), EPOCH + timedelta(hours=1)),
        (datetime.max.replace(tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (EPOCH - timedelta(days=365 * 90), None),
        (EPOCH, None),
    ],
    ids=str,
)
async def test_sleep_until_wakes_at_that_instant_or_at_once(at: datetime, wakes_at: datetime | None) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.sleep_until("nap", at)
        return "awake"

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert outcome == (Ok("awake") if wakes_at is None else Suspended("run", wakes_at))


async def test_sleep_until_refuses_a_moment_without_a_zone() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> list[Any]:
        moments: list[Any] = [datetime(2026, 1, 1), "2026-01-01", 5, None]  # noqa: DTZ001 - the very thing
        return [type(await raised(ctx.sleep_until("nap", at))).__name__ for at in moments]

    assert await flow() == ["ValueError", "TypeError", "TypeError", "TypeError"]


BAD_DURATIONS: list[Any] = [
    -1,
    -0.001,
    math.nan,
    math.inf,
    -math.inf,
    True,
    None,
    b"1s",
    [1],
    10**400,
    1e300,
    "",
    "  ",
    "soon",
    "1",
    "1h30",
    "h",
    "-1h",
    "1.5.5s",
    "1e3s",
    "1h,30m",
    "1 month",
    "nan s",
    "9" * 400 + "d",
    timedelta.max,
    timedelta(microseconds=-1),
]


@pytest.mark.parametrize("bad", BAD_DURATIONS, ids=lambda bad: repr(bad)[:30])
async def test_a_length_of_time_that_makes_no_sense_is_refused_everywhere(bad: Any) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        with pytest.raises((TypeError, ValueError)):
            await ctx.sleep("nap", bad)
        with pytest.raises((TypeError, ValueError)):
            ctx.timeout("limit", bad)
        if bad is not None:
            with pytest.raises((TypeError, ValueError)):
                await ctx.wait_for_signal("news", timeout=bad)
            with pytest.raises((TypeError, ValueError)):
                await ctx.step("work", asyncio.sleep, 0, timeout=bad)

    await flow()


@pytest.mark.parametrize(
    ("duration", "length"),
    [(0, 0.0), ("1h30m", 5400.0), ("1h 30m", 5400.0), ("250ms", 0.25), ("1.5d", 129_600.0), (timedelta(weeks=1), 604_800.0)],
    ids=str,
)
async def test_lengths_of_time_are_written_in_three_ways(duration: Any, length: float) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> float:
        await ctx.sleep("nap", duration)
        return (ctx.now() - EPOCH).total_seconds()

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        if length:
            assert outcome == Suspended("run", EPOCH + timedelta(seconds=length))
            outcome = (await here.later(f"{length}s"))["run"]
        assert outcome == Ok(length)


async def test_a_signal_that_does_not_come_raises_or_gives_the_default() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        with pytest.raises(TimeoutError, match="no signal 'news' came in time"):
            await ctx.wait_for_signal("news", timeout="1h")
        given = [
            await ctx.wait_for_signal("news", key="none", timeout="1h", default=None),
            await ctx.wait_for_signal("news", key="text", timeout="1h", default="quiet"),
        ]
        await ctx.sleep("end", "1h")
        return given

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Suspended(
            "run", EPOCH + timedelta(hours=1), (WaitingFor("signal", "news"),)
        )
        for _ in range(3):
            assert isinstance((await here.later("1h"))["run"], Suspended)
        assert await here.later("1h") == {"run": Ok([None, "quiet"])}


async def test_a_signal_that_comes_at_the_deadline_wins_and_is_delivered_once() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        first = await ctx.wait_for_signal("news", timeout="1h", default="late")
        second = await ctx.wait_for_signal("news", key="second", timeout="1h", default="late")
        return first, second

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        here.clock.advance("1h")
        await here.runtime.signal("run", "news", "just in time")
        assert isinstance((await here.runtime.sweep())["run"], Suspended)
        assert await here.later("1h") == {"run": Ok(("just in time", "late"))}
        assert await here.keys("run") == ["news", "second"]


async def test_a_timeout_of_zero_takes_a_signal_that_is_there_and_waits_for_none() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return [await ctx.wait_for_signal("news", key=str(n), timeout=0, default=None) for n in range(3)]

    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.signal("run", "news", "one")
        assert await here.runtime.sweep() == {"run": Ok(["one", None, None])}


async def test_a_signal_is_rebuilt_as_what_the_wait_returns() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        decision = await ctx.wait_for_signal("decision", returns=Decision)
        many = await ctx.wait_for_signal("many", returns=list[Decision])
        plain = await ctx.wait_for_signal("plain")
        await ctx.sleep("end", "1h")
        return [repr(decision), repr(many), plain]

    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.signal("run", "decision", {"approved": True})
        await here.runtime.signal("run", "many", [{"approved": False, "by": "ada"}])
        await here.runtime.signal("run", "plain", {"approved": (1, 2)})
        assert isinstance((await here.runtime.sweep())["run"], Suspended)
        expected = ["Decision(approved=True, by='nobody')", "[Decision(approved=False, by='ada')]", {"approved": (1, 2)}]
        assert await here.later("1h") == {"run": Ok(expected)}


@pytest.mark.parametrize("payload", [None, "yes", {"approved": "maybe"}, {}, [True]], ids=repr)
async def test_a_signal_that_is_something_else_raises_the_same_again(payload: Any) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        error = await raised(ctx.wait_for_signal("decision", returns=Decision))
        assert isinstance(error, InvalidInput)
        await ctx.sleep("end", "1h")
        return str(error)

    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.signal("run", "decision", payload)
        assert isinstance((await here.runtime.sweep())["run"], Suspended)
        outcome = (await here.later("1h"))["run"]
        assert isinstance(outcome, Ok)
        assert "signal 'decision'" in outcome.value
