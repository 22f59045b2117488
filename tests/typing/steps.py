"""What `ctx.step` infers: the result of the function, checked against its arguments."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, assert_type

from perdure import Context, Err, Ok, Retry, current_step, step

T = TypeVar("T")


@dataclass
class User:
    id: int
    name: str


async def fetch_user(user_id: int) -> User:
    return User(user_id, "Ada")


def load_user(user_id: int) -> User:
    return User(user_id, "Ada")


async def search(text: str, limit: int = 10, *, exact: bool = False) -> list[User]:
    return [User(limit, text)] * exact


def count(*words: str) -> int:
    return len(words)


async def nothing() -> None: ...


async def identity(value: T) -> T:
    return value


def first(values: list[T]) -> T:
    return values[0]


async def charge(cents: int) -> Ok[User] | Err[str]:
    return Ok(User(cents, "Ada")) if cents else Err("nothing to charge")


def reserve(sku: str) -> Ok[int] | Err[KeyError]:
    return Ok(len(sku))


async def only_ok(cents: int) -> Ok[int]:
    return Ok(cents)


def returns_awaitable(user_id: int) -> Awaitable[User]:
    return fetch_user(user_id)


@step(retry=Retry(attempts=5), timeout=10)
async def decorated(user: User, cents: int) -> str:
    return f"{user.name}:{cents}:{current_step().idempotency_key}"


class Client:
    def __init__(self, url: str) -> None:
        self.url = url

    async def get(self, path: str) -> bytes:
        return (self.url + path).encode()

    def post(self, path: str, body: bytes) -> int:
        return len(path) + len(body)

    @classmethod
    async def connect(cls, url: str) -> Client:
        return cls(url)

    @staticmethod
    def parse(text: str) -> float:
        return float(text)


class Mailer:
    async def __call__(self, to: str) -> bool:
        return bool(to)


async def without_a_name(ctx: Context[Any]) -> None:
    assert_type(await ctx.step(fetch_user, 1), User)
    assert_type(await ctx.step(load_user, 1), User)
    assert_type(await ctx.step(nothing), None)
    assert_type(await ctx.step(count, "a", "b", "c"), int)
    assert_type(await ctx.step(returns_awaitable, 1), User)
    assert_type(await ctx.step(decorated, User(1, "Ada"), 100), str)


async def with_a_name(ctx: Context[Any]) -> None:
    assert_type(await ctx.step("fetch", fetch_user, 1), User)
    assert_type(await ctx.step("load", load_user, 1), User)
    assert_type(await ctx.step("nothing", nothing), None)
    assert_type(await ctx.step("count", count, "a", "b", "c"), int)
    assert_type(await ctx.step("later", returns_awaitable, 1), User)
    assert_type(await ctx.step("decorated", decorated, User(1, "Ada"), 100), str)


async def ok_and_err_are_unwrapped(ctx: Context[Any]) -> None:
    assert_type(await ctx.step(charge, 100), User)
    assert_type(await ctx.step("charge", charge, 100), User)
    assert_type(await ctx.step(reserve, "apple"), int)
    assert_type(await ctx.step("reserve", reserve, "apple"), int)
    assert_type(await ctx.step(only_ok, 100), int)
    assert_type(await ctx.step("ok", only_ok, 100), int)


async def defaults_may_be_left_out(ctx: Context[Any]) -> None:
    assert_type(await ctx.step(search, "Ada"), list[User])
    assert_type(await ctx.step(search, "Ada", 5), list[User])
    assert_type(await ctx.step("search", search, "Ada"), list[User])
    assert_type(await ctx.step("search", search, "Ada", 5), list[User])


async def methods_partials_and_callable_objects(ctx: Context[Any]) -> None:
    client = Client("https://example.org")
    assert_type(await ctx.step(client.get, "/"), bytes)
    assert_type(await ctx.step(client.post, "/", b""), int)
    assert_type(await ctx.step(Client.connect, "https://example.org"), Client)
    assert_type(await ctx.step(Client.parse, "1.5"), float)
    assert_type(await ctx.step("client", Client, "https://example.org"), Client)
    assert_type(await ctx.step("mail", Mailer(), "ada@example.org"), bool)
    assert_type(await ctx.step("exact", functools.partial(search, "Ada", exact=True)), list[User])
    assert_type(await ctx.step("exact", functools.partial(search, exact=True), "Ada"), list[User])
    assert_type(await ctx.step("post", functools.partial(client.post, "/"), b""), int)


async def generic_functions(ctx: Context[Any]) -> None:
    assert_type(await ctx.step(identity, 1), int)
    assert_type(await ctx.step("identity", identity, "text"), str)
    assert_type(await ctx.step(first, [1, 2]), int)
    assert_type(await ctx.step("first", first, ["a"]), str)


async def inside_a_generic_helper(ctx: Context[Any], fn: Callable[[int], Awaitable[T]]) -> T:
    return await ctx.step("helper", fn, 1)


async def lambdas_have_a_name(ctx: Context[Any], user_id: int) -> None:
    assert_type(await ctx.step("fetch", lambda: fetch_user(user_id)), User)
    assert_type(await ctx.step("load", lambda: load_user(user_id)), User)
    assert_type(await ctx.step("charge", lambda: charge(user_id)), User)
    assert_type(await ctx.step("length", lambda text: len(text) + 1, "text"), int)


async def what_is_not_annotated_is_any(ctx: Context[Any]) -> None:
    value = await ctx.step(json.loads, "{}")
    assert_type(value, Any)
    named = await ctx.step("parse", json.loads, "{}")
    assert_type(named, Any)


async def options(ctx: Context[Any]) -> None:
    assert_type(await ctx.step(fetch_user, 1, key="fetch:1"), User)
    assert_type(await ctx.step(fetch_user, 1, retry=5, timeout="10s"), User)
    assert_type(await ctx.step(fetch_user, 1, retry=Retry(on=(OSError, ValueError), wait_max="1m"), timeout=1.5), User)
    assert_type(await ctx.step(fetch_user, 1, retry=Retry(on=lambda error: "429" in str(error))), User)
    assert_type(await ctx.step("load", load_user, 1, key="load:1", timeout=timedelta(seconds=1), abandon=True), User)
    assert_type(await ctx.step("load", load_user, 1, at_most_once=True), User)
    assert_type(await ctx.step(load_user, 1, executor="cpu"), User)
    assert_type(await ctx.step(load_user, 1, executor=ProcessPoolExecutor()), User)
    assert_type(await ctx.step(charge, 1, retry=None, returns=User), User)
    assert_type(await ctx.step(search, "Ada", key="search:Ada"), list[User])
