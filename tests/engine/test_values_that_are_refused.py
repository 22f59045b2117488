"""A value that the store will never take: the step, the run or the call that it belongs to fails with it, once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, stores
from perdure.errors import InvalidInput, PersistenceError, ValueNotStorable
from perdure.simple_stores import StoredRun
from perdure.store import Store
from tests.engine.worlds import world
from tests.simulation import SlowStore

LONGEST = 20_000
LONG = "x" * 30_000


class ShortStore(SlowStore):
    """A memory store that takes no value of more than `LONGEST` bytes."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def _around(self, method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            for value in (*args, *kwargs.values()):
                for size in sizes_in(value):
                    if size > LONGEST:
                        raise ValueNotStorable("value", f"this store takes {LONGEST} bytes")
            return await method(*args, **kwargs)

        return call


def sizes_in(value: Any) -> Iterator[int]:
    parts = value if isinstance(value, list | tuple) else [value]
    for part in (*parts, *(getattr(part, name, None) for part in parts for name in ("payload", "input"))):
        if isinstance(part, bytes):
            yield len(part)


class ShortTable:
    """A user's own store whose rows take no more than `LONGEST` bytes."""

    def __init__(self) -> None:
        self.rows: dict[str, StoredRun] = {}

    async def save(self, run: StoredRun) -> None:
        if len(str(run.snapshot)) > LONGEST:
            raise ValueNotStorable("the row", f"this table takes {LONGEST} bytes")
        self.rows[run.run_id] = run

    async def load(self, run_id: str) -> StoredRun | None:
        return self.rows.get(run_id)

    async def delete(self, run_id: str) -> None:
        self.rows.pop(run_id, None)

    async def due(self, now: Any, limit: int) -> list[str]:
        return [run_id for run_id, run in self.rows.items() if run.wake_at is not None and run.wake_at <= now][:limit]


@pytest.fixture
def store() -> Any:
    return ShortStore(stores.memory())


def results_of(entries: Any) -> list[tuple[str, bool]]:
    return [(entry.key, entry.ok) for entry in entries if entry.phase == "close"]


@pytest.mark.parametrize("is_parallel", [False, True], ids=["alone", "beside others"])
async def test_a_step_whose_result_is_refused_has_failed_and_is_not_run_again(store: Store, is_parallel: bool) -> None:
    calls: list[str] = []
    caught: list[ValueNotStorable] = []

    async def produce(text: str) -> str:
        calls.append(text[:5])
        return text

    async def body(ctx: Context[Any]) -> Any:
        async def large() -> str:
            try:
                return await ctx.step("large", produce, LONG)
            except ValueNotStorable as error:
                caught.append(error)
                return "refused"

        beside = [ctx.step("work", produce, f"small-{n}", key=f"small-{n}") for n in range(3 if is_parallel else 0)]
        results = await asyncio.gather(*beside[:1], large(), *beside[1:])
        await ctx.wait_for_signal("go")
        return list(results)

    flow = Workflow("flow", body)
    async with world(flow, store=store) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert ("large", False) in results_of(await store.journal("run"))
        await here.runtime.signal("run", "go")
        outcome = await here.runtime.resume("run")
        assert isinstance(outcome, Ok)
        assert sorted(outcome.value) == sorted(["refused", *(["small-0", "small-1", "small-2"] if is_parallel else [])])
        row = await store.get("run")
        assert row is not None
        assert (row.attempts, row.problem) == (1, None), "nothing was tried twice"
    assert sorted(calls) == sorted(["xxxxx", *(["small"] * 3 if is_parallel else [])])
    assert len(caught) == 2
    assert {str(error) for error in caught} == {
        f"the value at value cannot be stored: it has {len(LONG) + 2:,} bytes (this store takes {LONGEST} bytes)"
    }
    assert any("step 'large' ran, but what it returned cannot be recorded" in note for note in caught[0].__notes__)


async def test_every_result_of_one_write_that_is_refused_fails_and_the_others_are_kept(store: Store) -> None:
    async def produce(text: str) -> str:
        return text

    async def body(ctx: Context[Any]) -> Any:
        texts = {"a": LONG, "b": "short", "c": LONG + "x", "d": "short"}
        return [
            type(result).__name__
            for result in await asyncio.gather(
                *(ctx.step("work", produce, text, key=key) for key, text in texts.items()), return_exceptions=True
            )
        ]

    flow = Workflow("flow", body)
    async with world(flow, store=store) as here:
        assert await here.runtime.run(flow, id="run") == Ok(["ValueNotStorable", "str", "ValueNotStorable", "str"])
        assert sorted(results_of(await store.journal("run"))) == [("a", False), ("b", True), ("c", False), ("d", True)]


async def test_an_outcome_that_is_refused_fails_the_run(store: Store) -> None:
    async def body(ctx: Context[Any]) -> str:
        return LONG

    flow = Workflow("flow", body)
    async with world(flow, store=store) as here:
        for outcome in (await here.runtime.run(flow, id="run"), await here.runtime.resume("run")):
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, ValueNotStorable)
            assert "30,002 bytes" in str(outcome.error)


async def test_an_input_and_a_signal_that_are_refused_are_refused_to_their_sender(store: Store) -> None:
    async def body(ctx: Context[Any], text: str) -> Any:
        return await ctx.wait_for_signal("go")

    flow: Any = Workflow("flow", body)
    async with world(flow, store=store) as here:
        with pytest.raises(InvalidInput, match=f"this store takes {LONGEST} bytes"):
            await here.runtime.start(flow, LONG, id="long")
        assert await store.get("long") is None
        await here.runtime.start(flow, "short", id="run")
        with pytest.raises(InvalidInput, match=f"signal go.*this store takes {LONGEST} bytes"):
            await here.runtime.signal("run", "go", LONG)
        assert await store.inbox("run") == []


async def test_a_short_result_that_is_refused_is_a_failed_attempt() -> None:
    """It is not refused for its length: a failure in its place would be refused as well."""

    class Refusing(ShortStore):
        def _around(self, method: Any) -> Any:
            async def call(*args: Any, **kwargs: Any) -> Any:
                if method.__name__ == "record":
                    raise ValueNotStorable("value", "not today")
                return await method(*args, **kwargs)

            return call

    async def body(ctx: Context[Any]) -> None:
        await ctx.step("work", asyncio.sleep, 0)

    store: Any = Refusing(stores.memory())
    flow = Workflow("flow", body)
    async with world(flow, store=store) as here:
        with pytest.raises((ValueNotStorable, PersistenceError), match="not today"):
            await here.runtime.run(flow, id="run")
        row = await store.get("run")
        assert (row.status, row.attempts, row.problem) == ("pending", 1, "the value at value cannot be stored: not today")


async def test_a_row_that_a_users_own_store_refuses_fails_the_longest_result() -> None:
    async def produce(size: int) -> str:
        return "x" * size

    async def body(ctx: Context[Any]) -> list[str]:
        results: list[str] = []
        for size in (100, 15_000, 9_000, 100):
            try:
                results.append(await ctx.step("work", produce, size, key=f"{len(results)}"))
            except ValueNotStorable:
                results.append("refused")
        return [result[:7] for result in results]

    flow, table = Workflow("flow", body), ShortTable()
    runtime = Runtime(table, [flow], concurrency=0)
    assert await runtime.run(flow, id="run") == Ok(["xxxxxxx", "xxxxxxx", "refused", "xxxxxxx"])
    await runtime.close()
