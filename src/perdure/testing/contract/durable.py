"""Durability: what a restart leaves, and that a store which keeps nothing says so."""

from __future__ import annotations

from perdure.errors import LeaseLost
from perdure.model.records import QueueLimits
from perdure.testing.contract.cases import promise_with, promise_without
from perdure.testing.contract.creating import FIRST
from perdure.testing.contract.late_inputs import lacking
from perdure.testing.contract.restoring import INBOX, WHOLE
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    SCHEDULE,
    TTL,
    FullWorld,
    World,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    new_run,
    refused,
    run_row,
    signals,
)


@promise_without("durable")
async def a_store_that_keeps_nothing_says_so(world: World) -> None:
    """A store that is not durable says `process`, so that its memory is not taken for a disk."""
    equal(world.a.durability, "process", "store.durability")


@promise_with("durable")
async def a_durable_store_says_what_it_survives(world: World) -> None:
    """A durable store's acknowledged writes survive on disk or on several machines, and it says which."""
    holds(world.a.durability in {"disk", "replicated"}, f"durability is disk or replicated, not {world.a.durability!r}")


@promise_with("durable")
async def everything_acknowledged_survives_a_restart(world: World) -> None:
    """Rows, journals, inboxes and items are the same after a restart, byte for byte."""
    lease = await world.lease("driven", metadata=b"\x00\xff")
    await world.a.signal("driven", "go", b"1", dedupe="d", now=NOW)
    await world.record_item(lease, entry(1), entry(2))
    await world.a.record(lease, consume=[1], now=NOW)
    await world.suspended("asleep", waiting_for=signals("go"), wake_at=at(60))
    await world.a.create(new_run("later", start_at=at(5)), now=NOW)
    await world.a.create(new_run("begun"), entries=[FIRST, entry(1)], created_at=at(-9), now=NOW)
    await world.ended("over", "failed")
    names = ("driven", "asleep", "later", "begun", "over")
    before = await world.dump(*names)
    await world.restart()
    equal(await world.dump(*names), before, "everything of the runs")
    equal(await world.a.signal("driven", "go", b"2", dedupe="d", now=NOW), 1, "a signal that was sent before the restart")


@promise_with("durable", "operators")
async def a_hold_survives_a_restart(world: FullWorld) -> None:
    """A run on hold is on hold after a restart."""
    await world.a.create(new_run("held", start_at=at(5)), now=NOW)
    await world.a.hold("held")
    before = await world.dump("held")
    await world.restart()
    equal((await world.dump("held"), await claimed_ids(world.b, now=at(9))), (before, []), "the run, and what can be claimed")


@promise_with("durable", "schedules")
async def schedules_and_queue_limits_survive_a_restart(world: FullWorld) -> None:
    """Schedules and queue limits are the same after a restart."""
    await world.a.put_schedule(SCHEDULE)
    await world.a.limit_queue("default", QueueLimits(concurrency=2))
    await world.restart()
    equal(list(await world.a.schedules()), [SCHEDULE], "the schedules")
    equal(await world.a.queue_limits(), {"default": QueueLimits(concurrency=2)}, "the queue limits")


@promise_with("durable", "schedules")
async def a_rate_survives_a_restart(world: FullWorld) -> None:
    """After a restart the next run of a queue starts no earlier than it would have without one."""
    await world.a.limit_queue("default", QueueLimits(interval=5_000_000))
    for run_id in ("a", "b"):
        await world.a.create(new_run(run_id), now=NOW)
    equal(await claimed_ids(world.a), ["a"], "what starts before the restart")
    await world.restart()
    starts = [await claimed_ids(world.b, now=instant) for instant in (at(5) - 1, at(5))]
    equal(starts, [[], ["b"]], "what starts before and after the interval has passed")


@promise_with("durable", "streams")
async def progress_survives_a_restart(world: FullWorld) -> None:
    """A run's progress is the same after a restart."""
    await world.a.report(await world.lease(), b"half")
    await world.restart()
    equal((await world.row()).progress, b"half", "the progress")


@promise_with("durable", "operators")
async def what_was_restored_survives_a_restart(world: FullWorld) -> None:
    """Restored runs are the same after a restart, and nothing of what they replaced is back."""
    lease = await world.lease("replaced")
    await world.a.signal("replaced", "go", b"1", dedupe="d", now=NOW)
    await world.record_item(lease, entry(1), entry(2))
    await world.a.restore(run_row("replaced"), [entry(2, payload=b"new")], [INBOX[1]], now=EXPIRED)
    await world.a.restore(WHOLE, [FIRST], INBOX, now=NOW)
    await world.a.restore(lacking("lacking"), [entry(1)], now=NOW)
    names = ("replaced", "run", "lacking")
    before = await world.dump(*names)
    await world.restart()
    equal(await world.dump(*names), before, "everything of the runs")
    with refused(LeaseLost(lease.run_id, lease.epoch), "record with a lease from before the restore"):
        await world.a.record(lease, [entry(3)], now=EXPIRED)
    claim = await world.take("replaced", now=EXPIRED)
    equal((claim.journal, claim.inbox, claim.item_counts), ([entry(2, payload=b"new")], [INBOX[1]], {}), "the next claim")
    equal(await world.b.acquire("lacking", TTL, now=EXPIRED), None, "acquire of the run that lacks its input")
    await world.a.create(new_run("lacking"), now=EXPIRED)
    await world.restart()
    equal((await world.take("lacking", now=EXPIRED)).run.input, b"[]", "the input it got before a second restart")


@promise_with("durable")
async def a_run_goes_on_after_a_restart(world: World) -> None:
    """After a restart a run is claimed with everything it recorded, and wakes by its timer and its signals as before."""
    lease = await world.lease("driven")
    await world.a.record(lease, [entry(1)], now=NOW)
    await world.suspended("timer", wake_at=at(60))
    await world.suspended("waiting", waiting_for=signals("go"))
    await world.restart()
    await world.a.signal("waiting", "go", b"1", now=at(1))
    claim = await world.take("driven", now=EXPIRED)
    equal((claim.journal, claim.run.attempts), ([entry(1)], 1), "journal and attempts of the next claim")
    equal(await claimed_ids(world.b, now=at(60)), ["waiting", "driven", "timer"], "what comes due, in order")


@promise_with("durable")
async def a_restart_does_not_revive_a_stale_lease(world: World) -> None:
    """A lease that was superseded before a restart is refused after it, and epochs go on growing."""
    stale = await world.lease()
    taken = await world.take()
    await world.restart()
    with refused(LeaseLost("run", stale.epoch), "record with a lease that was superseded before the restart"):
        await world.a.record(stale, [entry(1)], now=EXPIRED)
    holds((await world.take(now=at(99))).lease.epoch > taken.lease.epoch, "the epoch grows over a restart")


@promise_with("durable", "operators")
async def a_deletion_survives_a_restart(world: FullWorld) -> None:
    """What was deleted or purged does not come back."""
    await world.lease("deleted")
    await world.ended("purged")
    await world.ended("kept", now=at(50))
    await world.a.delete("deleted")
    await world.a.purge(10, now=at(20))
    await world.restart()
    equal([line.id for line in await world.a.list()], ["kept"], "the runs after the restart")
