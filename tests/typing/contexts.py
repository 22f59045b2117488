"""What a body sees: its deps, its waits, its time."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from perdure import Context, workflow


@dataclass
class Deps:
    url: str
    retries: int


@workflow
async def typed(ctx: Context[Deps], number: int) -> int:
    assert_type(ctx.deps, Deps)
    assert_type(ctx.deps.url, str)
    assert_type(ctx.scope("a").deps.retries, int)
    return number


@workflow(name="typed-too", deps=Deps("https://example.org", 3))
async def typed_with_options(ctx: Context[Deps]) -> str:
    return ctx.deps.url


@workflow
async def untyped(ctx: Context) -> int:
    assert_type(ctx, Context[Any])
    assert_type(ctx.deps.anything, Any)
    return 1


async def helper(ctx: Context, number: int) -> int:
    return number + len(ctx.run_id)


async def deps_do_not_change_what_it_gives() -> None:
    assert_type(await typed(1), int)
    assert_type(await typed_with_options(), str)
    assert_type(await untyped(), int)


async def helpers_take_any_context(ctx: Context[Deps]) -> None:
    assert_type(await helper(ctx, 1), int)
    assert_type(await helper(ctx.scope("again"), 1), int)


async def waits(ctx: Context) -> None:
    assert_type(await ctx.sleep("nap", "1h30m"), None)
    assert_type(await ctx.sleep("nap", timedelta(hours=1), key="nap:2"), None)
    assert_type(await ctx.sleep_until("then", datetime(2026, 1, 1, tzinfo=UTC)), None)
    assert_type(await ctx.wait_for_signal("decision", timeout="2d", default=None), Any)
    assert_type(await ctx.wait_for_signal("count", returns=int), int)
    assert_type(await ctx.wait_for_signal("count", key="second", timeout="2d", returns=int), int)
    assert_type(await ctx.wait_for_signal("count", timeout="2d", default=None, returns=int), int | None)
    assert_type(await ctx.wait_for_signal("count", timeout=60, default="none", returns=int), int | str)
    assert_type(await ctx.wait_for_signal("counts", returns=list[int]), list[int])
    async with ctx.timeout("review", "2d"):
        assert_type(await ctx.wait_for_signal("decision"), Any)


def derived(ctx: Context) -> None:
    assert_type(ctx.run_id, str)
    assert_type(ctx.now(), datetime)
    assert_type(ctx.uuid4(), uuid.UUID)
    assert_type(ctx.random(key="jitter"), float)
    assert_type(ctx.is_replaying, bool)


@workflow  # noqa: RET503 - type checkers know better
async def endless(ctx: Context, number: int) -> str:
    """`ctx.continue_as` never returns, so this function always gives a str."""
    if number > 10:
        return "done"
    if number == 10:
        await ctx.continue_as(number=number + 1)
    await ctx.continue_as(number + 1)


async def a_new_start_keeps_the_type() -> None:
    assert_type(await endless(1), str)
