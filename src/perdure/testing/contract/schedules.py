"""Schedules: each instant fires once."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.model.records import Schedule
from perdure.store import require
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.world import (
    NOW,
    SCHEDULE,
    FullWorld,
    at,
    claimed_ids,
    equal,
    new_run,
    no_input,
    refused,
)


@promise_with("schedules")
async def a_schedule_is_kept_as_it_was_put(world: FullWorld) -> None:
    """`put_schedule` inserts, or replaces what has this id; every field reads back, and `schedules` are by id."""
    full = Schedule(id="b", workflow="flow", spec="0 9 * * * Europe/Berlin", input=b"\x00\xff", next_at=at(60), metadata=b"\xfe")
    other = Schedule(id="a", workflow="other", spec="", input=b"", next_at=None)
    for schedule in (msgspec.structs.replace(full, workflow="old", next_at=None), full, other):
        await world.a.put_schedule(schedule)
    equal(list(await world.b.schedules()), [other, full], "the schedules")


@promise_with("schedules")
async def a_dropped_schedule_is_gone(world: FullWorld) -> None:
    """`drop_schedule` says whether there was one, and a dropped one does not fire."""
    await world.a.put_schedule(SCHEDULE)
    equal([await world.b.drop_schedule("daily") for _ in range(2)], [True, False], "what drop_schedule() gave")
    equal(await world.a.fire("daily", expected_at=NOW, next_at=at(60), run=new_run(), now=NOW), False, "what fire() gave")
    equal((list(await world.a.schedules()), await world.a.get("run")), ([], None), "what is there")


@promise_with("schedules")
async def firing_moves_the_schedule_and_creates_the_run(world: FullWorld) -> None:
    """`fire` moves the schedule from `expected_at` to `next_at` and creates the run, which is pending and due; together."""
    await world.a.put_schedule(SCHEDULE)
    equal(await world.b.fire("daily", expected_at=NOW, next_at=at(60), run=new_run(), now=at(1)), True, "what fire() gave")
    equal(list(await world.a.schedules()), [msgspec.structs.replace(SCHEDULE, next_at=at(60))], "the schedule")
    row = await world.row()
    equal((row.status, row.wake_at, row.created_at), ("pending", at(1), at(1)), "the run")
    equal(await claimed_ids(world.a, now=at(1)), ["run"], "what can be claimed")


@promise_with("schedules")
async def a_schedule_fires_once_for_each_instant(world: FullWorld) -> None:
    """When the schedule is no longer at `expected_at`, `fire` gives False and neither moves it nor creates a run."""
    await world.a.put_schedule(SCHEDULE)
    await world.a.fire("daily", expected_at=NOW, next_at=None, run=new_run("first"), now=NOW)
    equal(await world.b.fire("daily", expected_at=NOW, next_at=at(60), run=new_run("second"), now=NOW), False, "a second fire()")
    equal((await world.b.get("second"), (await world.b.schedules())[0].next_at), (None, None), "second run and next_at")


@promise_with("schedules")
async def firing_leaves_a_run_that_exists_alone(world: FullWorld) -> None:
    """When the run to be created is there already, with any input, `fire` moves the schedule and leaves the run as it is."""
    await world.a.put_schedule(SCHEDULE)
    await world.ended(input_hash=b"other")
    before = await world.dump("run")
    equal(await world.b.fire("daily", expected_at=NOW, next_at=at(60), run=new_run(), now=at(1)), True, "what fire() gave")
    equal((await world.dump("run"), (await world.b.schedules())[0].next_at), (before, at(60)), "run and next_at")


@promise_with("schedules")
async def an_instant_can_be_passed_over(world: FullWorld) -> None:
    """`fire` without a run moves the schedule, once, and creates nothing."""
    await world.a.put_schedule(SCHEDULE)
    calls = [store.fire("daily", expected_at=NOW, next_at=at(60), run=None, now=NOW) for store in (world.a, world.b, world.a)]
    equal(sum(await asyncio.gather(*calls)), 1, "how many moved it")
    equal(list(await world.b.schedules()), [msgspec.structs.replace(SCHEDULE, next_at=at(60))], "the schedule")
    equal(await world.b.list(), [], "the runs")


@promise_with("schedules")
async def a_schedule_does_not_fire_without_an_input(world: FullWorld) -> None:
    """`fire` of a run with an empty input hash raises `ValueError`; the schedule stays where it is and there is no run."""
    await world.a.put_schedule(SCHEDULE)
    with refused(no_input("run"), "firing a schedule for a run with an empty input hash"):
        await world.a.fire("daily", expected_at=NOW, next_at=at(60), run=new_run(input_hash=b""), now=NOW)
    equal((await world.b.get("run"), list(await world.b.schedules())), (None, [SCHEDULE]), "run and schedule")


@promise_with("schedules")
async def two_processes_fire_a_schedule_once(world: FullWorld) -> None:
    """When many fire one instant at once, one of them does, and there is one run."""
    await world.a.put_schedule(SCHEDULE)
    calls = [
        store.fire("daily", expected_at=NOW, next_at=at(60), run=new_run(f"run-{n}"), now=NOW)
        for n in range(8)
        for store in (world.a, world.b)
    ]
    equal(sum(await asyncio.gather(*calls)), 1, "how many fired")
    equal(len(await world.a.list()), 1, "the number of runs")


@promise_with("schedules")
async def schedules_that_differ_stay_apart(world: FullWorld) -> None:
    """Schedule ids are compared byte for byte and listed in that order."""
    for name in NAMES:
        await world.a.put_schedule(Schedule(id=name, workflow=name, spec=name, input=b"[]", next_at=NOW))
    equal([schedule.id for schedule in await world.b.schedules()], sorted(NAMES), "the schedules")
    equal(await world.b.drop_schedule("order-1"), True, "dropping one")
    equal(len(await world.b.schedules()), len(NAMES) - 1, "the number of schedules that are left")


@promise_with("schedules")
async def namespaces_have_their_own_schedules(world: FullWorld) -> None:
    """A schedule is seen, fired and dropped in its own namespace alone."""
    other = require(await world.open_namespace("other"), "schedules")
    await other.put_schedule(SCHEDULE)
    equal(list(await world.a.schedules()), [], "schedules of another namespace")
    equal(await world.a.fire("daily", expected_at=NOW, next_at=at(60), run=new_run(), now=NOW), False, "what fire() gave")
    equal(await world.a.drop_schedule("daily"), False, "what drop_schedule() gave")
    equal(list(await other.schedules()), [SCHEDULE], "schedules of this namespace")
