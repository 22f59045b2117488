"""Sets of a body's tasks iterate in the same order on every replay, and `as_completed` starts coroutines in the order given."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from perdure import Context, Workflow, workflow
from perdure.body.body_queue import BodyTask
from perdure.errors import PerdureWarning
from tests.engine.replays import twice

NAMES = "abcdefgh"


async def nothing() -> None:
    pass


def scatter() -> list[asyncio.Future[None]]:
    """Objects to be kept alive: what is created next gets other addresses than in the run before."""
    kept = [asyncio.Future[None]() for _ in range(random.Random().randrange(1, 200))]
    random.Random().shuffle(kept)
    return kept[: len(kept) // 2]


def named_tasks(start: Callable[[str], Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    """A task for each name, created in this order, at any address."""
    tasks: list[asyncio.Task[Any]] = []
    for name in NAMES:
        kept = scatter()
        tasks.append(asyncio.create_task(start(name), name=name))
        del kept
    return tasks


def names(tasks: Iterable[asyncio.Task[Any]]) -> str:
    return "".join(task.get_name() for task in tasks)


async def test_a_set_of_tasks_iterates_in_the_order_of_their_creation() -> None:
    async def body(ctx: Context[Any]) -> tuple[str, str, str]:
        del ctx
        tasks = named_tasks(lambda _: nothing())
        both = names(set(tasks)), names(dict.fromkeys(set(tasks)))
        done, _ = await asyncio.wait(tasks)
        return *both, names(done)

    assert await twice(body) == ((NAMES, NAMES, NAMES),) * 2


async def test_a_failing_group_cancels_its_children_in_the_order_of_their_creation() -> None:
    async def body(ctx: Context[Any]) -> str:
        left: list[str] = []

        async def child(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                left.append(name)

        async def failing() -> None:
            await ctx.step("begun", asyncio.sleep, 0)
            raise ValueError

        try:
            async with asyncio.TaskGroup() as group:
                for name in NAMES:
                    kept = scatter()
                    group.create_task(child(name))
                    del kept
                group.create_task(failing())
        except* ValueError:
            left.append("!")
        return "".join(left)

    assert await twice(body) == (f"{NAMES}!",) * 2


def in_a_list(coroutines: list[Any]) -> Any:
    return coroutines


def as_keys(coroutines: list[Any]) -> Any:
    return dict.fromkeys(coroutines)


def every_second_a_task(coroutines: list[Any]) -> Any:
    return [asyncio.ensure_future(each) if number % 2 else each for number, each in enumerate(coroutines)]


def each_twice(coroutines: list[Any]) -> Any:
    return [*coroutines, *coroutines]


@pytest.mark.parametrize("given", [in_a_list, as_keys, every_second_a_task, each_twice])
async def test_as_completed_starts_coroutines_in_the_order_in_which_they_are_given(given: Callable[[list[Any]], Any]) -> None:
    async def body(ctx: Context[Any]) -> tuple[str, list[str]]:
        begun: list[str] = []

        async def branch(name: str) -> str:
            begun.append(name)
            return await ctx.step("value", asyncio.sleep, 0, name, key=name)

        # Created, and with that at addresses, in any order.
        branches = {name: branch(name) for name in random.Random().sample(NAMES, len(NAMES))}
        values = [await each for each in asyncio.as_completed(given([branches[name] for name in NAMES]))]
        return "".join(begun), sorted(values)

    first, second = await twice(body)
    assert first == second
    assert first[1] == sorted(NAMES)
    assert first[0] == ("bdfhaceg" if given is every_second_a_task else NAMES)


async def test_as_completed_inside_as_completed_keeps_both_orders() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        begun: list[str] = []

        async def leaf(name: str) -> None:
            begun.append(name)
            await ctx.step("value", asyncio.sleep, 0, key=name)

        async def branch(name: str) -> None:
            begun.append(name)
            for each in asyncio.as_completed([leaf(f"{name}{n}") for n in range(3)]):
                await each

        for each in asyncio.as_completed([branch(name) for name in "xy"]):
            await each
        return begun

    expected = ["x", "y", "x0", "x1", "x2", "y0", "y1", "y2"]
    assert await twice(body) == (expected, expected)


class Awaitable:
    def __await__(self) -> Any:
        return nothing().__await__()


@pytest.mark.parametrize(
    "given", [set, iter, lambda coroutines: [*coroutines, Awaitable()]], ids=["set", "iterator", "other awaitables"]
)
async def test_what_as_completed_starts_in_any_order_is_warned_of(given: Callable[[list[Any]], Any]) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> int:
        del ctx
        return len([await each for each in asyncio.as_completed(given([nothing(), nothing()]))])

    with pytest.warns(PerdureWarning, match="pass a list of coroutines, or tasks"):
        assert await flow() >= 2


async def test_as_completed_outside_a_body_is_left_alone() -> None:
    ended = 0
    for each in asyncio.as_completed({nothing(), nothing()}):
        await each
        ended += 1
    assert ended == 2


async def test_a_body_runs_in_tasks_of_its_own_whatever_factory_the_loop_has() -> None:
    class OtherTask(asyncio.Task[Any]):
        pass

    made: list[asyncio.Task[Any]] = []

    async def flow(ctx: Context[Any]) -> list[str]:
        task = asyncio.create_task(ctx.step("one", asyncio.sleep, 3600))
        made.append(task)
        await ctx.step("two", asyncio.sleep, 0)
        task.cancel()
        await asyncio.wait([task])
        return [type(task).__name__]

    loop = asyncio.get_running_loop()
    definition = Workflow("flow", flow)
    loop.set_task_factory(lambda loop, coro, **options: OtherTask(coro, loop=loop, **options))
    try:
        assert await definition() == [BodyTask.__name__], "others hash by their address"
    finally:
        loop.set_task_factory(None)
    assert all(task.cancelled() for task in made)
