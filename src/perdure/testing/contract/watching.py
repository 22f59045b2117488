"""Watching: a worker that waits is woken by what any process does.

These are the only cases in real time: they wait for an event, and `PATIENCE` is how long a broken store is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from perdure.model.records import Awaited, Item, QueueLimits, Schedule
from perdure.store import Capability, FullStore, Store
from perdure.testing.contract.cases import Check, add, promise, promise_with
from perdure.testing.contract.world import (
    ITEM,
    TTL,
    FullWorld,
    World,
    entry,
    holds,
    in_another_loop,
    new_input,
    new_run,
    run_row,
    signals,
)

PATIENCE: Final = 20.0

CoreEvent = Callable[[Store], Awaitable[object]]
Event = Callable[[FullStore], Awaitable[object]]
Stage = Callable[[FullWorld], Awaitable[Event]]


async def _created(_: World) -> CoreEvent:
    return lambda store: store.create(new_run())


async def _signalled(world: World) -> CoreEvent:
    await _suspend(world, signals("go"))
    return lambda store: store.signal("run", "go", b"1")


async def _cancelled(world: World) -> CoreEvent:
    await _suspend(world, [])
    return lambda store: store.cancel("run")


async def _finished(world: World) -> CoreEvent:
    claim = (await world.a.create(new_run(), ttl=TTL)).claim
    return lambda store: store.finish(claim.lease, "completed", b"1") if claim else store.setup()


async def _released(world: World) -> CoreEvent:
    claim = (await world.a.create(new_run(), ttl=TTL)).claim
    return lambda store: store.release(claim.lease) if claim else store.setup()


async def _suspended(world: World) -> CoreEvent:
    claim = (await world.a.create(new_run(), ttl=TTL)).claim
    return lambda store: store.suspend(claim.lease, wake_at=1) if claim else store.setup()


async def _continued(world: World) -> CoreEvent:
    claim = (await world.a.create(new_run(), ttl=TTL)).claim
    return lambda store: store.continue_as(claim.lease, new_input()) if claim else store.setup()


async def _reopened(world: World) -> CoreEvent:
    claim = (await world.a.create(new_run(), ttl=TTL)).claim
    if claim is not None:
        await world.a.finish(claim.lease, "failed", b"1")
    return lambda store: store.reopen("run", [])


async def _unheld(world: FullWorld) -> Event:
    await world.a.create(new_run())
    await world.a.hold("run")
    return lambda store: store.unhold("run")


async def _restored(_: FullWorld) -> Event:
    return lambda store: store.restore(run_row(wake_at=1), [])


async def _given_its_input(world: FullWorld) -> Event:
    await world.a.restore(run_row(input_hash=b""), [])
    return lambda store: store.create(new_run())


async def _fired(world: FullWorld) -> Event:
    await world.a.put_schedule(Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1))
    return lambda store: store.fire("daily", expected_at=1, next_at=None, run=new_run())


async def _limited(world: FullWorld) -> Event:
    await world.a.limit_queue("default", QueueLimits(concurrency=1))
    return lambda store: store.limit_queue("default", QueueLimits(concurrency=2))


async def _made_room(world: FullWorld) -> Event:
    await world.a.limit_queue("default", QueueLimits(concurrency=1))
    await world.a.create(new_run())
    claim = await world.a.acquire("run", TTL)
    return lambda store: store.suspend(claim.lease, wake_at=None, waiting_for=signals("go")) if claim else store.setup()


async def _scheduled(_: FullWorld) -> Event:
    return lambda store: store.put_schedule(Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1))


async def _child_finished(world: World) -> CoreEvent:
    await _suspend(world, [Awaited("child", "pay")])
    claim = (await world.a.create(new_run("child", parent_id="run", parent_key="pay"), ttl=TTL)).claim
    return lambda store: store.finish(claim.lease, "completed", b"1") if claim else store.setup()


STAGES: Final[dict[str, tuple[Stage, str]]] = {
    "create": (_created, "A worker that watches is woken when another process creates a run."),
    "signal": (_signalled, "A worker that watches is woken when another process signals a run that waits."),
    "cancel": (_cancelled, "A worker that watches is woken when another process cancels a suspended run."),
    "finish": (_finished, "A worker that watches is woken when another process finishes a run."),
    "child_finish": (_child_finished, "A worker that watches is woken when a child's end makes its parent due."),
    "release": (_released, "A worker that watches is woken when another process gives a run back."),
    "suspend": (_suspended, "A worker that watches is woken when another process suspends a run whose timer has passed."),
    "continue_as": (_continued, "A worker that watches is woken when another process lets a run start over."),
    "reopen": (_reopened, "A worker that watches is woken when another process reopens a run."),
}
PART_STAGES: Final[dict[str, tuple[Capability, Stage, str]]] = {
    "restore": ("operators", _restored, "A worker that watches is woken when another process restores a run."),
    "input": (
        "operators",
        _given_its_input,
        "A worker that watches is woken when a restored run gets its input from another process.",
    ),
    "unhold": ("operators", _unheld, "A worker that watches is woken when an operator lets a run go on."),
    "new_limits": ("schedules", _limited, "A worker that watches is woken when another process changes the limits of a queue."),
    "room_in_a_limited_queue": (
        "schedules",
        _made_room,
        "A worker that watches is woken when another process suspends a run of a limited queue, whatever it waits for.",
    ),
    "fire": ("schedules", _fired, "A worker that watches is woken when another process fires a schedule."),
    "put_schedule": ("schedules", _scheduled, "A worker that watches is woken when another process puts a schedule."),
}


async def _suspend(world: World, waiting_for: list[Awaited]) -> None:
    claim = (await world.a.create(new_run(), ttl=TTL)).claim
    if claim is not None:
        await world.a.suspend(claim.lease, wake_at=None, waiting_for=waiting_for)


async def _woken(watching: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait([watching], timeout=PATIENCE)
    watching.cancel()
    holds(done, f"the watcher was woken within {PATIENCE:g} s")


def _wake_case(stage: Stage) -> Check:
    async def check(world: FullWorld) -> None:
        event = await stage(world)
        await world.b.setup()  # a store that has never been used may return from its first watch at once
        watching = asyncio.create_task(world.b.watch(60))
        await asyncio.sleep(0)
        await event(world.a)
        await _woken(watching)

    return check


for _name, (_stage, _sentence) in STAGES.items():
    add(_wake_case(_stage), f"watch_is_woken_by_{_name}", _sentence)
for _name, (_part, _stage, _sentence) in PART_STAGES.items():
    add(_wake_case(_stage), f"watch_is_woken_by_{_name}", _sentence, needs=[_part])


@promise_with("streams")
async def a_watch_for_items_is_woken_by_new_items(world: FullWorld) -> None:
    """A reader that watches with `items` is woken when another process records items, and when it creates a run."""
    lease = await world.lease()
    await world.b.setup()
    events: list[Event] = [
        lambda store: store.record(lease, items=[ITEM]),
        lambda store: store.record(lease, [entry(1)], items=[Item(stream="log", n=1, payload=b"1")]),
        lambda store: store.create(new_run("other")),
    ]
    for event in events:
        watching = asyncio.create_task(world.b.watch(60, items=True))
        await asyncio.sleep(0)
        await event(world.a)
        await _woken(watching)


@promise
async def watch_wakes_all_watchers(world: World) -> None:
    """All watchers of both handles are woken by one event."""
    await asyncio.gather(world.a.setup(), world.b.setup())
    watching = [asyncio.create_task(store.watch(60)) for store in (world.a, world.b) * 3]
    await asyncio.sleep(0)
    await world.a.create(new_run())
    for task in watching:
        await _woken(task)


@promise
async def watch_works_across_event_loops(world: World) -> None:
    """A watcher is woken by what happens in another thread's event loop."""
    await world.a.setup()
    watching = asyncio.create_task(world.a.watch(60))
    await asyncio.sleep(0)
    await in_another_loop(lambda: world.b.create(new_run()))
    await _woken(watching)


@promise
async def watch_returns_at_the_latest_after_its_timeout(world: World) -> None:
    """When nothing happens `watch` waits, but no longer than its timeout."""
    waited: list[float] = []
    for _ in range(5):
        before = time.monotonic()
        await asyncio.wait_for(world.a.watch(0.03), PATIENCE)
        waited.append(time.monotonic() - before)
    holds(max(waited) >= 0.02, f"at least one of five watches waited (they took {waited})")


@promise
async def closing_a_store_ends_its_watches(world: World) -> None:
    """A watch in progress on a store that is closed returns, as there is nothing left to wait for."""
    await world.a.setup()
    watching = asyncio.create_task(world.a.watch(60))
    await asyncio.sleep(0)
    await asyncio.wait_for(world.a.close(), PATIENCE)
    await _woken(watching)


@promise
async def a_cancelled_watch_leaves_nothing_behind(world: World) -> None:
    """A watch that was cancelled disturbs no later one, and the store goes on."""
    await world.a.setup()
    first = asyncio.create_task(world.a.watch(60))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    watching = asyncio.create_task(world.a.watch(60))
    await asyncio.sleep(0)
    await world.b.create(new_run())
    await _woken(watching)
