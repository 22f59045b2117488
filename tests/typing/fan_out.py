"""What `ctx.map` and `ctx.race` infer."""

from __future__ import annotations

from typing import Any, assert_type

from perdure import Context, Err, Ok, Retry


async def fetch(number: int) -> str:
    return str(number)


def plain(number: int) -> str:
    return str(number)


async def charge(number: int) -> Ok[str] | Err[ValueError]:
    return Ok(str(number))


def reserve(number: int) -> Ok[str] | Err[ValueError]:
    return Ok(str(number))


async def with_default(number: int, base: int = 10) -> str:
    return str(number * base)


class Client:
    async def get(self, number: int) -> bytes:
        return bytes(number)


async def maps_give_lists(ctx: Context[Any]) -> None:
    assert_type(await ctx.map(fetch, [1, 2]), list[str])
    assert_type(await ctx.map(plain, (1, 2)), list[str])
    assert_type(await ctx.map("fetch", fetch, range(3)), list[str])
    assert_type(await ctx.map("plain", plain, {1, 2}), list[str])
    assert_type(await ctx.map(Client().get, [1, 2]), list[bytes])
    assert_type(await ctx.map(with_default, [1, 2]), list[str])
    assert_type(await ctx.map("double", lambda number: number * 2, [1, 2]), list[int])


async def ok_and_err_are_unwrapped(ctx: Context[Any]) -> None:
    assert_type(await ctx.map(charge, [1, 2]), list[str])
    assert_type(await ctx.map(reserve, [1, 2]), list[str])
    assert_type(await ctx.map("charge", charge, [1, 2]), list[str])
    assert_type(await ctx.map("reserve", reserve, [1, 2]), list[str])


async def errors_can_be_collected(ctx: Context[Any]) -> None:
    assert_type(await ctx.map(fetch, [1, 2], on_error="collect"), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map(plain, [1, 2], on_error="collect"), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map("fetch", fetch, [1, 2], on_error="collect"), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map("plain", plain, [1, 2], on_error="collect"), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map(charge, [1, 2], on_error="collect"), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map("reserve", reserve, [1, 2], on_error="collect"), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map(fetch, [1, 2], on_error="raise"), list[str])


async def failures_can_be_tolerated(ctx: Context[Any]) -> None:
    assert_type(await ctx.map(fetch, [1, 2], max_failures=1), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map(charge, [1, 2], max_failures=1), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map("plain", plain, [1, 2], max_failures=1), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map(fetch, [1, 2], enough=1), list[Ok[str] | Err[Any] | None])
    assert_type(await ctx.map("reserve", reserve, [1, 2], enough=1, key=str), list[Ok[str] | Err[Any] | None])


async def map_options(ctx: Context[Any]) -> None:
    assert_type(await ctx.map(fetch, [1, 2], key=str, concurrency=4), list[str])
    assert_type(await ctx.map(fetch, [1, 2], key=lambda number: f"fetch:{number}", retry=3), list[str])
    assert_type(await ctx.map("fetch", fetch, [1, 2], retry=Retry(attempts=2), timeout="10s"), list[str])
    assert_type(await ctx.map(fetch, [1, 2], on_error="collect", key=str), list[Ok[str] | Err[Any]])
    assert_type(await ctx.map(plain, [1, 2], executor="cpu"), list[str])


async def races_give_what_the_first_gives(ctx: Context[Any]) -> None:
    assert_type(await ctx.race(fetch(1), fetch(2)), str)
    assert_type(await ctx.race("first", fetch(1), fetch(2)), str)
    assert_type(await ctx.race(ctx.step(fetch, 1), ctx.step("again", fetch, 2), key="race:1"), str)
    assert_type(await ctx.race(ctx.step(fetch, 1), ctx.sleep("nap", "1h")), str | None)
    assert_type(await ctx.race("paid", ctx.step(fetch, 1), ctx.step("bytes", Client().get, 1)), str | bytes)
    assert_type(await ctx.race(ctx.step(fetch, 1), ctx.step(fetch, 2), ctx.step(fetch, 3), wins=2), list[str])
    assert_type(await ctx.race("paid", ctx.step(fetch, 1), ctx.step(fetch, 2), wins=1, key="one"), list[str])
