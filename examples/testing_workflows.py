"""Tests of a workflow: virtual time, stubs, scripted signals, and a crash at every call of the store.

    python examples/testing_workflows.py

The functions called `test_...` are also found by pytest, with pytest-asyncio or anyio's plugin. It prints:

    test_a_trial_of_two_weeks passed
    test_a_declined_card_is_tried_again passed
    test_nobody_reviews passed
    test_no_crash_charges_twice passed
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import AsyncMock

from perdure import Context, Ok, Retry, current_step, testing, workflow


class CardDeclined(Exception):
    """The bank said no."""


async def charge(name: str) -> str:
    raise ConnectionError("the bank is not reachable from here")


async def welcome(name: str) -> str:
    return f"welcome {name}"


@workflow
async def signup(ctx: Context, name: str) -> str:
    await ctx.sleep("trial", "14d")
    await ctx.step(charge, name, retry=Retry(attempts=3, on=CardDeclined, wait_initial="1d", wait_max="7d"))
    decision = await ctx.wait_for_signal("review", timeout="2d", default="not reviewed")
    return f"{await ctx.step(welcome, name)}, {decision}"


async def test_a_trial_of_two_weeks() -> None:
    async with testing.runtime(signup, auto_skip=False) as rt:
        bank = rt.stub(charge, returns="receipt")
        run = await rt.start(signup, "ada")
        await rt.skip("13d")
        assert bank.calls == []
        await rt.skip("1d")
        assert bank.calls == [("ada",)]
        await run.signal("review", "approved")
        await rt.settle()
        assert await run == "welcome ada, approved"


async def test_a_declined_card_is_tried_again() -> None:
    async with testing.runtime(signup) as rt:
        rt.stub(charge, raises=CardDeclined, times=2)
        rt.stub(charge, returns="receipt")
        rt.signal_when_waiting("review", "approved")
        assert await rt.run(signup, "ada", id="r") == Ok("welcome ada, approved")
        await rt.assert_history("r", ["sleep trial 14d", "charge, attempt 3", "signal review", "welcome"])


async def test_nobody_reviews() -> None:
    async with testing.runtime(signup) as rt:
        rt.stub(charge, calls=AsyncMock(return_value="receipt"))
        assert await rt.run(signup, "ada") == Ok("welcome ada, not reviewed")


async def test_no_crash_charges_twice() -> None:
    charged: list[str] = []

    def pay(name: str) -> str:
        charged.append(f"{name} under {current_step().idempotency_key}")
        return "receipt"

    def prepare(rt: testing.VirtualRuntime) -> None:
        rt.stub(charge, calls=pay)

    report = await testing.crash_everywhere(signup, "ada", effects=charged, signals={"review": "approved"}, prepare=prepare)
    assert report.outcome == Ok("welcome ada, approved")
    assert report.crash_points > 20
    assert len(set(charged)) == 1  # a charge in doubt was repeated with the same key


TESTS: list[Callable[[], Coroutine[Any, Any, None]]] = [
    test_a_trial_of_two_weeks,
    test_a_declined_card_is_tried_again,
    test_nobody_reviews,
    test_no_crash_charges_twice,
]

if __name__ == "__main__":
    for test in TESTS:
        asyncio.run(test())
        print(test.__name__, "passed")
