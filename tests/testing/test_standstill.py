"""A test that awaits a run which nothing can move any more fails, and says what every run waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from perdure import Context, Runtime, Suspended, testing, workflow
from perdure.testing import NothingMoves


@workflow
async def signalled(ctx: Context) -> Any:
    return await ctx.wait_for_signal("paid")


@workflow
async def decided(ctx: Context) -> None:
    await ctx.sleep("first", "3d")
    await ctx.approve("refund", 5)


@workflow
async def parent(ctx: Context) -> Any:
    return await ctx.child(signalled, key="the payment")


@workflow
async def asks_twice(ctx: Context) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.wait_for_signal("paid"))
        group.create_task(ctx.wait_for_signal("shipped"))


@workflow
async def blocked(ctx: Context) -> None:
    await ctx.sleep("first", "1h")
    await asyncio.Event().wait()


@workflow
async def half_blocked(ctx: Context) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.wait_for_signal("paid"))
        group.create_task(asyncio.Event().wait())


async def hang() -> None:
    await asyncio.Event().wait()


@workflow
async def hanging(ctx: Context) -> None:
    await ctx.step(hang)


@workflow
async def ticking(ctx: Context) -> None: ...


WORKFLOWS = [signalled, decided, parent, asks_twice, blocked, half_blocked, hanging, ticking]

FIRST_LINE = "run 'r' is awaited, and nothing can move it any more:"


@pytest.mark.parametrize(
    ("flow", "lines"),
    [
        (signalled, ["'r' of 'signalled' waits for signal 'paid'"]),
        (decided, ["'r' of 'decided' waits for approval 'refund'"]),
        (parent, ["'r' of 'parent' waits for child 'the payment'", "'r/the payment' of 'signalled' waits for signal 'paid'"]),
        (asks_twice, ["'r' of 'asks_twice' waits for signal 'paid' and waits for signal 'shipped'"]),
        (blocked, ["'r' of 'blocked' waits for something of its own, neither a step nor ctx"]),
        (half_blocked, ["'r' of 'half_blocked' waits for signal 'paid'"]),
        (hanging, ["'r' of 'hanging' is at step 'hang', which does not end"]),
    ],
)
@pytest.mark.parametrize("auto_skip", [True, False])
async def test_what_each_run_waits_for_is_said(flow: Any, lines: list[str], auto_skip: bool) -> None:
    async with testing.runtime(*WORKFLOWS, auto_skip=auto_skip, hang_after="50ms", drain_after=0.01) as rt:
        run = await rt.start(flow, id="r")
        if not auto_skip:
            await rt.skip("3d")
        with pytest.raises(NothingMoves) as failure:
            await asyncio.wait_for(asyncio.ensure_future(run), 20)
    first, *others, _ = str(failure.value).splitlines()
    assert first == FIRST_LINE
    assert sorted(line.strip() for line in others) == sorted(failure.value.waits) == sorted(lines)


async def test_a_test_that_only_awaits_a_run_fails_at_once() -> None:
    async with testing.runtime(*WORKFLOWS, hang_after="1h") as rt:
        await rt.schedule(ticking, every="1h")
        run = await rt.start(parent, id="r")
        began = time.monotonic()
        with pytest.raises(NothingMoves, match=r"(?s)'r' of 'parent' waits for .*rt\.signal_when_waiting"):
            await run
        assert time.monotonic() - began < 30


def test_so_does_one_that_is_no_coroutine() -> None:
    with testing.runtime_sync(*WORKFLOWS, hang_after="1h") as rt:
        run = rt.start(signalled, id="r")
        with pytest.raises(NothingMoves, match="'r' of 'signalled' waits for signal 'paid'"):
            run.result()
        run.signal("paid", "yes")
        assert run.result() == "yes"


async def test_a_run_that_is_on_hold_is_told() -> None:
    async with testing.runtime(*WORKFLOWS) as rt:
        await rt.run(decided, id="other")
        run = await rt.start(signalled, id="r")
        await rt.settle()
        await rt.hold("r")
        with pytest.raises(NothingMoves) as failure:
            await run
    assert sorted(failure.value.waits) == [
        "'other' of 'decided' waits for approval 'refund'",
        "'r' of 'signalled' waits for signal 'paid' and is on hold",
    ]


async def test_without_skips_the_time_that_a_run_waits_for_is_told() -> None:
    async with testing.runtime(*WORKFLOWS, auto_skip=False) as rt:
        run = await rt.start(decided, id="r")
        await rt.skip("1d")
        with pytest.raises(NothingMoves, match="'r' of 'decided' waits until 2026-01-04 00:00:00"):
            await run


async def test_another_task_may_still_move_a_run() -> None:
    async with testing.runtime(*WORKFLOWS, hang_after="1h") as rt:
        run = await rt.start(parent, id="r")
        is_awaited = asyncio.Event()

        async def wait() -> Any:
            is_awaited.set()
            return await run

        waiting = asyncio.create_task(wait())
        await is_awaited.wait()
        await rt.settle()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await rt.signal("r/the payment", "paid", "yes")
        assert await waiting == "yes"


async def test_runs_that_are_awaited_together_fail_together() -> None:
    async with testing.runtime(*WORKFLOWS, hang_after="50ms") as rt:
        runs = [await rt.start(signalled, id=name) for name in "ab"]
        both = ["'a' of 'signalled' waits for signal 'paid'", "'b' of 'signalled' waits for signal 'paid'"]
        failures = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(failure, NothingMoves) and sorted(failure.waits) == both for failure in failures)


async def test_no_time_passes_for_a_run_that_does_not_wait_for_it() -> None:
    async with testing.runtime(*WORKFLOWS, hang_after="50ms") as rt:
        before = rt.now()
        for name in "ab":
            assert isinstance(await rt.run(blocked, id=name), Suspended)
        assert rt.now() - before < timedelta(hours=3)


async def test_a_body_that_does_something_of_its_own_may_take_its_time() -> None:
    @workflow
    async def busy(ctx: Context) -> str:
        for _ in range(5):
            await asyncio.sleep(0.01)
        return "done"

    async with testing.runtime(busy) as rt:
        assert await (await rt.start(busy)) == "done"


async def test_every_run_of_a_test_moves_its_time() -> None:
    @workflow
    async def sleepy(ctx: Context) -> str:
        await ctx.sleep("nap", "30d")
        return ctx.run_id

    made: list[Callable[[testing.VirtualRuntime], Any]] = [
        lambda rt: rt.signal_with_start(sleepy, id="r", signal="unused"),
        lambda rt: rt.fork("old", from_step="nap", id="r"),
        lambda rt: first_of(rt.start_many(sleepy, [()], ids=["r"])),
    ]

    async def first_of(runs: Any) -> Any:
        return (await runs)[0]

    for make in made:
        async with testing.runtime(sleepy) as rt:
            await rt.run(sleepy, id="old")
            run = await make(rt)
            assert await asyncio.wait_for(asyncio.ensure_future(run), 20) == "r"


async def test_a_runtime_that_does_not_work_says_what_it_does_not_do() -> None:
    rt = testing.runtime(signalled)
    try:
        run = await Runtime.start(rt, signalled, id="r")
        with pytest.raises(NothingMoves, match="'r' of 'signalled' is due in queue 'default', and no worker here has taken it"):
            await run
    finally:
        await rt.close()
