"""Mocks as steps: `Mock`, `MagicMock`, `AsyncMock` and what `mock.patch` puts in place of a function."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock, create_autospec, patch

import pytest

from perdure import Context, Err, Ok, testing, workflow
from perdure.errors import ValueNotStorable

HERE = sys.modules[__name__]
KINDS = pytest.mark.parametrize("kind", [Mock, MagicMock, AsyncMock])


async def charge(cents: int) -> int:
    raise AssertionError(f"{cents} were charged")


def reserve(item: str) -> str:
    raise AssertionError(f"{item} was reserved")


@workflow
async def order(ctx: Context, item: str) -> list[Any]:
    await ctx.sleep("settle", "14d")
    return [await ctx.step(HERE.reserve, item), await ctx.step(HERE.charge, 300, timeout="1m")]


@pytest.mark.parametrize("autospec", [None, True])
async def test_patched_functions_are_steps_under_their_own_names(autospec: bool | None) -> None:
    with (
        patch.object(HERE, "reserve", autospec=autospec, return_value="reserved"),
        patch.object(HERE, "charge", autospec=autospec, return_value=7) as charged,
    ):
        async with testing.runtime(order) as rt:
            assert await rt.run(order, "book", id="r") == Ok(["reserved", 7])
            await rt.assert_history("r", ["sleep settle 14d", "reserve", "charge"])
        charged.assert_awaited_once_with(300)


@KINDS
@pytest.mark.parametrize("how", ["name", "named call", "key", "attribute", "map"])
async def test_a_mock_is_a_step(kind: Any, how: str) -> None:
    mock, gateway = kind(return_value=5), kind()
    named = kind(name="charge", return_value=5)
    gateway.charge.return_value = 5

    @workflow
    async def mocked(ctx: Context) -> Any:
        match how:
            case "name":
                return await ctx.step(named, 300)
            case "named call":
                return await ctx.step("charge", mock, 300)
            case "key":
                return await ctx.step(mock, 300, key="charge")
            case "attribute":
                return await ctx.step(gateway.charge, 300)
        return (await ctx.map("charge", mock, [300], key=lambda _: "charge"))[0]

    async with testing.runtime(mocked) as rt:
        assert await rt.run(mocked, id="r") == Ok(5)
        await rt.assert_history("r", ["charge"])


@KINDS
async def test_what_a_mock_raises_fails_the_step(kind: Any) -> None:
    mock = kind(name="charge", side_effect=[OSError("not yet"), OSError("not yet"), 5])

    @workflow
    async def mocked(ctx: Context) -> Any:
        return await ctx.step(mock, retry=3)

    async with testing.runtime(mocked) as rt:
        assert await rt.run(mocked, id="r") == Ok(5)
        await rt.assert_history("r", ["charge, attempt 3"])


@KINDS
async def test_a_mock_without_a_name_or_a_value_says_what_to_do(kind: Any) -> None:
    @workflow
    async def unnamed(ctx: Context) -> None:
        with pytest.raises(TypeError, match=r"has no name to be recorded under; give it one, as in Mock\(name='charge'\)"):
            await ctx.step(kind())

    @workflow
    async def valueless(ctx: Context) -> None:
        await ctx.step(kind(name="charge"))

    async with testing.runtime(unnamed, valueless) as rt:
        assert await rt.run(unnamed) == Ok(None)
        outcome = await rt.run(valueless)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueNotStorable)


async def test_a_mock_with_the_signature_of_a_function_has_its_name() -> None:
    @workflow
    async def mocked(ctx: Context) -> Any:
        return await ctx.step(create_autospec(charge, return_value=5), 300)

    async with testing.runtime(mocked) as rt:
        assert await rt.run(mocked, id="r") == Ok(5)
        await rt.assert_history("r", ["charge"])
