"""Calls of `ctx.step`, `ctx.map` and `ctx.race` that no checker lets pass. Each line marked `error` is one."""

from __future__ import annotations

import functools
from typing import assert_type

from perdure import Context, Err, Ok, Retry, step, workflow


async def fetch(user_id: int, name: str) -> str:
    return f"{user_id}:{name}"


def load(user_id: int) -> str:
    return str(user_id)


async def search(text: str, limit: int = 10) -> list[str]:
    return [text] * limit


async def charge(cents: int) -> Ok[str] | Err[ValueError]:
    return Ok(str(cents))


class Client:
    async def get(self, path: str) -> bytes:
        return path.encode()


async def wrong_arguments(ctx: Context, client: Client) -> None:
    await ctx.step(fetch, "1", "Ada")  # error
    await ctx.step(fetch, 1, 2)  # error
    await ctx.step(load, "1")  # error
    await ctx.step(charge, "100")  # error
    await ctx.step(client.get, b"/")  # error
    await ctx.step(search, "Ada", "10")  # error
    await ctx.step("fetch", fetch, "1", "Ada")  # error
    await ctx.step("load", load, "1")  # error
    await ctx.step("charge", charge, "100")  # error
    await ctx.step("get", client.get, b"/")  # error
    await ctx.step("half", functools.partial(fetch, "1"), "Ada")  # error


async def missing_arguments(ctx: Context) -> None:
    await ctx.step(fetch)  # error
    await ctx.step(fetch, 1)  # error
    await ctx.step(load)  # error
    await ctx.step(search)  # error
    await ctx.step("fetch", fetch, 1)  # error
    await ctx.step("load", load)  # error
    await ctx.step("load")  # error
    await ctx.step()  # error


async def too_many_arguments(ctx: Context) -> None:
    await ctx.step(load, 1, 2)  # error
    await ctx.step(search, "Ada", 1, 2)  # error
    await ctx.step("load", load, 1, 2)  # error


async def keywords_of_the_function(ctx: Context) -> None:
    await ctx.step(load, user_id=1)  # error
    await ctx.step("load", load, user_id=1)  # error


async def not_a_function(ctx: Context) -> None:
    await ctx.step(load(1))  # error
    await ctx.step("load", load(1))  # error
    await ctx.step(1, load)  # error


async def unknown_options(ctx: Context) -> None:
    await ctx.step(load, 1, retries=3)  # error
    await ctx.step("load", load, 1, name="other")  # error
    await ctx.step(load, 1, on_error="collect")  # error


async def options_of_the_wrong_type(ctx: Context) -> None:
    await ctx.step(load, 1, key=1)  # error
    await ctx.step(load, 1, retry="often")  # error
    await ctx.step(load, 1, retry=Retry(atempts=3))  # error
    await ctx.step(load, 1, retry=Retry(on=3))  # error
    await ctx.step(load, 1, retry=Retry(on=isinstance))  # error
    await ctx.step(load, 1, timeout=[1])  # error
    await ctx.step(load, 1, executor=4)  # error
    await ctx.step("load", load, 1, at_most_once="yes")  # error


async def another_result(ctx: Context) -> None:
    assert_type(await ctx.step(load, 1), int)  # error
    assert_type(await ctx.step(charge, 1), Ok[str] | Err[ValueError])  # error
    number: int = await ctx.step("load", load, 1)  # error
    assert number


@step(attempts=3)  # error
async def unknown_default() -> None: ...


@step(retry="often")  # error
async def default_of_the_wrong_type() -> None: ...


@step(key="one")  # error
async def a_key_belongs_to_a_call() -> None: ...


async def maps(ctx: Context) -> None:
    await ctx.map(load, ["1"])  # error
    await ctx.map(load, 1)  # error
    await ctx.map(load)  # error
    await ctx.map(fetch, [1])  # error
    await ctx.map("load", load, ["1"])  # error
    await ctx.map(load, [1], key="one")  # error
    await ctx.map(load, [1], on_error="ignore")  # error
    await ctx.map(load, [1], parallel=3)  # error
    assert_type(await ctx.map(load, [1], on_error="collect"), list[str])  # error


async def races(ctx: Context) -> None:
    await ctx.race(load, load)  # error
    await ctx.race("first", 1)  # error
    await ctx.race(fetch(1, "a"), name="first")  # error


async def waits(ctx: Context) -> None:
    await ctx.sleep("1h")  # error
    await ctx.sleep("nap", [1])  # error
    await ctx.sleep_until("then", "tomorrow")  # error
    await ctx.wait_for_signal("decision", "2d")  # error
    await ctx.wait_for_signal("decision", time_out="2d")  # error
    await ctx.wait_for_signal("decision", default=None)  # error
    (await ctx.wait_for_signal("decision", returns=int)).upper()  # error
    ctx.timeout("2d")  # error


@workflow
async def ship(ctx: Context, item: str) -> int:
    return len(item)


async def wrong_children(ctx: Context) -> None:
    await ctx.child(ship, 1)  # error
    await ctx.child(ship)  # error
    await ctx.child(ship, "book", retry=3)  # error
    ctx.start_child(ship, 1)  # error
    ctx.start_child(ship, "book", timeout=3)  # error
    await ctx.map(ship, [1])  # error
    await ctx.race(ctx.child(ship, "book"), wins="2")  # error
