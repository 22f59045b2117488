"""anyio's cancel scopes and task groups in a body: they cancel and end as asyncio's do, on the first run and on a replay."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from perdure import Context, stores
from tests.engine.test_time_limits_of_asyncio import drive_to_the_end
from tests.simulation import simulate

Call = Callable[[Context[Any]], Coroutine[Any, Any, Any]]

# Each takes far longer than the time limits below.
CALLS: dict[str, Call] = {
    "step": lambda ctx: ctx.step("hang", asyncio.sleep, 3600),
    "plain sleep": lambda _: asyncio.sleep(3600),
    "sleep": lambda ctx: ctx.sleep("hang", 5),
    "signal": lambda ctx: ctx.wait_for_signal("hang", timeout=5, default=None),
}
on_each_call = pytest.mark.parametrize("name", CALLS)


class Log:
    """What the body saw, once for each drive, and how often its steps were called."""

    def __init__(self) -> None:
        self.drives: list[list[object]] = []
        self.ran: Counter[str] = Counter()

    async def step(self, name: str) -> str:
        self.ran[name] += 1
        return name

    def driven(self, body: Callable[[Context[Any], list[object]], Coroutine[Any, Any, None]]) -> list[list[object]]:
        """What the body saw on its first run, and on the replay after a long sleep."""

        async def flow(ctx: Context[Any]) -> None:
            seen: list[object] = []
            self.drives.append(seen)
            await body(ctx, seen)
            await ctx.step(self.step, "after", key="after")
            await ctx.sleep("until the replay", 100)

        simulate(drive_to_the_end(stores.memory(), flow))
        assert self.ran["after"] == 1
        assert len(self.drives) == 2
        return self.drives


@on_each_call
def test_move_on_after_ends_a_call(name: str) -> None:
    async def body(ctx: Context[Any], seen: list[object]) -> None:
        with anyio.move_on_after(1) as scope:
            await CALLS[name](ctx)
        task = asyncio.current_task()
        assert task is not None
        seen.extend((scope.cancelled_caught, task.cancelling()))

    assert Log().driven(body) == [[True, 0], [True, 0]]


@on_each_call
def test_fail_after_ends_a_call(name: str) -> None:
    async def body(ctx: Context[Any], seen: list[object]) -> None:
        try:
            with anyio.fail_after(1):
                await CALLS[name](ctx)
        except TimeoutError:
            seen.append("late")

    assert Log().driven(body) == [["late"], ["late"]]


@on_each_call
def test_a_cancelled_group_ends_its_calls(name: str) -> None:
    log = Log()

    async def body(ctx: Context[Any], seen: list[object]) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(CALLS[name], ctx)
            seen.append(await ctx.step(log.step, "beside", key="beside"))
            await asyncio.sleep(0)
            group.cancel_scope.cancel()
        seen.append(group.cancel_scope.cancelled_caught)

    assert log.driven(body) == [["beside", True], ["beside", True]]
    assert log.ran["beside"] == 1


@on_each_call
def test_a_group_whose_child_fails_ends_the_others(name: str) -> None:
    async def divide() -> int:
        return 1 // 0

    async def fail(ctx: Context[Any]) -> None:
        await ctx.step(divide)

    async def body(ctx: Context[Any], seen: list[object]) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(CALLS[name], ctx)
                group.start_soon(fail, ctx)
        except* ZeroDivisionError as errors:
            seen.append(len(errors.exceptions))

    assert Log().driven(body) == [[1], [1]]


@on_each_call
def test_a_scope_that_is_cancelled_before_the_call_lets_it_not_begin(name: str) -> None:
    async def body(ctx: Context[Any], seen: list[object]) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await CALLS[name](ctx)
        seen.append(scope.cancelled_caught)

    assert Log().driven(body) == [[True], [True]]


def test_the_calls_of_a_group_run_side_by_side_and_are_replayed() -> None:
    log = Log()

    async def body(ctx: Context[Any], seen: list[object]) -> None:
        async def one(name: str) -> None:
            await ctx.sleep(f"pause {name}", 1)
            seen.append(await ctx.step(log.step, name, key=name))

        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(one, name)

    first, second = log.driven(body)
    assert first == second == ["a", "b", "c"]
    assert all(log.ran[name] == 1 for name in "abc")


def test_a_task_of_a_body_shows_the_state_of_its_coroutine() -> None:
    async def child() -> None:
        await asyncio.sleep(1)

    async def body(ctx: Context[Any], seen: list[object]) -> None:
        task = asyncio.create_task(child())
        coroutine: Any = task.get_coro()
        seen.append(inspect.getcoroutinestate(coroutine))
        await asyncio.sleep(0.5)
        seen.append((inspect.getcoroutinestate(coroutine), coroutine.__name__, coroutine.__qualname__.rpartition(".")[2]))
        await task

    assert Log().driven(body)[0] == [inspect.CORO_CREATED, (inspect.CORO_SUSPENDED, "child", "child")]
