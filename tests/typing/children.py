"""What `ctx.child`, `ctx.start_child`, `ctx.map` over a workflow and `await other(...)` infer."""

from __future__ import annotations

from typing import Any, assert_type

from perdure import Child, Context, Err, Ok, workflow


@workflow
async def ship(ctx: Context, item: str) -> int:
    return len(item)


@workflow
async def charge(ctx: Context, cents: int) -> Ok[str] | Err[ValueError]:
    return Ok(str(cents))


@workflow
async def two(ctx: Context, a: int, b: str) -> None: ...


async def children_give_what_their_functions_give(ctx: Context[Any]) -> None:
    assert_type(await ctx.child(ship, "book"), int)
    assert_type(await ctx.child(ship, "book", key="ship:book", id="mine", queue="slow", priority=1, deadline="1h"), int)
    assert_type(await ctx.child(charge, 100), str)
    assert_type(await ctx.child(two, 1, "b"), None)
    assert_type(await ship("book"), int)


async def handles_are_awaited(ctx: Context[Any]) -> None:
    child = ctx.start_child(ship, "book", detached=True)
    assert_type(child, Child[int])
    assert_type(child.id, str)
    assert_type(await child, int)
    assert_type(await ctx.start_child(charge, 100, key="charge"), str)
    child.cancel()


async def maps_start_children(ctx: Context[Any]) -> None:
    assert_type(await ctx.map(ship, ["book"]), list[int])
    assert_type(await ctx.map(ship, ["book"], key=str, queue="slow", priority=3), list[int])
    assert_type(await ctx.map(charge, [1]), list[str])
    assert_type(await ctx.map(ship, ["book"], on_error="collect"), list[Ok[int] | Err[Any]])
    assert_type(await ctx.map("ship", ship, ["book"], max_failures=1), list[Ok[int] | Err[Any]])
    assert_type(await ctx.map(ship, ["book"], enough=1), list[Ok[int] | Err[Any] | None])


async def races_take_children(ctx: Context[Any]) -> None:
    assert_type(await ctx.race(ctx.child(ship, "book"), ctx.child(charge, 1)), int | str)
