"""Cancelled ctx calls return to the body in the order in which they were cancelled, whatever their steps do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, stores, workflow
from tests.engine.replays import twice
from tests.engine.worlds import world
from tests.patience import PATIENCE, turns

forever = 3600


async def hang() -> None:
    await asyncio.sleep(forever)


async def hang_in_a_task() -> None:
    await asyncio.ensure_future(asyncio.sleep(forever))


async def hang_in_gathers() -> None:
    await asyncio.gather(asyncio.gather(asyncio.sleep(forever)), asyncio.sleep(forever))


async def hang_in_wait_for() -> None:
    await asyncio.wait_for(asyncio.sleep(forever), forever)


async def hang_and_clean_up() -> None:
    try:
        await asyncio.sleep(forever)
    finally:
        await asyncio.sleep(0.01)


async def hang_after_a_limit() -> None:
    """A time limit inside the step cancels the body's task too, which is no cancellation of the call."""
    try:
        async with asyncio.timeout(0):
            await asyncio.sleep(forever)
    except TimeoutError:
        await asyncio.sleep(forever)


async def swallow() -> str:
    try:
        await asyncio.sleep(forever)
    except asyncio.CancelledError:
        return "swallowed"
    return "never"


def in_a_thread() -> None:
    threading.Event().wait(0.15)


HANGING: list[Callable[[], Any]] = [
    hang,
    hang_in_a_task,
    hang_in_gathers,
    hang_in_wait_for,
    hang_and_clean_up,
    hang_after_a_limit,
    in_a_thread,
]


