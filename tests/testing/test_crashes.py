"""`crash_everywhere` passes what is correct, and finds planted bugs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from perdure import Approved, Context, Err, Ok, Retry, Workflow, current_step, testing, workflow

sent: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_sent() -> None:
    sent.clear()


async def reserve(item: str) -> str:
    sent.append(f"reserve {item}")
    return f"{item} is reserved"


def charge(cents: int) -> int:
    sent.append(f"charge {cents}")
    return cents


async def flaky() -> str:
    sent.append(f"flaky {current_step().attempt}")
    if current_step().attempt < 3:
        raise OSError("not yet")
    return "third time"


async def slow() -> None:
    await asyncio.Event().wait()


@workflow
async def order(ctx: Context, item: str) -> list[Any]:
    found: list[Any] = [await ctx.step(reserve, item), await ctx.step(charge, 300)]
    found += await asyncio.gather(ctx.step("left", reserve, "left"), ctx.step("right", reserve, "right"))
    found.append(await ctx.step(flaky, retry=Retry(attempts=3, wait_initial="1h", wait_max="1d", wait_jitter=0)))
    await ctx.sleep("settle", "14d")
    found.append(await ctx.wait_for_signal("review"))
    found += await ctx.map("each", reserve, ["a", "b"])
    found.append(await ctx.race(ctx.step("fast", reserve, "fast"), ctx.step(slow)))
    found += [ctx.now(), ctx.uuid4()]
    return found


async def test_a_correct_workflow_passes() -> None:
    report = await testing.crash_everywhere(order, "book", effects=sent, signals={"review": "yes"})
    assert isinstance(report.outcome, Ok)
    assert report.outcome.value[:3] == ["book is reserved", 300, "left is reserved"]
    assert report.by_verb["record"] >= 18
    assert report.by_verb["create"] == 2
    assert report.by_verb["finish"] == 2
    assert report.crash_points == sum(report.by_verb.values()) > 40


async def test_a_workflow_that_fails_passes_too() -> None:
    async def refuse() -> None:
        raise ValueError("no")

    @workflow
    async def refused(ctx: Context) -> None:
        await ctx.step(refuse)

    report = await testing.crash_everywhere(refused)
    assert isinstance(report.outcome, Err)


async def test_an_effect_outside_a_step_is_found() -> None:
    @workflow
    async def leaky(ctx: Context) -> None:
        await ctx.step(reserve, "book")
        sent.append("mail")
        await ctx.step(charge, 300)

    with pytest.raises(AssertionError, match=r"crashed .*the effect 'mail' happened once more: it is outside a step"):
        await testing.crash_everywhere(leaky, effects=sent)


@pytest.mark.parametrize("source", [time.time_ns, random.random])
async def test_a_key_built_from_the_clock_or_at_random_is_found(source: Any) -> None:
    @workflow
    async def clocked(ctx: Context) -> None:
        await ctx.step("reserve", reserve, "book", key=f"reserve:{source()}")
        await ctx.step(charge, 300)

    with pytest.raises(AssertionError, match=r"crashed .*(cannot go on|a key must be the same on every replay)"):
        await testing.crash_everywhere(clocked, effects=sent)


def deploys(*aliases: str) -> Callable[[int], Workflow[Any, Any]]:
    """A workflow whose first step has another name after a restart."""

    def deploy(restarts: int) -> Workflow[Any, Any]:
        async def renamed(ctx: Context) -> None:
            if restarts == 0:
                await ctx.step("reserve", reserve, "book")
            else:
                await ctx.step("book", reserve, "book", aliases=aliases)
            await ctx.step(charge, 300)

        return Workflow("renamed", renamed)

    return deploy


async def test_a_step_that_was_renamed_is_found() -> None:
    with pytest.raises(AssertionError, match=r"crashed .*run 'crashed' cannot go on: .*'reserve'"):
        await testing.crash_everywhere(deploys(), effects=sent)


async def test_a_step_that_was_renamed_with_an_alias_passes() -> None:
    report = await testing.crash_everywhere(deploys("reserve"), effects=sent)
    assert report.outcome == Ok(None)


async def test_a_result_that_depends_on_the_attempt_is_found() -> None:
    drives: list[int] = []

    @workflow
    async def counted(ctx: Context) -> int:
        drives.append(1)
        await ctx.step(reserve, "book")
        return len(drives)

    with pytest.raises(AssertionError, match=r"crashed before call 1 that writes \(create\): the outcome is Ok"):
        await testing.crash_everywhere(counted)
    await testing.crash_everywhere(counted, compare=type)


async def test_a_random_value_that_reaches_the_next_step_is_found() -> None:
    async def pay(amount: float) -> None:
        sent.append(f"pay {amount}")

    @workflow
    async def unstable(ctx: Context) -> None:
        await ctx.step(pay, random.random())

    with pytest.raises(AssertionError, match="was lost"):
        await testing.crash_everywhere(unstable, effects=sent)


async def test_a_body_that_cleans_up_with_steps_passes() -> None:
    @workflow
    async def tidy(ctx: Context) -> str:
        try:
            return await ctx.step(reserve, "room")
        finally:
            await ctx.step(charge, 300)

    assert (await testing.crash_everywhere(tidy, effects=sent)).outcome == Ok("room is reserved")


async def test_a_mock_counts_effects_and_stubs_are_prepared() -> None:
    gateway = Mock()
    gateway.charge.return_value = 5

    @workflow
    async def paying(ctx: Context) -> list[Any]:
        return [await ctx.step(gateway.charge, 300), await ctx.step(reserve, "book")]

    def prepare(rt: testing.VirtualRuntime) -> None:
        rt.stub(reserve, returns="stubbed")

    report = await testing.crash_everywhere(paying, effects=gateway, prepare=prepare)
    assert report.outcome == Ok([5, "stubbed"])
    assert sent == []


async def test_children_are_crashed_with_their_parents() -> None:
    @workflow
    async def part(ctx: Context, item: str) -> str:
        await ctx.sleep("wait", "1d")
        return await ctx.step(reserve, item)

    @workflow
    async def whole(ctx: Context) -> list[str]:
        return [await ctx.child(part, "one"), *await ctx.map(part, ["two", "three"])]

    report = await testing.crash_everywhere(whole, effects=sent, workflows=[part])
    assert report.outcome == Ok([f"{item} is reserved" for item in ("one", "two", "three")])
    assert report.by_verb["create"] == report.by_verb["finish"] == 8  # four runs, before and after


async def test_each_scripted_answer_is_given_once_whatever_crashes() -> None:
    @workflow
    async def asking(ctx: Context) -> list[Any]:
        first = await ctx.wait_for_signal("word", key="first")
        approved = await ctx.approve("publish", "text", expires_in="7d")
        second = await ctx.wait_for_signal("word", key="second")
        return [first, isinstance(approved, Approved), second]

    def prepare(rt: testing.VirtualRuntime) -> None:
        rt.signal_when_waiting("word", "one")
        rt.signal_when_waiting("word", "two")
        rt.approve_when_waiting("publish", by="ada")

    report = await testing.crash_everywhere(asking, prepare=prepare)
    assert report.outcome == Ok(["one", True, "two"])


async def test_a_run_that_does_not_end_says_what_it_waits_for() -> None:
    with pytest.raises(AssertionError, match="waits for signal 'review' and does not end; pass what it waits for in signals="):
        await testing.crash_everywhere(order, "book")


async def test_effects_that_are_no_list_are_refused() -> None:
    with pytest.raises(TypeError, match="a list, a function that gives one, or a Mock, not 3"):
        await testing.crash_everywhere(order, "book", effects=3)
