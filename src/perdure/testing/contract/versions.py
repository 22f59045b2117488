"""Versions: a run stays in the version of its workflow in which it was created, and only a worker that has it gets the run."""

from __future__ import annotations

import asyncio
from typing import Final

from perdure.model.records import MAX_VERSION
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.cases import promise, promise_with
from perdure.testing.contract.world import (
    NOW,
    SCHEDULE,
    TTL,
    FullWorld,
    World,
    at,
    claimed_ids,
    equal,
    new_run,
    run_row,
    signals,
)

MANY: Final = 200


@promise
async def claim_takes_only_the_versions_it_was_asked_for(world: World) -> None:
    """`claim` takes runs of a workflow only in the versions that stand beside its name; a version of one is none of another."""
    for name in ("one", "two"):
        for version in (1, 2, 3):
            await world.a.create(new_run(f"{name}-{version}", workflow=name, version=version), now=NOW)
    equal(await claimed_ids(world.b, workflows=["one", "two"], version=9), [], "of a version that no run has")
    claims = await world.b.claim(9, TTL, [("one", 1), ("two", 3)], now=NOW)
    equal([claim.run.id for claim in claims.claims], ["one-1", "two-3"], "of the first version of one and the third of two")
    claims = await world.b.claim(9, TTL, [("one", 2), ("one", 3)], now=NOW)
    found = [(claim.run.id, claim.run.version) for claim in claims.claims]
    equal(found, [("one-2", 2), ("one-3", 3)], "of two versions of one")
    equal((await world.take("two-1", now=NOW)).run.version, 1, "the version of a run that was acquired by its id")


@promise
async def runs_of_other_versions_delay_no_others(world: World) -> None:
    """Runs of a version that was not asked for are passed over, however many are due before, and are not waited for."""
    await asyncio.gather(*(world.a.create(new_run(f"old-{n}", priority=9), now=NOW) for n in range(MANY)))
    await world.a.create(new_run("old-later", start_at=at(60)), now=NOW)
    await world.a.create(new_run("new", version=2), now=at(1))
    await world.a.create(new_run("new-later", version=2, start_at=at(90)), now=NOW)
    claims = await world.b.claim(1, TTL, [("flow", 2)], now=at(2))
    equal([claim.run.id for claim in claims.claims], ["new"], "what is claimed")
    equal(claims.next_wake_at, at(90), "next_wake_at")
    row = await world.row("old-0")
    equal((row.status, row.attempts, row.version), ("pending", 0, 1), "a run of the other version")
    equal(len(await claimed_ids(world.b, MANY + 9, now=at(2))), MANY, "how many of the other version its own worker claims")


@promise
async def a_run_stays_in_its_version(world: World) -> None:
    """No verb changes the version of a run: not a lease, a suspension, an end or a reopening, nor a `create` with another one."""
    claim = await world.start(version=7)
    equal((claim.run.version, (await world.row()).version), (7, 7), "the version at first")
    await world.a.suspend(claim.lease, wake_at=at(1), waiting_for=signals("go"), now=NOW)
    await world.b.signal("run", "go", b"1", now=NOW)
    (claim,) = (await world.b.claim(1, TTL, [("flow", 7)], now=at(1))).claims
    await world.a.release(claim.lease, now=at(1))
    claim = await world.take(now=at(1))
    await world.a.finish(claim.lease, "failed", b"1", now=at(1))
    await world.a.reopen("run", [], now=at(2))
    created = await world.b.create(new_run(version=8), ttl=TTL, now=at(3))
    equal((created.is_new, created.claim, created.run.version), (False, None, 7), "what create() with another version gave")
    equal((await world.row()).version, 7, "the version at last")
    equal(await claimed_ids(world.b, version=8, now=at(3)), [], "what a worker with the other version claims")
    equal(await claimed_ids(world.b, version=7, now=at(3)), ["run"], "what a worker with its version claims")


@promise
async def a_list_shows_versions(world: World) -> None:
    """A line of `list` has the run's version, the highest that there can be too; a workflow's list has all its versions."""
    for n, version in enumerate((1, 2, MAX_VERSION)):
        await world.a.create(new_run(f"run-{n}", version=version), now=at(n))
    expected = [("run-2", MAX_VERSION), ("run-1", 2), ("run-0", 1)]
    equal([(line.id, line.version) for line in await world.b.list()], expected, "the lines of all")
    equal(
        [(line.id, line.version) for line in await world.b.list(RunFilter(workflow="flow"))],
        expected,
        "the lines of the workflow",
    )
    equal(
        [(line.id, line.version) for line in await world.b.list(RunFilter(prefix="run-1"))],
        expected[1:2],
        "the lines of a prefix",
    )
    equal(await claimed_ids(world.b, version=MAX_VERSION, now=at(9)), ["run-2"], "what the worker of the highest one claims")


@promise_with("schedules")
async def a_fired_run_has_its_version(world: FullWorld) -> None:
    """A run that a schedule fires is created in the version that was passed with it."""
    await world.a.put_schedule(SCHEDULE)
    await world.b.fire("daily", expected_at=NOW, next_at=None, run=new_run(version=4), now=NOW)
    equal((await world.row()).version, 4, "the version of the fired run")


@promise_with("operators")
async def a_restored_run_keeps_its_version(world: FullWorld) -> None:
    """`restore` keeps the version; one of 0, of a run without its input, is set by the `create` that brings the input."""
    await world.a.restore(run_row("whole", version=3), [], now=NOW)
    for run_id, version in (("known", 3), ("unknown", 0)):
        await world.a.restore(run_row(run_id, version=version, input=b"", input_hash=b""), [], now=NOW)
        await world.b.create(new_run(run_id, version=5), now=NOW)
    versions = [(await world.row(run_id)).version for run_id in ("whole", "known", "unknown")]
    equal(versions, [3, 3, 5], "the versions")
    equal(await claimed_ids(world.b, version=5), ["unknown"], "what the worker of the version from create() claims")
    equal(await claimed_ids(world.b, version=3), ["known", "whole"], "what the worker of the restored version claims")


@promise_with("operators")
async def due_has_runs_of_every_version(world: FullWorld) -> None:
    """`due` gives runs of all versions in one order."""
    for n, version in enumerate((3, 1, 2)):
        await world.a.create(new_run(f"run-{n}", version=version, start_at=at(n)), now=NOW)
    equal(list(await world.b.due(now=at(9))), ["run-0", "run-1", "run-2"], "what is due")
