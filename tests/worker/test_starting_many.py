"""`start_many`: runs of many inputs that share commits, and repeating it after a crash; `signal_with_start`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perdure import Context, Ok, Runtime, Suspended, stores, workflow
from perdure.errors import InvalidInput, PersistenceError, RunConflict, RunFinished
from perdure.store import Store
from perdure.testing import ManualClock
from perdure.worker.host import CREATED_AT_ONCE
from tests.patience import PATIENCE
from tests.worker.flows import ask, client, greet, nap

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "import_orders.py"
NAMES = [("Ada",), ("Eve", "?"), ("Ida",)]


@workflow
async def collect(ctx: Context, expected: int) -> list[Any]:
    return [await ctx.wait_for_signal("item", key=f"item {n}") for n in range(expected)]


async def test_every_input_has_a_run_in_its_order_and_a_worker_drives_them(store: Store) -> None:
    async with Runtime(store, [greet], concurrency=2) as runtime, asyncio.timeout(PATIENCE):
        runs = await runtime.start_many("greet", NAMES)
        assert await asyncio.gather(*runs) == ["hello Ada!", "hello Eve?", "hello Ida!"]
        assert len({run.id for run in runs}) == 3


@pytest.mark.parametrize("ids", [["Ada", "Eve", "Ida"], lambda name, *_: name], ids=["sequence", "function"])
async def test_repeating_it_starts_what_a_crash_left_out_and_nothing_twice(store: Store, ids: Any) -> None:
    async with client(store, greet) as runtime:
        await runtime.run(greet, "Eve", "?", id="Eve")  # as if the first call had been killed after this one
        runs = await runtime.start_many("greet", NAMES, ids=ids)
        assert [run.id for run in runs] == ["Ada", "Eve", "Ida"]
        assert [await run.status() for run in runs] == ["pending", "completed", "pending"]
        await runtime.sweep()
        assert [await run for run in runs] == ["hello Ada!", "hello Eve?", "hello Ida!"]
        assert len(await runtime.list()) == 3


async def test_stored_options_hold_for_every_run(store: Store) -> None:
    clock = ManualClock()
    async with client(store, nap, clock=clock) as runtime:
        runs = await runtime.start_many(nap, [(), ()], queue="slow", priority=7, delay="1m", deadline="10m", metadata={"of": 2})
        for run in runs:
            row = await store.get(run.id)
            assert row is not None
            assert (row.queue, row.priority, row.metadata) == ("slow", 7, b'{"of":2}')
            assert (row.start_at, row.deadline) == (clock.now() + 60_000_000, clock.now() + 600_000_000)


async def test_an_input_that_does_not_fit_is_named_and_nothing_is_written(store: Store) -> None:
    async with client(store, greet) as runtime:
        inputs: list[Any] = [("Ada",), (1,)]
        with pytest.raises(InvalidInput) as caught:
            await runtime.start_many(greet, inputs)
        assert "inputs[1] of start_many" in caught.value.__notes__[-1]
        inputs = [("Ada",), "Eve"]
        with pytest.raises(TypeError, match=r"inputs\[1\] is 'Eve'; each is a tuple of the workflow's arguments"):
            await runtime.start_many(greet, inputs)

        class Order(NamedTuple):
            name: str

        inputs = [Order("Ada")]
        with pytest.raises(TypeError, match=r"inputs\[0\] is Order\(name='Ada'\)"):
            await runtime.start_many(greet, inputs)
        with pytest.raises(ValueError, match="there are 3 inputs and 2 ids"):
            await runtime.start_many("greet", NAMES, ids=["a", "b"])
        with pytest.raises(TypeError, match="ids= takes a sequence of ids"):
            await runtime.start_many("greet", NAMES, ids="abc")
        with pytest.raises(TypeError, match="do not take deps"):
            await runtime.start_many("greet", NAMES, deps={})  # type: ignore[call-overload]
        assert await runtime.start_many(greet, []) == []
        assert await runtime.list() == []


async def test_a_run_that_conflicts_does_not_keep_the_others_from_starting(store: Store) -> None:
    async with client(store, greet) as runtime:
        await runtime.start(greet, "Eve", "!!!", id="Eve")
        with pytest.raises(RunConflict, match="'Eve' exists already"):
            await runtime.start_many("greet", NAMES, ids=lambda name, *_: name)
        assert {info.id for info in await runtime.list()} == {"Ada", "Eve", "Ida"}


async def test_the_same_input_twice_under_one_id_is_one_run(store: Store) -> None:
    async with client(store, greet) as runtime:
        runs = await runtime.start_many(greet, [("Ada",), ("Ada",)], ids=["a", "a"])
        assert [run.id for run in runs] == ["a", "a"]
        assert len(await runtime.list()) == 1


async def test_a_store_that_fails_ends_the_call_and_what_is_left_is_not_tried() -> None:
    class Down:
        def __init__(self) -> None:
            self.memory = stores.memory()
            self.calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.memory, name)

        async def create(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            raise PersistenceError("create", "the disk is full")

    down: Any = Down()
    async with client(down, greet) as runtime:
        with pytest.raises(PersistenceError, match="the disk is full"):
            await runtime.start_many(greet, [("Ada",)] * (CREATED_AT_ONCE + 1))
    assert down.calls == CREATED_AT_ONCE


async def test_a_signal_starts_the_run_it_is_for(store: Store) -> None:
    async with client(store, collect) as runtime:
        run = await runtime.signal_with_start(collect, 3, id="cart", signal="item", payload="tea", dedupe="1", priority=2)
        assert (await store.inbox("cart"))[0].name == "item"
        assert isinstance(await runtime.resume("cart"), Suspended)
        # The run is there: its input and its options stay, whatever is passed now.
        for payload, dedupe in (("tea", "1"), ("milk", "2")):
            again = await runtime.signal_with_start(collect, 99, id="cart", signal="item", payload=payload, dedupe=dedupe)
            assert again.id == run.id
        assert isinstance(await runtime.resume("cart"), Suspended)
        await runtime.signal_with_start("collect", 3, id="cart", signal="item", payload="sugar")
        assert await runtime.resume("cart") == Ok(["tea", "milk", "sugar"])
        row = await store.get("cart")
        assert row is not None
        assert row.priority == 2
        await runtime.signal_with_start(collect, 3, id="cart", signal="item", payload="tea", dedupe="1")  # it was accepted
        with pytest.raises(RunFinished):
            await runtime.signal_with_start(collect, 3, id="cart", signal="item", payload="late")


async def test_a_worker_drives_the_run_that_a_signal_started(store: Store) -> None:
    async with Runtime(store, [collect]) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.signal_with_start(collect, 2, id="cart", signal="item", payload="tea")
        await runtime.signal_with_start(collect, 2, id="cart", signal="item", payload="milk")
        assert await run == ["tea", "milk"]


async def test_of_many_at_once_one_starts_the_run_and_no_signal_is_lost(store: Store) -> None:
    async with Runtime(store, [collect]) as runtime, asyncio.timeout(PATIENCE):
        signals = (runtime.signal_with_start(collect, 20, id="cart", signal="item", payload=n) for n in range(20))
        runs = await asyncio.gather(*signals)
        assert sorted(await runs[0]) == list(range(20))


async def test_the_id_of_another_workflow_is_a_conflict(store: Store) -> None:
    async with client(store, collect, ask) as runtime:
        await runtime.start(ask, id="cart")
        with pytest.raises(RunConflict):
            await runtime.signal_with_start(collect, 3, id="cart", signal="item")
        assert await store.inbox("cart") == []


async def test_a_signal_that_cannot_be_stored_starts_nothing(store: Store) -> None:
    async with client(store, collect) as runtime:
        with pytest.raises(InvalidInput, match="signal item"):
            await runtime.signal_with_start(collect, 3, id="cart", signal="item", payload=object())
        with pytest.raises(ValueError, match="a signal's name"):
            await runtime.signal_with_start(collect, 3, id="cart", signal="")
        assert await runtime.list() == []


@pytest.mark.parametrize("expected", [3, 4], ids=["same input", "other input"])
async def test_a_run_that_is_deleted_between_is_started_after_all(expected: int) -> None:
    class DeletedBeforeTheSignal:
        def __init__(self) -> None:
            self.memory = stores.memory()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.memory, name)

        async def signal(self, run_id: str, *args: Any, **kwargs: Any) -> Any:
            await self.memory.delete(run_id)
            return await self.memory.signal(run_id, *args, **kwargs)

    deleted: Any = DeletedBeforeTheSignal()
    async with client(deleted, collect) as runtime:
        await runtime.start(collect, 3, id="cart")
        await runtime.signal_with_start(collect, expected, id="cart", signal="item", payload="tea")
        assert [row.payload for row in await deleted.memory.inbox("cart")] == [b'"tea"']


def test_programs_without_an_event_loop_have_both() -> None:
    with Runtime(stores.memory(), [greet, collect]).sync as runtime:
        runs = runtime.start_many(greet, [("Ada",), ("Eve",)], ids=["a", "b"])
        assert [run.result() for run in runs] == ["hello Ada!", "hello Eve!"]
        run = runtime.signal_with_start(collect, 1, id="cart", signal="item", payload="tea")
        assert run.result() == ["tea"]


def test_the_example_imports_each_file_once(tmp_path: Path) -> None:
    for _ in range(2):
        command = [sys.executable, "-W", "error", str(EXAMPLE), f"sqlite:///{tmp_path}/orders.db"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.stderr == ""
        assert done.stdout.splitlines() == [
            "night-1/berlin.csv 40 {'row': 40, 'of': 40}",
            "night-1/paris.csv 25 {'row': 25, 'of': 25}",
            "night-1/rome.csv 35 {'row': 35, 'of': 35}",
            "rows in all: 100",
        ]
