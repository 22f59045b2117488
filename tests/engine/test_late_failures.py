"""A plain function that fails when nobody waits for it any more: asyncio has nothing to report."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from perdure import Context, Ok, Runtime, StepTimeout, Workflow, stores
from perdure.testing.processes import process_pool
from tests.engine.replays import raised


def fail_late(has_begun: str, may_fail: str) -> None:
    """Fail when it may. In a thread or in another process: both wait at a named pipe for its other end."""
    Path(has_begun).write_text("")
    Path(may_fail).read_text()
    raise ConnectionError("too late")


def do_nothing() -> None:
    pass


Call: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
Begun: TypeAlias = asyncio.Future[str]


async def lose_a_race(ctx: Context[Any], begun: Begun, call: Call) -> None:
    async def win() -> None:
        await asyncio.shield(begun)

    await ctx.race(ctx.step(win), call())


async def time_out(ctx: Context[Any], begun: Begun, call: Call) -> None:
    assert isinstance(await raised(call(timeout=0.01, abandon=True)), StepTimeout)


async def stand_beside_a_failure(ctx: Context[Any], begun: Begun, call: Call) -> None:
    async def fail() -> None:
        await asyncio.shield(begun)
        raise ValueError("first")

    async with asyncio.TaskGroup() as group:
        group.create_task(call())
        group.create_task(ctx.step(fail))


async def be_cancelled(ctx: Context[Any], begun: Begun, call: Call) -> None:
    await call()


@pytest.fixture(params=["threads", "thread pool", "process pool"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    """Make one call at a time."""
    if request.param == "threads":
        yield None
        return
    with ThreadPoolExecutor(1) if request.param == "thread pool" else process_pool(1) as made:
        yield made


@pytest.mark.parametrize("give_up", [lose_a_race, time_out, stand_beside_a_failure, be_cancelled])
async def test_what_a_step_raises_that_was_given_up_is_not_reported(
    give_up: Callable[[Context[Any], Begun, Call], Awaitable[None]], executor: Executor | None, tmp_path: Path
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    has_begun, may_fail = tmp_path / "begun", tmp_path / "may fail"
    for pipe in (has_begun, may_fail):
        os.mkfifo(pipe)
    begun = asyncio.ensure_future(asyncio.to_thread(has_begun.read_text))

    async def body(ctx: Context[Any]) -> None:
        await give_up(ctx, begun, partial(ctx.step, fail_late, str(has_begun), str(may_fail), executor=executor))

    async def next_call(ctx: Context[Any]) -> None:
        await ctx.step(do_nothing, executor=executor)

    flow, after = Workflow("flow", body), Workflow("after", next_call)
    async with Runtime(stores.memory(), [flow, after], concurrency=1) as runtime:
        run = await runtime.start(flow)
        await begun
        if give_up is be_cancelled:
            await run.cancel()
        await run.outcome()
        await asyncio.to_thread(may_fail.write_text, "")
        assert await runtime.run(after) == Ok(None), "called when the other call is over"
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(0)
    assert reported == []
