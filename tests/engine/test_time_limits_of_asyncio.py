"""A clock that the journal does not know may send a replay another way; such a run is not stopped and repeats nothing."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, Workflow, stores
from perdure.errors import PersistenceError, RunDiverged
from perdure.model.journal import Entry
from tests.engine.bodies import World, failing_group, flow_of
from tests.simulation import LoopClock, MortalStore, SlowStore, simulate

Body = Callable[[Context[Any]], Coroutine[Any, Any, Any]]


class HalfASecond(random.Random):
    """With it each write of a `SlowStore` takes half a second before and half a second after it takes effect."""

    def choice(self, seq: Any) -> Any:
        return 0.5


async def drive(store: Any, body: Body) -> Any:
    """What one drive of the run gives."""
    flow = Workflow("flow", body, on_definition_change="ignore", on_unknown_steps="ignore")
    runtime = Runtime(store, [flow], clock=LoopClock(), unload_grace=10, concurrency=0)
    try:
        return await runtime.run(flow, id="run")
    finally:
        await runtime.close()


async def drive_to_the_end(store: Any, body: Body) -> list[str]:
    """The keys that are recorded in the end, in order."""
    outcome = await drive(store, body)
    while isinstance(outcome, Suspended):
        await asyncio.sleep(200)
        outcome = await drive(store, body)
    assert outcome == Ok(None)
    return await closed(store)


async def closed(store: Any) -> list[str]:
    return [entry.key for entry in await store.journal("run") if entry.phase == "close"]


class Steps:
    """Step functions that count their calls."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    async def quick(self, name: str) -> None:
        self.ran[name] += 1

    async def slow_at_first(self, name: str) -> None:
        self.ran[name] += 1
        await asyncio.sleep(2 if self.ran[name] == 1 else 0)

    async def hang(self) -> None:
        await asyncio.sleep(3600)


def test_a_replay_in_which_a_sleep_is_over_before_the_time_limit_goes_on() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> None:
        try:
            async with asyncio.timeout(1):
                await ctx.sleep("nap", 3)
                await ctx.step(steps.quick, "in time", key="in time")
        except TimeoutError:
            await ctx.step(steps.quick, "late", key="late")
        await ctx.sleep("until the replay", 100)

    keys = simulate(drive_to_the_end(stores.memory(), body))
    assert keys[0] == "late"
    assert steps.ran["late"] == 1


def test_the_snapshot_of_a_run_with_an_expired_time_limit_can_be_imported() -> None:
    async def body(ctx: Context[Any]) -> None:
        try:
            async with asyncio.timeout(1):
                await ctx.sleep("nap", 3)
        except TimeoutError:
            await ctx.sleep("until the snapshot", 100)

    async def main() -> None:
        store, flow = stores.memory(), Workflow("flow", body)
        runtime = Runtime(store, [flow], clock=LoopClock(), unload_grace=10, concurrency=0)
        await runtime.run(flow, id="run")
        run = await runtime.get("run")
        assert run is not None
        assert "" in [entry.key for entry in await store.journal("run")]
        await flow.start(id="copy", store=store, snapshot=await run.snapshot())
        assert "" not in [entry.key for entry in await store.journal("copy")]
        await runtime.close()

    simulate(main())


def test_a_time_limit_of_asyncio_after_one_of_ctx_is_still_one_that_a_replay_may_not_meet() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> None:
        try:
            async with ctx.timeout("limit", 1):
                await ctx.step(steps.hang)
        except TimeoutError:
            pass
        try:
            async with asyncio.timeout(1):
                await ctx.step(steps.slow_at_first, "slow", key="slow")
            await ctx.step(steps.quick, "in time", key="in time")
        except TimeoutError:
            await ctx.step(steps.quick, "late", key="late")
        await ctx.sleep("until the replay", 100)

    assert simulate(drive_to_the_end(stores.memory(), body))[:2] == ["limit", "late"]


def test_an_expiry_that_was_recorded_before_the_block_was_cancelled_is_not_recorded_again() -> None:
    async def body(ctx: Context[Any]) -> None:
        try:
            async with asyncio.timeout(1.8):
                async with ctx.timeout("limit", 1):
                    await ctx.sleep("long", 3600)
        except TimeoutError:
            pass
        await ctx.sleep("until the replay", 100)

    keys = simulate(drive_to_the_end(SlowStore(stores.memory(), HalfASecond()), body))
    assert keys == ["limit", "until the replay"]


