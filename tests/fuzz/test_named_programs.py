"""Programs that were found to go another way on a replay, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, Workflow, stores
from tests.patience import PATIENCE, turns

DEPTH = 8


def nested(awaitable: Awaitable[Any], how: str) -> Awaitable[Any]:
    """Return what waits for the awaitable through eight levels."""
    for _ in range(DEPTH):
        awaitable = asyncio.gather(awaitable) if how == "gather" else asyncio.shield(awaitable)
    return awaitable


@pytest.mark.parametrize("how", ["gather", "shield"])
async def test_a_step_that_is_awaited_through_eight_levels_is_seen_in_the_same_order_again(how: str) -> None:
    a_was_seen = asyncio.Event()
    orders: list[list[str]] = []

    async def a() -> str:
        return "a"

    async def b() -> str:
        """End when the body has seen what `a` gave."""
        async with asyncio.timeout(PATIENCE):
            await a_was_seen.wait()
        return "b"

    async def flow(ctx: Context[Any]) -> None:
        order: list[str] = []
        orders.append(order)

        async def deep() -> None:
            await nested(ctx.step(a), how)
            order.append("a")
            a_was_seen.set()

        async def flat() -> None:
            order.append(await ctx.step(b))

        await asyncio.gather(deep(), flat())
        await ctx.wait_for_signal("replay")

    workflow = Workflow("flow", flow)
    runtime = Runtime(stores.memory(), [workflow], unload_grace=0, concurrency=0)
    assert isinstance(await runtime.run(workflow, id="run"), Suspended)
    await runtime.signal("run", "replay")
    assert await runtime.resume("run") == Ok(None)
    await runtime.close()
    assert orders == [["a", "b"], ["a", "b"]]


async def test_a_step_that_asyncio_timeout_has_cut_off_is_not_called_again() -> None:
    charges = 0

    async def charge() -> None:
        nonlocal charges
        charges += 1
        await asyncio.sleep(PATIENCE)

    async def flow(ctx: Context[Any]) -> int:
        try:
            async with asyncio.timeout(0.01):
                await ctx.step(charge)
        except TimeoutError:
            for number in range(3):
                await ctx.wait_for_signal("go on", key=f"signal {number}")
        return charges

    workflow = Workflow("flow", flow)
    runtime = Runtime(stores.memory(), [workflow], unload_grace=0, concurrency=0)
    outcome: Any = await runtime.run(workflow, id="run")
    for _ in range(3):
        assert isinstance(outcome, Suspended)
        await runtime.signal("run", "go on")
        outcome = await runtime.resume("run")
    await runtime.close()
    assert outcome == Ok(1)


async def test_transactions_that_are_cancelled_together_do_not_keep_the_run_from_going_on(tmp_path: Path) -> None:
    errors: list[Exception] = []

    async def write(transaction: Any) -> None:
        await asyncio.sleep(PATIENCE)

    async def flow(ctx: Context[Any]) -> str:
        tasks = [asyncio.create_task(ctx.transaction("write", write, key=f"write {number}")) for number in range(2)]
        await turns()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        errors.extend(error for task in tasks if not task.cancelled() and isinstance(error := task.exception(), Exception))
        return await ctx.step("go on", str.upper, "went on")

    workflow = Workflow("flow", flow)
    store = stores.sqlite(tmp_path / "fuzz.db")
    async with asyncio.timeout(5):
        outcome = await Runtime(store, [workflow], concurrency=0).run(workflow, id="run")
    await store.close()
    assert not errors
    assert outcome == Ok("WENT ON")
