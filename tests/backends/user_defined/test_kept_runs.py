"""Runs kept elsewhere, and whole runs in and out of stores: under two loops, failures and late signals."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from perdure import Context, Ok, Runtime, Suspended, stores, workflow
from perdure.aio.named_locks import NamedLocks
from perdure.backends.user_defined.state_store import REMEMBERED, state_store
from perdure.errors import InvalidInput, PersistenceError, SnapshotFormatError
from perdure.result import Outcome
from perdure.state import MemoryKeyValueStore, ResumeState, Snapshot, StatePersistence, StepResult

T = TypeVar("T")

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def charge(cents: int) -> int:
    calls.append(f"charge {cents}")
    await asyncio.sleep(0)
    return cents


@workflow
async def paying(ctx: Context, times: int) -> int:
    return sum([await ctx.step(charge, number, key=f"charge:{number}") for number in range(times)])


@workflow
async def waiting(ctx: Context) -> list[Any]:
    await ctx.step(charge, 1)
    return [await ctx.wait_for_signal("go", key="first"), await ctx.wait_for_signal("go", key="second")]


class Keeper:
    """Keeps texts, and lets a test do something before each save."""

    def __init__(self, before_save: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.texts: dict[str, str] = {}
        self.saves = 0
        self._before_save = before_save

    async def save(self, run_id: str, snapshot: Snapshot) -> None:
        self.saves += 1
        text = json.dumps(snapshot.to_dict())
        if self._before_save is not None:
            await self._before_save(self.saves)
        self.texts[run_id] = text

    async def load(self, run_id: str) -> dict[str, Any] | None:
        await asyncio.sleep(0)
        return json.loads(self.texts[run_id]) if run_id in self.texts else None

    async def delete(self, run_id: str) -> None:
        self.texts.pop(run_id, None)


def _on_two_loops(first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[T]]) -> list[T | BaseException]:
    """What both give, each on a loop in a thread of its own."""
    given: dict[int, T | BaseException] = {}

    async def noted(number: int, what: Callable[[], Awaitable[T]]) -> None:
        (given[number],) = await asyncio.gather(what(), return_exceptions=True)

    threads = [
        threading.Thread(target=lambda number=number, what=what: asyncio.run(noted(number, what)))
        for number, what in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [given[0], given[1]]


def test_two_loops_with_one_keeper_drive_a_run_once() -> None:
    async def slow_at_times(save: int) -> None:
        await asyncio.sleep(0.02 * (save % 2))

    class SlowToLoad(Keeper):
        async def load(self, run_id: str) -> dict[str, Any] | None:
            await asyncio.sleep(0.005)
            return await super().load(run_id)

    keeper = SlowToLoad(slow_at_times)

    async def pay() -> Outcome[int]:
        return await paying.run(10, id="p", store=keeper)

    assert _on_two_loops(pay, pay) == [Ok(45), Ok(45)]
    assert sorted(calls) == sorted(f"charge {number}" for number in range(10))


def test_a_signal_from_another_loop_is_not_overwritten_by_a_save_under_way() -> None:
    is_saving, was_sent = threading.Event(), threading.Event()
    slow_saves: set[int] = set()

    async def slow_once(save: int) -> None:
        if save in slow_saves:
            is_saving.set()
            await asyncio.to_thread(was_sent.wait, 0.2)  # long enough for the other loop, were it let in

    keeper = Keeper(slow_once)
    assert isinstance(asyncio.run(waiting.run(id="w", store=keeper)), Suspended)
    store = state_store(keeper)
    slow_saves.add(keeper.saves + 1)

    async def send_first() -> int:
        return await store.signal("w", "go", b"1")

    async def send_second() -> int:
        await asyncio.to_thread(is_saving.wait)
        seq = await store.signal("w", "go", b"2")
        was_sent.set()
        return seq

    assert _on_two_loops(send_first, send_second) == [1, 2]
    assert asyncio.run(waiting.run(id="w", store=keeper)) == Ok([1, 2])


async def test_a_run_whose_first_save_failed_can_be_run_at_once() -> None:
    async def fail_once(save: int) -> None:
        if save == 1:
            raise OSError("no space left on device")

    keeper = Keeper(fail_once)
    store = state_store(keeper)
    with pytest.raises(PersistenceError, match="no space left"):
        await paying.run(1, id="p", store=keeper)
    assert await asyncio.wait_for(paying.run(1, id="p", store=keeper), 5) == Ok(0)
    assert store is state_store(keeper)


@pytest.mark.parametrize("failing_save", [1, 2, 3])
async def test_a_keeper_that_is_cancelled_within_is_one_that_failed(failing_save: int) -> None:
    async def be_cancelled(save: int) -> None:
        if save == failing_save:
            raise asyncio.CancelledError

    keeper = Keeper(be_cancelled)
    with pytest.raises(PersistenceError, match="could not be saved"):
        await asyncio.wait_for(paying.run(2, id="p", store=keeper), 5)
    assert await asyncio.wait_for(paying.run(2, id="p", store=keeper), 5) == Ok(1)


async def test_a_save_whose_caller_was_cancelled_does_not_come_after_a_later_one() -> None:
    is_saving, go_on = asyncio.Event(), threading.Event()
    slow_saves: set[int] = set()

    async def write_in_a_thread(save: int) -> None:
        if save in slow_saves:
            is_saving.set()
            await asyncio.to_thread(go_on.wait)

    keeper = Keeper(write_in_a_thread)
    assert isinstance(await waiting.run(id="w", store=keeper), Suspended)
    store = state_store(keeper)
    slow_saves.add(keeper.saves + 1)
    first = asyncio.ensure_future(store.signal("w", "go", b"1"))
    await is_saving.wait()
    first.cancel()
    second = asyncio.ensure_future(store.signal("w", "go", b"2"))
    done, _ = await asyncio.wait([first, second], timeout=0.05)
    go_on.set()
    await asyncio.wait([first, second])
    assert done == set()
    assert await waiting.run(id="w", store=keeper) == Ok([1, 2])


async def test_a_run_that_is_to_start_later_does_not_start_now() -> None:
    keeper, start_at = Keeper(), datetime.now(UTC) + timedelta(days=1)
    for _ in range(2):
        outcome = await paying.run(1, id="p", store=keeper, start_at=start_at)
        assert outcome == Suspended("p", start_at)
    here, there = stores.memory(), stores.memory()
    await paying.run(1, id="p", store=here, start_at=start_at)
    snapshot = await here.load("p")
    assert snapshot is not None
    await there.save("p", snapshot)
    assert await there.due() == []
    assert calls == []


async def test_memory_does_not_grow_with_the_runs_of_a_keeper() -> None:
    keeper = Keeper()
    store = state_store(keeper)
    for number in range(REMEMBERED + 20):
        await paying.run(1, id=f"p{number}", store=keeper)
    assert await store.count() == REMEMBERED
    assert await paying.run(1, id="p0", store=keeper) == Ok(0)
    assert len(calls) == REMEMBERED + 20
    await waiting.run(id="w", store=keeper)
    assert await store.count() == REMEMBERED


async def test_a_persistence_made_anew_over_the_same_store_is_the_same_place() -> None:
    kv = MemoryKeyValueStore()
    both = await asyncio.gather(*(paying.run(3, id="p", store=StatePersistence(kv)) for _ in range(2)))
    assert list(both) == [Ok(3), Ok(3)]
    assert len(calls) == 3
    assert state_store(StatePersistence(kv)) is not state_store(StatePersistence(kv, "other:"))


@pytest.mark.parametrize("kept", ["", "{", {}, False, []])
async def test_what_a_keeper_gives_and_nobody_can_read_is_an_error_that_names_the_run(kept: Any) -> None:
    class Torn(Keeper):
        async def load(self, run_id: str) -> Any:
            return kept

    with pytest.raises(SnapshotFormatError, match="run 'p'"):
        await paying.run(1, id="p", store=Torn())
    assert calls == []


async def test_a_signal_that_came_after_a_save_is_in_what_is_loaded() -> None:
    here, there, elsewhere = stores.memory(), stores.memory(), stores.memory()
    await waiting.run(id="w", store=here)
    for target, source in ((there, here), (elsewhere, there)):
        snapshot = await source.load("w")
        assert snapshot is not None
        await target.save("w", snapshot)
        async with Runtime(target, [waiting], concurrency=0) as runtime:
            await runtime.signal("w", "go", "sent")
    assert await waiting.run(id="w", store=elsewhere) == Ok(["sent", "sent"])


async def test_the_input_that_a_saved_state_got_is_in_what_is_loaded() -> None:
    store, start_at = stores.memory(), datetime.now(UTC) + timedelta(days=1)
    await store.save("p", ResumeState({"charge:0": StepResult(ok=True, value=7)}))
    await paying.run(1, id="p", store=store, start_at=start_at)
    snapshot = await store.load("p")
    assert snapshot is not None
    assert (snapshot.workflow_name, (snapshot.metadata or {})["input"]) == ("paying", [[1], {}])


async def test_a_cancel_of_a_suspended_run_is_not_forgotten_by_a_keeper() -> None:
    keeper = Keeper()
    await waiting.run(id="w", store=keeper)
    await state_store(keeper).cancel("w")
    assert not isinstance(await waiting.run(id="w", store=keeper), Suspended)


async def test_a_repeated_signal_is_not_delivered_again_by_a_keeper() -> None:
    texts: dict[str, str] = {}
    for _ in range(3):
        keeper = Keeper()
        keeper.texts = texts  # as another process would find them
        await waiting.run(id="w", store=keeper)
        await state_store(keeper).signal("w", "go", b"1", dedupe="once")
        assert isinstance(await waiting.run(id="w", store=keeper), Suspended)
    run = await waiting.start(id="w", store=keeper)
    await run.signal("go", 2, dedupe="twice")
    assert await run == [1, 2]
    await run.signal("go", 2, dedupe="twice")


async def test_turns_are_had_in_order_and_one_who_was_cancelled_holds_up_nobody() -> None:
    turns, had = NamedLocks(), list[int]()

    async def take(number: int) -> None:
        async with turns.hold("a"):
            had.append(number)
            await asyncio.sleep(0)

    async with turns.hold("a"), turns.hold("b"):
        tasks = [asyncio.ensure_future(take(number)) for number in range(4)]
        await asyncio.sleep(0)
        with turns.hold_if_free("a") as is_free:
            assert not is_free
        tasks[0].cancel()
        tasks[2].cancel()
    await asyncio.wait(tasks)
    assert had == [1, 3]
    with turns.hold_if_free("a") as is_free:
        assert is_free


def test_turns_are_had_one_at_a_time_across_loops() -> None:
    turns, inside, most = NamedLocks(), list[int](), list[int]()

    async def take_often() -> None:
        async def take() -> None:
            async with turns.hold("a"):
                inside.append(1)
                most.append(len(inside))
                await asyncio.sleep(0)
                inside.pop()

        await asyncio.gather(*(take() for _ in range(200)))

    assert _on_two_loops(take_often, take_often) == [None, None]
    assert (len(most), max(most)) == (400, 1)


async def test_resuming_a_run_that_was_saved_without_its_input_says_how_to_give_it_that() -> None:
    async with Runtime(store := stores.memory(), [waiting], concurrency=0) as runtime:
        await store.save("w", ResumeState())
        with pytest.raises(InvalidInput, match=r"saved without its arguments; give it them with wf.run\(..., id='w'\)"):
            await runtime.resume("w")
