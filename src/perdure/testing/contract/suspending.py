"""Suspending: no wake-up is lost between looking into the inbox and going to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import product

from perdure.model.records import Awaited, Lease
from perdure.store import Store
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import NOW, STAGGER, TTL, World, after, at, claimed_ids, entry, equal, holds, signals


@promise
async def a_suspended_run_sleeps_until_its_timer(world: World) -> None:
    """A suspended run holds no lease, says what it waits for, and is due at `wake_at`."""
    await world.suspended(wake_at=at(60), waiting_for=[*signals("go"), Awaited("child", "pay")])
    row = await world.row()
    equal((row.status, row.wake_at, row.lease_until, row.lease_owner), ("suspended", at(60), None, None), "the row")
    equal(set(row.waiting_for), {Awaited("signal", "go"), Awaited("child", "pay")}, "what it waits for")
    equal(await claimed_ids(world.b, now=at(59)), [], "claimed before wake_at")
    equal(await claimed_ids(world.b, now=at(60)), ["run"], "claimed at wake_at")
    equal((await world.row()).waiting_for, (), "what a running run waits for")


@promise
async def an_untimed_wait_is_never_due_by_itself(world: World) -> None:
    """A run suspended without `wake_at` is not due, however late it gets."""
    await world.suspended(waiting_for=signals("go"))
    equal(await claimed_ids(world.b, now=at(10**9)), [], "claimed after thirty years")
    equal((await world.row()).wake_at, None, "wake_at")


@promise
async def a_signal_that_is_there_keeps_the_run_awake(world: World) -> None:
    """When awaited rows are in the inbox, `suspend` records, gives them in order, and the lease is kept."""
    claim = await world.start()
    for name in ("go", "other", "stop", "go"):
        await world.b.signal("run", name, name.encode(), now=NOW)
    arrived = await world.a.suspend(claim.lease, wake_at=at(60), waiting_for=signals("stop", "go"), entries=[entry(1)], now=at(1))
    equal([(row.seq, row.name) for row in arrived], [(1, "go"), (3, "stop"), (4, "go")], "what suspend() gave")
    equal(await world.row(), claim.run, "the row, as the run goes on")
    equal(await world.b.journal("run"), [entry(1)], "the journal")
    await world.a.record(claim.lease, [entry(2)], consume=[1, 3], now=at(1))
    arrived = await world.a.suspend(claim.lease, wake_at=None, waiting_for=signals("go"), consume=[4], now=at(1))
    equal((arrived, (await world.row()).status), ([], "suspended"), "suspend() once everything awaited was consumed")


@promise
async def a_cancel_request_keeps_a_run_from_sleeping(world: World) -> None:
    """A run that suspends after a cancel was requested is suspended but due at once."""
    lease = await world.lease()
    await world.b.cancel("run", now=at(1))
    equal(await world.a.suspend(lease, wake_at=at(500), waiting_for=signals("go"), now=at(2)), [], "what suspend() gave")
    row = await world.row()
    equal((row.status, row.wake_at, row.cancel_requested), ("suspended", at(2), True), "the row")
    equal((await world.take(now=at(2))).run.cancel_requested, True, "cancel_requested in the next claim")


async def _suspend_against(
    world: World, run_id: str, sleeper: Store, wake: Callable[[], Awaitable[object]], turns: tuple[int, int]
) -> None:
    """Race a suspend with what should wake the run: `suspend` returns it, or the run is due."""
    lease: Lease = await world.lease(run_id)
    waiting = [*signals("go"), Awaited("child", "pay")]
    sleep = after(turns[0], lambda: sleeper.suspend(lease, wake_at=None, waiting_for=waiting, now=NOW))
    arrived, _ = await asyncio.gather(sleep, after(turns[1], wake))
    row = await world.row(run_id)
    if arrived:
        equal((row.status, row.epoch), ("running", lease.epoch), "status and epoch of a run that goes on")
    else:
        equal((row.status, row.wake_at), ("suspended", NOW), f"status and wake_at of a run that slept (turns {turns})")
        holds(await world.b.acquire(run_id, TTL, now=NOW) is not None, "it is due")


def _turns() -> list[tuple[int, int]]:
    return list(product(range(STAGGER), range(STAGGER)))


@promise
async def no_signal_is_lost_between_inbox_and_sleep(world: World) -> None:
    """However `signal` and `suspend` interleave, on one handle or two, `suspend` returns the signal or the run is due."""

    async def race(sleeper: Store, sender: Store, turns: tuple[int, int], name: str) -> None:
        run_id = f"{name}-{turns}"
        await _suspend_against(world, run_id, sleeper, lambda: sender.signal(run_id, "go", b"1", now=NOW), turns)

    for turns in _turns():
        await race(world.a, world.a, turns, "one handle")
    await asyncio.gather(*(race(world.a, world.b, turns, "two handles") for turns in _turns()))


@promise
async def no_child_outcome_is_lost_between_inbox_and_sleep(world: World) -> None:
    """However a child's `finish` and its parent's `suspend` interleave, `suspend` returns the outcome or the parent is due."""

    async def race(turns: tuple[int, int]) -> None:
        run_id = f"parent-{turns}"
        child = await world.lease(f"child-{turns}", parent_id=run_id, parent_key="pay")
        await _suspend_against(world, run_id, world.a, lambda: world.b.finish(child, "completed", b"1", now=NOW), turns)

    await asyncio.gather(*(race(turns) for turns in _turns()))


@promise
async def no_cancel_is_lost_between_request_and_sleep(world: World) -> None:
    """However `cancel` and `suspend` interleave, the run is due afterwards."""

    async def race(turns: tuple[int, int]) -> None:
        run_id = f"run-{turns}"
        await _suspend_against(world, run_id, world.a, lambda: world.b.cancel(run_id, now=NOW), turns)

    await asyncio.gather(*(race(turns) for turns in _turns()))
