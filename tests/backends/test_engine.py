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
