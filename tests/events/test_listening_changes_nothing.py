"""Subscriptions, however slow, do not change what the body sees: on the first run and on a replay."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, current_step, stores
from perdure.engine.subscriptions import Mode
from perdure.errors import PersistenceError, RunFinished
from tests.campaign import times
from tests.engine.bodies import BODIES, Body, World, flow_of
from tests.engine.own_waits import own_wait
from tests.events.listening import Heard, Slow, reports
from tests.simulation import LoopClock, MortalStore, SlowStore, simulate


@pytest.fixture(autouse=True)
def no_listener_raises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not reports(caplog)


IMMORTAL: Final = 10**9


class Ears(NamedTuple):
    """Who listens: as `on_event`, or subscribed in a mode."""

    listener: Callable[[int], Heard]
    mode: Mode | None = None


DEAF: Final = "nobody"
EARS: Final[dict[str, Ears]] = {
    "a plain function": Ears(lambda _: Heard()),
    "a slow one": Ears(Slow),
    "a slow subscriber": Ears(Slow, "sync"),
    "a queue": Ears(Slow, "async"),
    # Longer than the grace after which a record that the body does not ask for is skipped.
    "one slower than the grace": Ears(lambda seed: Slow(seed, most_seconds=2)),
}
# Who listens to the first run, and who to the replay.
PAIRS: Final = [(DEAF, name) for name in EARS] + [(name, DEAF) for name in EARS] + [(name, name) for name in EARS]


async def told_of_more(world: World, ctx: Context[Any]) -> Any:
    """Signals, retries, failures and values from a cache beside steps: everything that has events of its own."""
    log: list[str] = []

    async def flaky(label: str) -> str:
        if current_step().attempt == 1:
            raise ValueError(label)
        return await world.work(label)

    async def bad(label: str) -> str:
        await world.work(label)
        raise ValueError(label)

    async def waits(number: int) -> None:
        await world.saw(f"signal{number}", ctx.wait_for_signal("go", key=f"signal{number}"))
        log.append(await world.step(ctx, f"after{number}@{len(log)}"))

    async def retries(key: str) -> None:
        retry = Retry(attempts=2, wait_initial="3ms", wait_jitter=0)
        await world.saw(key, ctx.step("flaky", flaky, key, key=key, retry=retry))
        log.append(await world.step(ctx, f"{key}@{len(log)}"))

    async def breaks(key: str) -> None:
        with contextlib.suppress(ValueError):
            await ctx.step("bad", bad, key, key=key)
        log.append(await world.step(ctx, f"{key}@{len(log)}"))

    await asyncio.gather(*map(waits, range(3)), *map(retries, ("r1", "r2")), *map(breaks, ("b1", "b2")))
    return log


ALL_BODIES: Final = [*BODIES, told_of_more]


async def driven(store: Any, flow: Workflow[[], Any], ears: str, seed: int) -> Any:
    """The value, through suspensions, as a process would get it; None when the process died on the way."""
    listener, mode = (None, None) if ears == DEAF else (EARS[ears].listener(seed), EARS[ears].mode)
    on_event = None if mode else listener
    runtime = Runtime(store, [flow], clock=LoopClock(), unload_grace=0.5, concurrency=0, on_event=on_event)
    try:
        run = await runtime.start(flow, id="run")
        if mode is not None and listener is not None:
            run.subscribe(listener, mode=mode)
        for number in range(3):
            with contextlib.suppress(RunFinished):
                await run.signal("go", number, dedupe=f"{number}")
        outcome = await runtime.resume("run")
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


async def writes_of(body: Body, seed: int, ears: str) -> int:
    """How many writes the run takes when nothing happens."""
    store = MortalStore(SlowStore(stores.memory(), random.Random(seed)), IMMORTAL, after_commit=False)
    await driven(store, flow_of(body, World(seed)), ears, seed)
    return IMMORTAL - store.writes_left


async def die_and_go_on(
    body: Body, seed: int, dies_at: int, ears: tuple[str, str], *, after_commit: bool
) -> tuple[Any, World, list[str]]:
    """The value when the process dies at one write and another goes on, what was seen, and what was recorded by the first."""
    world, store = World(seed), stores.memory()
    mortal = MortalStore(SlowStore(store, random.Random(seed)), dies_at, after_commit=after_commit)
    assert await driven(mortal, flow_of(body, world), ears[0], seed) is None, "it died before the end"
    await asyncio.sleep(31)  # the lease expires
    recorded = [entry.key for entry in await store.journal("run") if entry.phase == "close"]
    seen_before = [(key, value) for key, value in world.seen if key in recorded]
    ran_before = world.ran.copy()
    row = await store.get("run")
    if row is not None and row.ended:
        seen_before = []  # it died after the last write: there is nothing to replay
    value = await driven(store, flow_of(body, world), ears[1], seed + 1)
    assert world.seen[: len(seen_before)] == seen_before, "the body saw other values, or in another order"
    again = [label for label in recorded if world.ran[label] > ran_before[label]]
    assert not again, f"recorded steps ran again: {again}"
    return value, world, recorded


@pytest.mark.parametrize("body", ALL_BODIES, ids=lambda body: body.__name__)
def test_a_crash_at_any_write_changes_nothing_whoever_listened_and_whoever_listens(body: Body) -> None:
    for seed in range(times(40)):
        rng = random.Random(seed)
        for ears in rng.sample(PAIRS, 3):
            writes = simulate(writes_of(body, seed, ears[0]))
            for dies_at in rng.choices(range(1, writes), k=2):
                simulate(die_and_go_on(body, seed, dies_at, ears, after_commit=rng.random() < 0.5))


@pytest.mark.parametrize("body", ALL_BODIES, ids=lambda body: body.__name__)
def test_a_whole_replay_gives_the_same_value_and_runs_nothing_whoever_listens(body: Body) -> None:
    for seed in range(times(30)):
        for ears in random.Random(seed).sample(PAIRS, 3):
            writes = simulate(writes_of(body, seed, ears[0]))
            value, world, _ = simulate(die_and_go_on(body, seed, writes - 1, ears, after_commit=False))
            first, second = world.values
            assert first == second == value
            assert set(world.ran.values()) == {1}


@pytest.mark.parametrize("ears", [DEAF, *EARS])
def test_nothing_live_begins_while_a_body_with_pauses_of_its_own_is_replayed(ears: str) -> None:
    """Each pause is shorter than the grace, and all of them together are longer."""
    seen: list[str] = []

    async def work(label: str) -> str:
        seen.append(f"{label} ran")
        return label

    async def body(ctx: Context[Any]) -> None:
        seen.clear()
        live = asyncio.create_task(ctx.step("live", asyncio.sleep, 1e6) if is_first else ctx.step("live", work, "live"))
        for number in range(5):
            await own_wait(0.2)
            seen.append(await ctx.step("work", work, f"{number}", key=f"{number}"))
        await ctx.step("seal", asyncio.sleep, 0)
        await live

    flow, is_first = Workflow("flow", body), True

    async def main() -> None:
        nonlocal is_first
        store = stores.memory()
        mortal = MortalStore(store, 1 + 3 + 1 + 5, after_commit=False)  # start, signals, acquire, and a record for each number
        assert await driven(mortal, flow, ears, seed=1) is None
        await asyncio.sleep(31)
        assert [entry.key for entry in await store.journal("run")] == [f"{number}" for number in range(5)]
        is_first = False
        await driven(store, flow, ears, seed=2)

    simulate(main())
    assert seen == ["0", "1", "2", "3", "4", "live ran"]
