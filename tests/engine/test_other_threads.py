"""ctx belongs to the thread of the body: in any other it is refused at once, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from perdure import Context, Ok, Workflow, stores
from tests.patience import PATIENCE

Use = Callable[[Context[Any]], Any]


async def _in_timeout(ctx: Context[Any]) -> None:
    async with ctx.timeout("limit", "1h"):
        pass


async def _race(ctx: Context[Any]) -> None:
    await ctx.race(asyncio.sleep(0), asyncio.sleep(0))


ASYNC: dict[str, Callable[[Context[Any]], Coroutine[Any, Any, Any]]] = {
    "step": lambda ctx: ctx.step("inside", lambda: 1),
    "async step": lambda ctx: ctx.step("inside", asyncio.sleep, 0),
    "map": lambda ctx: ctx.map("inside", lambda n: n, [1, 2]),
    "empty map": lambda ctx: ctx.map("inside", lambda n: n, []),
    "race": _race,
    "sleep": lambda ctx: ctx.sleep("inside", "1h"),
    "signal": lambda ctx: ctx.wait_for_signal("inside"),
    "timeout": _in_timeout,
    "patched": lambda ctx: ctx.patched("inside"),
    "scope": lambda ctx: ctx.scope("inner").step("inside", lambda: 1),
}
PLAIN: dict[str, Use] = {"uuid4": lambda ctx: ctx.uuid4(), "random": lambda ctx: ctx.random()}


def _run(call: Callable[[Context[Any]], Coroutine[Any, Any, Any]], ctx: Context[Any]) -> Any:
    """On an event loop of its own, in the thread of the caller."""

    async def main() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await call(ctx)

    return asyncio.run(main())


USES: dict[str, Use] = {name: lambda ctx, call=call: _run(call, ctx) for name, call in ASYNC.items()} | PLAIN


@pytest.mark.parametrize("is_stored", [False, True], ids=["no store", "memory"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_ctx_in_another_thread_is_refused_at_once(use: Use, is_stored: bool) -> None:
    async def body(ctx: Context[Any]) -> str:
        before = await ctx.step("before", lambda: "before")
        with pytest.raises(RuntimeError, match=r"another thread than the body of run .* call ctx in the body"):
            await asyncio.to_thread(use, ctx)
        return before + await ctx.step("after", lambda: " after")

    flow = Workflow("flow", body)
    async with asyncio.timeout(PATIENCE):
        outcome = await flow.run(id="run", store=stores.memory()) if is_stored else Ok(await flow())
    assert outcome == Ok("before after")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_ctx_in_the_thread_of_a_plain_step_is_refused_at_once(use: Use) -> None:
    async def body(ctx: Context[Any]) -> str:
        with pytest.raises(RuntimeError, match="in the body"):
            await ctx.step("plain", use, ctx)
        return await ctx.step("after", lambda: "after")

    async with asyncio.timeout(PATIENCE):
        assert await Workflow("flow", body)() == "after"


async def test_values_of_ctx_can_be_read_in_any_thread() -> None:
    def read(ctx: Context[Any]) -> list[Any]:
        return [ctx.run_id, ctx.deps["name"], ctx.idempotency_key("send"), ctx.is_replaying]

    async def body(ctx: Context[Any]) -> Any:
        return [await asyncio.to_thread(read, ctx), await ctx.step("plain", read, ctx)]

    outcome = await Workflow("flow", body, deps={"name": "db"}).run(id="run", store=stores.memory())
    values = ["run", "db", "run/send", False]
    assert outcome == Ok([values, values])
