"""The engine on each store: a run that sleeps, waits and ends, over two runtimes."""

from __future__ import annotations

import pytest

from perdure import Context, Ok, RunDiverged, Runtime, Suspended, Workflow, workflow
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


class Declined(Exception):
    """An error with a part that cannot be stored."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code, self.page = code, object()


def decline() -> None:
    try:
        int("many")
    except ValueError as error:
        raise ExceptionGroup("group", [Declined(402)]) from error


@workflow
async def handle(ctx: Context) -> list[str]:
    try:
        await ctx.step(decline)
    except* Declined as group:
        (error,) = group.exceptions
        seen = [repr(error), str(vars(error)), repr(error.__cause__), repr(group.__cause__)]
    SEEN.append(seen)
    await ctx.wait_for_signal("go")
    return seen


SEEN: list[list[str]] = []


async def test_a_handled_error_is_the_same_in_another_runtime(backend: Backend, shared_dsn: str) -> None:
    SEEN.clear()
    async with store_at(shared_dsn) as store, Runtime(store, workflows=[handle]) as runtime:
        run = await runtime.start(handle, id="handled")
        assert isinstance(await run.outcome(), Suspended)
    async with store_at(shared_dsn) as store, Runtime(store, workflows=[handle]) as runtime:
        await runtime.signal("handled", "go")
        run = await runtime.start(handle, id="handled")
        assert await run.outcome() == Ok(SEEN[0])
    assert SEEN[0] == SEEN[-1]
    assert "'code': 402" in SEEN[0][1]
    assert "page (object)" in SEEN[0][1]


def flow_of(*keys: str) -> Workflow[[], None]:
    async def flow(ctx: Context) -> None:
        for key in keys:
            await ctx.step(key, double, 1)
        if "b" in keys:
            await ctx.wait_for_signal("go")

    return Workflow("flow", flow, on_definition_change="ignore")


async def test_a_function_that_ends_early_stops_its_run_until_the_code_fits(backend: Backend, shared_dsn: str) -> None:
    for keys, status in ((("a", "b"), "suspended"), (("a",), "pending"), (("a", "b"), "completed")):
        async with store_at(shared_dsn) as store, Runtime(store, workflows=[flow_of(*keys)], concurrency=0) as runtime:
            if status == "suspended":
                await runtime.run("flow", id="early")
                await runtime.signal("early", "go")
            elif status == "pending":
                with pytest.raises(RunDiverged):
                    await runtime.resume("early")
            else:
                assert await runtime.resume("early") == Ok(None)
            assert (await runtime.describe("early")).status in (status, "pending")
