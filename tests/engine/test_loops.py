"""Bodies on several event loops and in several runtimes of one process, and inside each other's steps."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, stores
from perdure.store import FullStore

METHODS = ("call_soon", "call_soon_threadsafe", "create_task", "call_later", "call_at", "time")


async def work(label: str) -> str:
    await asyncio.sleep(0)
    return label


async def _branches(ctx: Context[Any], name: str) -> list[str]:
    """Use what a body may use: branches, sleeps and limits of asyncio, a thread."""
    async with asyncio.timeout(60):
        found = list(await asyncio.gather(*(ctx.step(work, f"{name} {number}", key=f"{number}") for number in range(20))))
    await asyncio.sleep(0.001)
    found.append(await asyncio.to_thread(str.upper, name))
    return found


branches: Workflow[[str], list[str]] = Workflow("branches", _branches)


def expected(name: str) -> list[str]:
    return [*(f"{name} {number}" for number in range(20)), name.upper()]


def test_bodies_on_loops_of_several_threads_do_not_meet() -> None:
    found: dict[str, Any] = {}
    left: list[str] = []

    async def run(name: str, store: FullStore) -> None:
        loop = asyncio.get_running_loop()
        async with Runtime(store, [branches], concurrency=4) as runtime:
            runs = [await runtime.start(branches, f"{name}{number}") for number in range(5)]
            found[name] = [await each for each in runs]
        left.extend(method for method in METHODS if method in vars(loop))

    threads = [threading.Thread(target=asyncio.run, args=(run(name, stores.memory()),)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [expected(f"{name}{number}") for number in range(5)] for name in "abcd"}
    assert left == []


async def test_two_runtimes_share_a_loop() -> None:
    first, second = Runtime(stores.memory(), [branches]), Runtime(stores.memory(), [branches])
    async with first, second:
        runs = [await runtime.start(branches, f"{number}") for runtime in (first, second) for number in range(10)]
        assert [await run for run in runs] == [expected(f"{number}") for number in range(10)] * 2
    assert not any(method in vars(asyncio.get_running_loop()) for method in METHODS)


@pytest.mark.parametrize("where", ["in the body", "in a step"])
async def test_a_run_of_another_workflow_on_the_same_loop(where: str) -> None:
    """It is a run of its own, with its own store or none, and not a child."""
    inner_store, outer_store = stores.memory(), stores.memory()

    async def inner() -> Any:
        return await branches.run("inner", id="inner", store=inner_store)

    async def outer(ctx: Context[Any]) -> list[str]:
        outcome = await (inner() if where == "in the body" else ctx.step(as_step))
        assert outcome == (Ok(expected("inner")) if where == "in the body" else expected("inner"))
        await ctx.wait_for_signal("go")
        return await ctx.step("after", branches_in_memory)

    async def as_step() -> Any:
        return (await inner()).unwrap()

    async def branches_in_memory() -> list[str]:
        return await branches("memory")

    flow = Workflow("outer", outer)
    async with Runtime(outer_store, [flow], concurrency=0, unload_grace=0) as runtime, asyncio.timeout(20):
        outcome = await runtime.run(flow, id="outer")
        assert isinstance(outcome, Suspended)
        await runtime.signal("outer", "go")
        assert await runtime.resume("outer") == Ok(expected("memory"))
    assert await keys(inner_store, "inner") == [f"{number}" for number in range(20)]
    assert await outer_store.get("outer/inner") is None


async def keys(store: FullStore, run_id: str) -> list[str]:
    return sorted((entry.key for entry in await store.journal(run_id) if entry.kind == "step"), key=int)


def test_a_loop_that_is_closed_while_a_body_waits_leaves_the_run_to_another() -> None:
    store = stores.memory()

    async def waits(ctx: Context[Any]) -> str:
        await ctx.step(work, "before")
        try:
            return str(await ctx.wait_for_signal("go"))
        except asyncio.CancelledError:
            cancelled.append("body")
            raise

    cancelled: list[str] = []
    flow = Workflow("waits", waits)

    async def begin() -> None:
        asyncio.get_running_loop().create_task(flow.run(id="run", store=store))
        while not [entry for entry in await store.journal("run") if entry.key == "go"]:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)

    async def end() -> Any:
        async with Runtime(store, [flow], concurrency=0) as runtime:
            await runtime.signal("run", "go", "gone")
            return await runtime.resume("run")

    asyncio.run(begin())
    outcome = asyncio.run(end())
    assert not isinstance(outcome, Err)
    assert outcome == Ok("gone")
