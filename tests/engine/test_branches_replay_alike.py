"""The concurrency proof: whatever the interleaving and wherever the process dies, branches see the same values again."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final, NamedTuple

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, stores
from perdure.errors import DuplicateStep, PersistenceError
from tests.campaign import IS_FULL
from tests.engine import worlds
from tests.engine.bodies import BODIES, Body, World, chains, flow_of
from tests.patience import PATIENCE
from tests.simulation import LoopClock, MortalStore, SlowStore, simulate


async def drive_to_the_end(store: Any, flow: Workflow[[], Any]) -> Any:
    """The value, through suspensions, as a process would get it; None when the process died on the way."""
    runtime = Runtime(store, [flow], clock=LoopClock(), unload_grace=0.5, concurrency=0)
    try:
        outcome = await runtime.run(flow, id="run")
        while isinstance(outcome, Suspended):
            await asyncio.sleep(0.5)
            outcome = await runtime.resume("run")
    except PersistenceError:
        return None
    finally:
        await runtime.close()
    match outcome:
        case Ok(value):
            return value
        case Err(error):
            raise error


class Undisturbed(NamedTuple):
    value: Any
    writes: int


async def undisturbed(body: Body, seed: int) -> Undisturbed:
    """The value without a crash, and how many writes it took."""
    store = MortalStore(SlowStore(stores.memory(), random.Random(seed)), 10**9, after_commit=False)
    value = await drive_to_the_end(store, flow_of(body, World(seed)))
    return Undisturbed(value, 10**9 - store.writes_left)


async def die_and_go_on(body: Body, seed: int, dies_at: int, *, after_commit: bool) -> tuple[Any, World]:
    """The value when the process dies at one write and another goes on, having checked that nothing is seen differently."""
    world, store = World(seed), stores.memory()
    mortal = MortalStore(SlowStore(store, random.Random(seed)), dies_at, after_commit=after_commit)
    value = await drive_to_the_end(mortal, flow_of(body, world))
    assert value is None, "it died before the end"
    await asyncio.sleep(31)  # the lease expires
    recorded = {entry.key for entry in await store.journal("run") if entry.phase == "close"}
    seen_before = [(key, value) for key, value in world.seen if key in recorded]
    ran_before = world.ran.copy()
    row = await store.get("run")
    if row is not None and row.ended:
        seen_before = []  # it died after the last write: there is nothing to replay
    value = await drive_to_the_end(store, flow_of(body, world))
    assert world.seen[: len(seen_before)] == seen_before, "the body saw other values, or in another order"
    again = [label for label in recorded if world.ran[label] > ran_before[label]]
    assert not again, f"recorded steps ran again: {again}"
    return value, world


# Random programs of every kind are in tests/fuzz.
SEEDS: Final = 200 if IS_FULL else 10


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_crash_at_any_write_changes_nothing_that_was_recorded(body: Body) -> None:
    for seed in range(SEEDS):
        whole = simulate(undisturbed(body, seed))
        # Every write in a full campaign; otherwise for the first seeds, and a few for the rest.
        every = range(1, whole.writes)
        writes = every if IS_FULL or seed < 2 else random.Random(seed).choices(every, k=5)
        for dies_at in writes:
            for after_commit in (False, True):
                value, _ = simulate(die_and_go_on(body, seed, dies_at, after_commit=after_commit))
                if body is chains:
                    assert value == whole.value


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_whole_replay_gives_the_same_value_and_runs_nothing(body: Body) -> None:
    for seed in range(SEEDS):
        whole = simulate(undisturbed(body, seed))
        value, world = simulate(die_and_go_on(body, seed, whole.writes - 1, after_commit=False))
        first, second = world.values
        assert first == second == value
        assert set(world.ran.values()) == {1}


async def test_a_branch_that_is_late_on_a_replay_goes_on_before_those_whose_results_came_later() -> None:
    """Its own I/O took longer than on the first run, so a later result has overtaken it. The next must not."""
    seen: list[list[str]] = []
    io_is_over, has_gone_on = asyncio.Event(), asyncio.Event()

    async def work() -> None: ...

    async def flow(ctx: Context[Any]) -> None:
        said: list[str] = []
        seen.append(said)

        async def slow() -> None:
            await io_is_over.wait()
            await ctx.step("slow", work)
            said.append("slow")
            has_gone_on.set()

        task = asyncio.create_task(slow())
        await has_gone_on.wait()
        await ctx.step("quick", work)
        io_is_over.set()
        await asyncio.sleep(0)
        await ctx.step("last", work)
        said.append("last")
        await task
        await ctx.sleep("nap", "1h")

    definition = Workflow("flow", flow)
    async with worlds.world(definition) as here, asyncio.timeout(PATIENCE):
        io_is_over.set()
        assert isinstance(await here.runtime.run(definition, id="run"), Suspended)
        io_is_over.clear()
        assert await here.later("1h") == {"run": Ok(None)}
    assert seen == [["slow", "last"]] * 2


def test_the_same_step_without_keys_is_refused_and_never_swapped() -> None:
    world = World(0)

    async def body(ctx: Context[Any]) -> Any:
        return await asyncio.gather(*(ctx.step("work", world.work, f"{number}") for number in range(10)))

    async def main() -> Any:
        runtime = Runtime(stores.memory(), clock=LoopClock(), concurrency=0)
        try:
            return await runtime.run(Workflow("flow", body), id="run")
        finally:
            await runtime.close()

    match simulate(main()):
        case Err(DuplicateStep() as error):
            assert "pass key=" in str(error)
        case other:
            raise AssertionError(other)
