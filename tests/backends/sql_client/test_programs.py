"""Whole programs on a store through a client."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, workflow
from perdure.backends.sql_client import sql_client
from tests.backends.sql_client.places import Place

VALUES: Any = {
    "nul": "a\0b", "surrogate": "\ud800", "big": 2**200, "zero": -0.0, "large": 1e16, "bytes": bytes(range(256)), "set": {1, 2},
    "quotes": "it's \"\\ %s ?1 $1", "emoji": "\U0001f600",
}  # fmt: skip


@workflow
async def order(ctx: Context, value: Any) -> Any:
    async def charge() -> Any:
        return value

    charged = await ctx.step("charge", charge)
    await ctx.sleep("settle", 0.05)
    answer = await ctx.wait_for_signal("review-décision ")
    return [charged, answer]


async def test_a_program_runs_on_it_and_another_goes_on(here: Place) -> None:
    first = Runtime(store=sql_client(here.client(), here.dialect), workflows=[order])
    run = await first.start(order, VALUES, id="Order-1")
    await first.signal("Order-1", "review-décision ", VALUES)
    async with Runtime(store=sql_client(here.client(), here.dialect), workflows=[order]) as second:
        there = await second.get(run.id)
        assert there is not None
        assert await there == [VALUES, VALUES]
    assert await first.run(order, VALUES, id="Order-1") == Ok([VALUES, VALUES])


async def test_a_store_cannot_be_sent_to_another_process(here: Place) -> None:
    with pytest.raises(TypeError, match="make a client in the other process"):
        pickle.dumps(here.store())


async def test_equal_keys_are_the_same_runs(here: Place) -> None:
    client = here.client()
    assert here.store(client).key == here.store(client).key == here.store().key
    assert here.store(client, table="other").key != here.store(client).key
    assert here.store(client, prefix="p").key != here.store(client).key
    del client.key
    assert here.store(client).key == here.store(client).key != here.store().key
    assert here.where not in repr(here.store())