def branch(left: list[str], name: str, call: Callable[[], Awaitable[Any]]) -> asyncio.Task[None]:
    """A task that notes when it leaves the call because it was cancelled."""

    async def work() -> None:
        try:
            await call()
        except asyncio.CancelledError:
            left.append(name)
            raise

    return asyncio.create_task(work())


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(HANGING, 2)))
async def test_two_branches_leave_their_steps_in_the_same_order_again(
    first: Callable[[], Any], second: Callable[[], Any]
) -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        left: list[str] = []
        tasks = [branch(left, fn.__name__, lambda fn=fn: ctx.step(fn)) for fn in (first, second)]  # type: ignore[misc]
        await ctx.step("begun", turns, 10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return left

    left, again = await twice(body)
    assert left == again
    assert sorted(left) == sorted([first.__name__, second.__name__])


async def test_what_waits_for_a_lock_leaves_before_steps_on_the_first_run_too() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        left: list[str] = []
        mutex = asyncio.Lock()

        async with mutex:
            tasks = [
                branch(left, "a", lambda: ctx.step(hang)),
                branch(left, "b", mutex.acquire),
                branch(left, "c", lambda: ctx.step(hang_and_clean_up)),
                branch(left, "d", mutex.acquire),
            ]
            await ctx.step("begun", turns, 10)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return left

    assert await twice(body) == (["b", "d", "a", "c"], ["b", "d", "a", "c"])


async def test_a_result_comes_between_a_cancellation_and_the_return_of_its_call_on_the_replay_too() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        seen: list[str] = []

        async def cancelled() -> None:
            try:
                await ctx.step(hang_and_clean_up)
            except asyncio.CancelledError:
                seen.append("cancelled")

        task = asyncio.ensure_future(cancelled())
        await ctx.step("begun", turns, 10)
        task.cancel()
        seen.append(await ctx.step("quick", asyncio.sleep, 0, "quick"))
        await task
        return seen

    assert await twice(body) == (["quick", "cancelled"], ["quick", "cancelled"])


async def test_a_step_that_swallows_its_cancellation_gives_its_result_and_the_next_await_is_cancelled() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        seen: list[str] = []

        async def work() -> None:
            seen.append(await ctx.step(swallow))
            await ctx.step("never", turns, 1)

        task = asyncio.ensure_future(work())
        await ctx.step("begun", turns, 10)
        task.cancel()
        await asyncio.wait([task])
        return [*seen, str(task.cancelled())]

    assert await twice(body) == (["swallowed", "True"],) * 2


async def test_a_call_that_waits_to_return_is_not_cancelled_again() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        seen: list[str] = []

        async def cancelled() -> None:
            try:
                await ctx.step(hang)
            except asyncio.CancelledError as error:
                seen.append(str(error))
            seen.append(await ctx.step("after", asyncio.sleep, 0, "after"))

        task = asyncio.ensure_future(cancelled())
        other = asyncio.ensure_future(ctx.step("other", hang_and_clean_up))
        await ctx.step("begun", turns, 10)
        task.cancel("once")
        other.cancel()
        await turns(3)
        task.cancel("again")
        await asyncio.wait([task, other])
        return seen

    assert await twice(body) == (["once", "after"], ["once", "after"])


async def test_a_task_that_cancelled_itself_before_a_call_is_let_out_of_it() -> None:
    async def body(ctx: Context[Any]) -> bool:
        async def cancelled() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await ctx.step(hang)

        task = asyncio.ensure_future(cancelled())
        await asyncio.wait([task])
        return task.cancelled()

    assert await twice(body) == (True, True)


async def test_a_run_leaves_memory_although_a_cancelled_step_has_not_unwound() -> None:
    is_unwinding = asyncio.Event()

    async def unwind() -> None:
        try:
            await asyncio.sleep(forever)
        finally:
            is_unwinding.set()
            await asyncio.sleep(0.05)

    async def flow(ctx: Context[Any]) -> None:
        tasks = [asyncio.ensure_future(ctx.step("unwind", unwind)), asyncio.ensure_future(ctx.step(hang))]
        await ctx.step("begun", turns, 10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    definition = Workflow("flow", flow)
    async with world(definition) as here:
        driving = asyncio.ensure_future(here.runtime.run(definition, id="run"))
        await is_unwinding.wait()
        driving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving
        run = await here.runtime.get("run")
        assert run is not None
        assert await run.status() == "pending"


async def test_a_wide_group_is_cancelled_in_one_go() -> None:
    count = 300

    async def body(ctx: Context[Any]) -> list[int]:
        left: list[int] = []

        async def child(number: int) -> None:
            try:
                await ctx.step("hang", hang, key=f"{number}")
            finally:
                left.append(number)

        async def failing() -> None:
            await ctx.step("begun", turns, 10)
            raise ValueError

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(count):
                    group.create_task(child(number))
                group.create_task(failing())
        except* ValueError:
            left.append(-1)
        return left

    async with asyncio.timeout(PATIENCE):
        assert await twice(body) == ([*range(count), -1],) * 2


async def test_a_run_without_a_store_cancels_its_steps_too() -> None:
    async def flow(ctx: Context[Any]) -> list[str]:
        left: list[str] = []
        tasks = [branch(left, "a", lambda: ctx.step(hang_in_gathers)), branch(left, "b", lambda: ctx.step(hang))]
        await ctx.step("begun", turns, 10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return left

    assert sorted(await Workflow("flow", flow)()) == ["a", "b"]


async def test_what_a_failure_had_cancelled_is_called_again_after_a_retry_and_replays_like_that() -> None:
    calls: list[str] = []

    async def fails_once() -> str:
        calls.append("fails once")
        if calls.count("fails once") == 1:
            raise OSError("not yet")
        return "went well"

    async def hangs_once() -> str:
        calls.append("hangs once")
        if calls.count("hangs once") == 1:
            await asyncio.get_running_loop().create_future()
        return "ended"

    @workflow
    async def flow(ctx: Context[Any]) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(ctx.step(hangs_once))
            failing = group.create_task(ctx.step(fails_once))
        return [hanging.result(), failing.result(), await ctx.wait_for_signal("go")]

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        await here.runtime.retry("run")
        assert isinstance((await here.later("1m"))["run"], Suspended)
        await here.runtime.signal("run", "go", "now")
        assert await here.later("1m") == {"run": Ok(["ended", "went well", "now"])}
    assert Counter(calls) == {"fails once": 2, "hangs once": 2}


async def test_after_a_retry_what_a_cancelled_call_kept_back_is_not_missing() -> None:
    """The retry has dropped the end of the cancelled call too. So the call ends again before anything is judged."""
    may_fail, has_failed = asyncio.Event(), False

    async def undo(_: None) -> None:
        """Nothing is to be undone."""

    async def hang() -> None:
        await asyncio.get_running_loop().create_future()

    async def fails_once() -> str:
        nonlocal has_failed
        await may_fail.wait()
        if not has_failed:
            has_failed = True
            raise OSError("not yet")
        return "charged"

    @workflow
    async def flow(ctx: Context[Any]) -> list[Any]:
        async def limited() -> str:
            with contextlib.suppress(TimeoutError):
                async with ctx.timeout("limit", 0.01):
                    await ctx.step("fee", hang, compensate=undo)
            value = await ctx.step("after the limit", str.upper, "done")
            may_fail.set()
            return value

        return list(await asyncio.gather(limited(), ctx.step("charge", fails_once, compensate=undo)))

    async with Runtime(stores.memory(), [flow], concurrency=0) as runtime, asyncio.timeout(PATIENCE):
        assert isinstance(await runtime.run(flow, id="run"), Err)
        await runtime.retry("run")
        assert await runtime.resume("run") == Ok(["DONE", "charged"])
