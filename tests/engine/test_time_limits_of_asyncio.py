"""Sleeps and time limits of asyncio are durable: that they are over is recorded, and a replay sees it at the same place."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, Workflow, stores
from perdure.errors import TIMER_PREFIX, PersistenceError, RunDiverged
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


def named(keys: list[str]) -> list[str]:
    """The keys that the workflow function has chosen, in order."""
    return [key for key in keys if not key.startswith(TIMER_PREFIX)]


def test_a_limit_that_has_passed_passes_on_every_replay_at_the_same_place() -> None:
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
    assert keys[0].startswith(TIMER_PREFIX)
    assert named(keys) == ["late", "until the replay"]
    assert steps.ran["late"] == 1


def test_a_step_within_a_limit_is_called_once_however_often_it_is_replayed() -> None:
    """What the engine before this one got wrong: three signals were four charges."""
    charges: list[str] = []

    async def charge() -> str:
        charges.append("charge")
        await asyncio.sleep(5)
        return "charged"

    async def body(ctx: Context[Any]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await ctx.step(charge)
        for n in range(3):
            await ctx.sleep(f"nap {n}", 100)

    simulate(drive_to_the_end(stores.memory(), body))
    assert charges == ["charge"]


@pytest.mark.parametrize(
    "nap",
    [
        lambda: asyncio.sleep(90_000),
        lambda: asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=90_000),
        lambda: suppressed(asyncio.wait_for(asyncio.Event().wait(), 90_000)),
    ],
    ids=["sleep", "wait", "wait_for"],
)
def test_a_day_of_asyncio_lasts_a_day_and_no_longer_whatever_happens_to_the_process(nap: Callable[[], Any]) -> None:
    ended: list[float] = []

    async def body(ctx: Context[Any]) -> None:
        await nap()
        ended.append(await ctx.step("now", now))

    async def now() -> float:
        return asyncio.get_running_loop().time()

    async def main() -> float:
        store, began = stores.memory(), asyncio.get_running_loop().time()
        assert isinstance(await drive(store, body), Suspended)
        await asyncio.sleep(50_000)
        assert isinstance(await drive(store, body), Suspended)
        await asyncio.sleep(90_000 - asyncio.get_running_loop().time())
        await drive(store, body)
        return began

    began = simulate(main())
    assert 90_000 <= ended[-1] - began <= 90_001


async def suppressed(limited: Coroutine[Any, Any, Any]) -> None:
    with suppress(TimeoutError):
        await limited


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
        await asyncio.sleep(2)
        assert isinstance(await runtime.resume("run"), Suspended)
        run = await runtime.get("run")
        assert run is not None
        await flow.start(id="copy", store=store, snapshot=await run.snapshot())
        await asyncio.sleep(200)
        assert await runtime.resume("copy") == Ok(None)
        assert named([entry.key for entry in await store.journal("copy") if entry.phase == "close"]) == ["until the snapshot"]
        await runtime.close()

    simulate(main())


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
    assert named(keys) == ["limit", "until the replay"]


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
