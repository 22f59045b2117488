"""Workflows over key-value stores: driven, woken by signals, and gone on with after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from key_value.aio.stores.memory import MemoryStore as PyMemoryStore
from obstore.store import LocalStore, MemoryStore

from perdure import Context, Ok, Runtime, Suspended, workflow
from perdure.backends.key_value import KeyValueRunStore
from perdure.state import MemoryKeyValueStore

PATIENCE = 30.0


async def doubled(number: int) -> int:
    return 2 * number


@workflow
async def asking(ctx: Context, number: int) -> list[int]:
    first = await ctx.step("first", doubled, number)
    answer = await ctx.wait_for_signal("answer")
    rest = await asyncio.gather(*(ctx.step("more", doubled, n, key=f"more-{n}") for n in range(100)))
    return [first, answer, sum(rest)]


@pytest.mark.parametrize("make", [MemoryKeyValueStore, PyMemoryStore, MemoryStore])
async def test_a_runtime_drives_runs_to_their_end(make: Callable[[], Any]) -> None:
    store = KeyValueRunStore(make())
    async with asyncio.timeout(PATIENCE), Runtime(store=store, workflows=[asking]) as runtime:
        runs = [await runtime.start(asking, n, id=f"ask/{n}") for n in range(5)]
        for run in runs:
            await runtime.signal(run.id, "answer", 7)
        assert await asyncio.gather(*runs) == [[2 * n, 7, 9900] for n in range(5)]
    await store.close()


def test_a_run_goes_on_in_the_next_process(tmp_path: Any) -> None:
    """As far as that can be told in one: another store, on another loop, after the first was closed."""

    async def first() -> None:
        store = KeyValueRunStore(LocalStore(tmp_path))
        outcome = await asking.run(21, id="ask", store=store)
        assert isinstance(outcome, Suspended)
        await store.close()

    async def second() -> None:
        store = KeyValueRunStore(LocalStore(tmp_path))
        await store.signal("ask", "answer", b"7")
        async with asyncio.timeout(PATIENCE), Runtime(store=store, workflows=[asking]) as runtime:
            run = await runtime.get("ask")
            assert run is not None
            assert await run == [42, 7, 9900]
        assert await asking.run(21, id="ask", store=store) == Ok([42, 7, 9900])
        await store.close()

    asyncio.run(first())
    asyncio.run(second())
