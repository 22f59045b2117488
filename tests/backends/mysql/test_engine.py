"""The engine on this store: values of every kind, and ids that look alike."""

from __future__ import annotations

import math
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, workflow
from perdure.backends.mysql import MysqlStore
from perdure.model.run_filter import RunFilter

VALUES = ["nul \0", "\ud800", 1e16, -0.0, 2**200, "órder 😀 \\' \"", b"\x00\xff'\\" * (5 << 18), {"$ne": 1, "a.b": [None, True]}]
IDS = [
    "Order-1", "order-1", "order-1 ", "órder-1", "o\u0301rder-1", "a%b_c*d?[e]", "x" * 500, "😀", "../x", "a\nb", "__proto__",
    "$ne", "a.b", "'; DROP TABLE perdure_runs; --", "\\", "\\'", "%s", "`",
]  # fmt: skip


def same(value: Any) -> Any:
    return value


def double(n: int) -> int:
    return 2 * n


@workflow
async def checkout(ctx: Context, n: int) -> int:
    first = await ctx.step(double, n)
    await ctx.sleep("nap", "5ms")
    added: int = await ctx.wait_for_signal("add")
    return await ctx.step(double, first + added, key="again")


@workflow
async def keep(ctx: Context) -> list[Any]:
    kept = [await ctx.step(f"value-{n}", same, value) for n, value in enumerate(VALUES)]
    await ctx.wait_for_signal("go")
    return kept


async def test_values_of_every_kind_are_replayed_as_they_were(dsn: str) -> None:
    async with Runtime(MysqlStore(dsn), workflows=[keep]) as runtime:
        assert isinstance(await (await runtime.start(keep, id="run")).outcome(), Suspended)
    async with Runtime(MysqlStore(dsn), workflows=[keep]) as runtime:
        await runtime.signal("run", "go", None)
        outcome = await (await runtime.start(keep, id="run")).outcome()
    assert isinstance(outcome, Ok)
    assert outcome.value == VALUES
    assert math.copysign(1, outcome.value[3]) == -1


@pytest.mark.parametrize("prefix", ["", "tenant's \\"])
async def test_ids_that_look_alike_are_other_runs(dsn: str, prefix: str) -> None:
    store = MysqlStore(dsn, prefix=prefix)
    async with Runtime(store, workflows=[checkout]) as runtime:
        for n, run_id in enumerate(IDS):
            await runtime.start(checkout, n, id=run_id)
        assert await store.count() == len(IDS)
        for n, run_id in enumerate(IDS):
            await runtime.signal(run_id, "add", n)
            assert await (await runtime.start(checkout, n, id=run_id)).outcome() == Ok(6 * n)
        for run_id in IDS:
            found = [info.id for info in await store.list(RunFilter(prefix=run_id))]
            assert sorted(found) == sorted(other for other in IDS if other.startswith(run_id))
