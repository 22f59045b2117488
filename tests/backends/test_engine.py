"""The engine on each store: a run that sleeps, waits and ends, over two runtimes."""

from __future__ import annotations

from perdure import Context, Ok, Runtime, Suspended, workflow
from tests.backends.opening import store_at
from tests.backends.registry import Backend


def double(n: int) -> int:
    return 2 * n


@workflow
async def checkout(ctx: Context, n: int) -> int:
    first = await ctx.step(double, n)
    await ctx.sleep("nap", "5ms")
    added: int = await ctx.wait_for_signal("add")
    return await ctx.step(double, first + added, key="again")


async def test_a_run_goes_on_in_another_runtime(backend: Backend, shared_dsn: str) -> None:
    async with store_at(shared_dsn) as store, Runtime(store, workflows=[checkout]) as runtime:
        run = await runtime.start(checkout, 4, id="order-1")
        assert isinstance(await run.outcome(), Suspended)
    async with store_at(shared_dsn) as store, Runtime(store, workflows=[checkout]) as runtime:
        await runtime.signal("order-1", "add", 3)
        run = await runtime.start(checkout, 4, id="order-1")
        assert await run.outcome() == Ok(22)


@workflow
async def collect(ctx: Context, seen: list[int]) -> list[int]:
    seen = [*seen, await ctx.wait_for_signal("number", returns=int)]
    await ctx.step(double, len(seen))
    if len(seen) < 4:
        await ctx.continue_as(seen)
    return seen


async def test_a_run_starts_over_in_several_runtimes(backend: Backend, shared_dsn: str) -> None:
    async with store_at(shared_dsn) as store, Runtime(store, workflows=[collect]) as runtime:
        run = await runtime.start(collect, [], id="endless")
        for number in range(3):
            await run.signal("number", number)
        while (found := await runtime.describe("endless")).generation < 3 or found.status != "suspended":
            await store.watch(1.0)
    async with store_at(shared_dsn) as store, Runtime(store, workflows=[collect]) as runtime:
        run = await runtime.start(collect, [], id="endless")
        await run.signal("number", 3)
        assert await run == [0, 1, 2, 3]
        assert [entry.key for entry in await store.journal("endless") if entry.phase == "close"] == ["number", "double"]