def test_a_race_that_was_cancelled_only_once_is_recorded_only_once() -> None:
    steps = Steps()

    async def body(ctx: Context[Any]) -> None:
        try:
            async with asyncio.timeout(1):
                await ctx.race("race", ctx.step(steps.slow_at_first, "a", key="a"), ctx.step(steps.hang))
        except TimeoutError:
            pass
        await ctx.sleep("until the replay", 100)
        await ctx.sleep("until the next", 300)

    keys = simulate(drive_to_the_end(stores.memory(), body))
    assert sorted(keys) == ["a", "race", "until the next", "until the replay"]


def test_a_group_that_aborts_ends_at_once_when_the_store_fails() -> None:
    async def die(dies_at: int) -> float:
        store = MortalStore(SlowStore(stores.memory(), random.Random(dies_at)), dies_at, after_commit=False)
        flow = flow_of(failing_group, World(1))
        runtime = Runtime(store, [flow], clock=LoopClock(), concurrency=0)
        try:
            await runtime.run(flow, id="run")
        except PersistenceError:
            pass
        finally:
            await runtime.close()
        return asyncio.get_running_loop().time()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(simulate(die(dies_at)) for dies_at in range(1, 20)) < 1


async def deploy(before: Body, after: Body) -> tuple[list[str], list[str]]:
    """What is recorded before and after a deploy of code that the run does not fit."""
    store = stores.memory()
    assert isinstance(await drive(store, before), Suspended)
    recorded = await closed(store)
    await asyncio.sleep(200)
    with pytest.raises(RunDiverged):
        await drive(store, after)
    return recorded, await closed(store)


def test_code_that_diverged_decides_no_race() -> None:
    steps = Steps()

    async def before(ctx: Context[Any]) -> None:
        await ctx.step(steps.quick, "a", key="a")
        await ctx.sleep("nap", 100)

    async def after(ctx: Context[Any]) -> None:
        await ctx.race("new race", asyncio.sleep(0), asyncio.sleep(0))
        await ctx.sleep("nap", 100)

    assert simulate(deploy(before, after)) == (["a"], ["a"])


def test_code_that_diverged_decides_no_patch() -> None:
    steps = Steps()

    async def before(ctx: Context[Any]) -> None:
        await ctx.step(steps.quick, "a", key="a")
        await ctx.step(steps.quick, "b", key="b")
        await ctx.sleep("nap", 100)

    async def after(ctx: Context[Any]) -> None:
        await ctx.step(steps.quick, "b", key="b")
        await ctx.patched("new")
        await ctx.sleep("nap", 100)

    assert simulate(deploy(before, after)) == (["a", "b"], ["a", "b"])


def test_what_follows_a_race_is_owed_although_the_loser_was_cancelled_inside_other_tasks() -> None:
    steps = Steps()

    def body(key: str) -> Body:
        async def charging(ctx: Context[Any]) -> None:
            async def loser() -> None:
                async with asyncio.TaskGroup() as group:
                    group.create_task(ctx.step(steps.hang))
                    await asyncio.gather(ctx.step("hang too", steps.hang))

            await ctx.race("race", ctx.step(steps.quick, "winner", key="winner"), loser())
            await ctx.step(steps.quick, "charge", key=key)
            await ctx.sleep("nap", 100)

        return charging

    simulate(deploy(body("charge"), body("renamed")))
    assert steps.ran["charge"] == 1


class CountedJournal(list[Entry]):
    """A journal that counts how often it is walked."""

    walks = 0

    def __iter__(self) -> Iterator[Entry]:
        self.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_time_limit_does_not_walk_the_journal(is_resumed: bool) -> None:
    journals: list[CountedJournal] = []

    async def body(ctx: Context[Any]) -> None:
        recorder = ctx._drive.recorder
        recorder.journal = CountedJournal(recorder.journal)
        journals.append(recorder.journal)
        for _ in range(50):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(60)
        await ctx.sleep("nap", 100)

    async def main() -> None:
        store = stores.memory()
        outcome = await drive(store, body)
        assert isinstance(outcome, Suspended)
        if is_resumed:
            await asyncio.sleep(200)
            assert await drive(store, body) == Ok(None)
        marks = [entry for entry in await store.journal("run") if entry.phase == "cancel"]
        assert [mark.key for mark in marks] == [""], "one mark is enough, however many limits pass"

    simulate(main())
    assert journals[-1].walks < 5
