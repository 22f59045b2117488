"""Ending: finish a run and notify its parent, reopen it, cancel it."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.errors import LeaseHeld, RunFinished, RunNotFound
from perdure.model.journal import drop_entry
from perdure.model.records import Awaited, EndStatus, Signal
from perdure.testing.contract.cases import promise
from perdure.testing.contract.inbox import ENDS
from perdure.testing.contract.world import EXPIRED, NOW, World, at, claimed_ids, entry, equal, holds, new_run, refused, signals

REOPENABLE: tuple[EndStatus, ...] = ("failed", "cancelled", "dead")


@promise
async def a_finished_run_takes_nothing_more(world: World) -> None:
    """An ended run has its status and outcome, holds no lease, waits for nothing, and is never due."""
    for status in ENDS:
        lease = await world.lease(status)
        await world.a.finish(lease, status, status.encode(), now=at(1))
        row = await world.row(status)
        equal((row.status, row.outcome, row.ended), (status, status.encode(), True), "status and outcome")
        equal((row.wake_at, row.lease_until, row.lease_owner, row.waiting_for), (None, None, None, ()), "timer, lease and waits")
    equal(await claimed_ids(world.b, now=at(10**6)), [], "what can be claimed")


@promise
async def a_finished_child_notifies_its_parent(world: World) -> None:
    """`finish` puts the outcome into the parent's inbox under the child's key, and wakes a parent that waits for it."""
    await world.suspended("parent", waiting_for=[Awaited("child", "pay")], wake_at=at(500))
    child = await world.lease("child", parent_id="parent", parent_key="pay")
    await world.b.finish(child, "failed", b"\x00outcome", now=at(1))
    equal(await world.a.inbox("parent"), [Signal(seq=1, kind="child", name="pay", payload=b"\x00outcome")], "the parent's inbox")
    equal(((await world.row("parent")).wake_at, (await world.row("child")).parent_notified), (at(1), True), "woken and notified")
    equal(await claimed_ids(world.b, now=at(1)), ["parent"], "what can be claimed")


@promise
async def a_child_leaves_a_parent_that_does_not_wait_alone(world: World) -> None:
    """A parent that is driven or waits for something else only gets the row; one that ended or does not exist gets nothing."""
    claim = await world.start("driven")
    await world.suspended("busy", waiting_for=[*signals("pay"), Awaited("child", "other")])
    await world.ended("over")
    over = await world.dump("over")
    for parent in ("driven", "busy", "over", "gone"):
        child = await world.lease(f"child of {parent}", parent_id=parent, parent_key="pay")
        await world.b.finish(child, "completed", b"1", now=at(1))
        equal((await world.row(f"child of {parent}")).status, "completed", "the child's status")
    equal(await world.row("driven"), claim.run, "the row of a parent that is driven")
    equal((await world.row("busy")).wake_at, None, "wake_at of a parent that waits for something else")
    equal([len(await world.b.inbox(run_id)) for run_id in ("driven", "busy", "over", "gone")], [1, 1, 0, 0], "inbox rows")
    equal((await world.dump("over"), await world.b.get("gone")), (over, None), "parents that ended or do not exist")


@promise
async def a_child_without_a_parent_key_notifies_no_parent(world: World) -> None:
    """A run with a parent but no key under which the parent knows it ends like any other, and the parent gets nothing."""
    await world.suspended("parent", waiting_for=[Awaited("child", "pay")])
    before = await world.dump("parent")
    child = await world.lease("child", parent_id="parent")
    await world.b.finish(child, "completed", b"1", now=at(1))
    equal(((await world.row("child")).status, await world.dump("parent")), ("completed", before), "the child, and its parent")


@promise
async def many_children_notify_one_parent(world: World) -> None:
    """Children that finish at once on two handles each leave one row in the parent's inbox."""
    await world.suspended("parent", waiting_for=[Awaited("child", f"key-{n:02}") for n in range(20)])
    leases = [await world.lease(f"child-{n:02}", parent_id="parent", parent_key=f"key-{n:02}") for n in range(20)]
    ends = [(world.a, world.b)[n % 2].finish(lease, "completed", b"%d" % n, now=NOW) for n, lease in enumerate(leases)]
    await asyncio.gather(*ends)
    rows = await world.a.inbox("parent")
    equal([row.seq for row in rows], list(range(1, 21)), "the seqs")
    equal(sorted(row.name for row in rows), [f"key-{n:02}" for n in range(20)], "the children")


@promise
async def a_child_has_ended_when_its_parent_is_told(world: World) -> None:
    """Whoever finds a child's row in the inbox of its parent, while `finish` is under way, finds the child ended."""
    await world.suspended("parent", waiting_for=[Awaited("child", "pay")])
    child = await world.lease("child", parent_id="parent", parent_key="pay")
    ending = asyncio.ensure_future(world.a.finish(child, "failed", b"1", now=at(1)))
    while not await world.b.inbox("parent"):  # noqa: ASYNC110 - another handle has nothing to wait for
        await asyncio.sleep(0)
    row = await world.b.get("child")
    holds(row is not None and row.ended, "the child that its parent was told of has ended")
    await ending
    equal((await world.row("child")).status, "failed", "the child's status")


@promise
async def a_parent_may_wait_for_a_thousand_children(world: World) -> None:
    """A thousand long names can be waited for; the end of any of these children wakes the parent."""
    names = [f"child number {n:04} of a thousand, which all have names of some length: {'x' * 40}" for n in range(1000)]
    await world.suspended("parent", waiting_for=[Awaited("child", name) for name in names])
    equal({awaited.name for awaited in (await world.row("parent")).waiting_for}, set(names), "what it waits for")
    last = await world.lease("last child", parent_id="parent", parent_key=names[-1])
    await world.b.finish(last, "completed", b"1", now=at(1))
    equal((await world.row("parent")).wake_at, at(1), "wake_at after the end of the last of these children")


@promise
async def a_failed_run_can_be_reopened(world: World) -> None:
    """A failed, cancelled or dead run becomes pending and due, under a new epoch, with no attempts, outcome or cancel request."""
    for status in REOPENABLE:
        lease = await world.lease(status)
        await world.a.record(lease, [entry(1), entry(3)], now=NOW)
        await world.a.cancel(status, now=NOW)
        await world.a.finish(lease, status, b"1", now=NOW)
        await world.b.reopen(status, ["step-3", "step-1"], now=at(1))
        row = await world.row(status)
        equal((row.status, row.wake_at, row.attempts, row.outcome), ("pending", at(1), 0, None), "the row")
        equal(row.cancel_requested, False, "cancel_requested")
        holds(row.epoch > lease.epoch, "the epoch is a new one")
        expected = [entry(1), entry(3), drop_entry(4, ["step-1", "step-3"], at(1), row.epoch)]
        equal(await world.b.journal(status), expected, "the journal: one drop entry more, nothing changed")
        claim = await world.take(status, now=at(1))
        equal((claim.run.attempts, claim.journal), (1, expected), "attempts and journal in the next claim")


@promise
async def reopening_keeps_the_inbox(world: World) -> None:
    """`reopen` changes no other row: signals that were not consumed are there for the next attempt."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.finish(lease, "failed", b"1", now=NOW)
    await world.a.reopen("run", [], now=NOW)
    equal([line.phase for line in await world.b.journal("run")], ["drop"], "the journal")
    holds((await world.row()).epoch > lease.epoch, "the epoch is a new one, also in the same microsecond")
    equal([row.name for row in (await world.take(now=NOW)).inbox], ["go"], "the inbox")


@promise
async def only_an_unsuccessful_end_can_be_reopened(world: World) -> None:
    """`reopen` raises `RunFinished` for a completed run, `LeaseHeld` for one that has not ended, `RunNotFound` for none."""
    await world.ended("completed")
    await world.a.create(new_run("pending"), now=NOW)
    await world.lease("running")
    await world.suspended("suspended")
    names = ("completed", "pending", "running", "suspended")
    before = await world.dump(*names)
    for run_id in names:
        error = RunFinished(run_id, run_id) if run_id == "completed" else LeaseHeld.by_attempt(run_id, run_id)
        with refused(error, f"reopen of a {run_id} run"):
            await world.b.reopen(run_id, [], now=EXPIRED)
    with refused(RunNotFound("unknown"), "reopen of an unknown run"):
        await world.b.reopen("unknown", [], now=NOW)
    equal(await world.dump(*names), before, "the runs")


@promise
async def a_reopened_child_notifies_its_parent_again(world: World) -> None:
    """When a reopened child ends once more, its parent gets the new outcome too."""
    await world.suspended("parent", waiting_for=[Awaited("child", "pay")])
    await world.ended("child", "failed", parent_id="parent", parent_key="pay")
    await world.a.reopen("child", [], now=at(1))
    equal((await world.row("child")).parent_notified, False, "parent_notified of a reopened child")
    claim = await world.take("child", now=at(1))
    await world.b.finish(claim.lease, "completed", b"2", now=at(2))
    equal([row.payload for row in await world.a.inbox("parent")], [b'"outcome"', b"2"], "the parent's inbox")


@promise
async def one_of_many_reopens_a_run(world: World) -> None:
    """When many reopen a run at once, one does and leaves one drop entry; the others get `LeaseHeld`."""
    await world.ended("run", "failed")
    calls = [store.reopen("run", [], now=at(1)) for store in (world.a, world.b) * 5]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    equal(sum(answer is None for answer in answers), 1, "how many reopened it")
    equal(sum(isinstance(answer, LeaseHeld) for answer in answers), 9, "how many got LeaseHeld")
    equal(len(await world.a.journal("run")), 1, "the number of drop entries")


@promise
async def cancel_makes_an_unheld_run_due(world: World) -> None:
    """`cancel` marks the run and makes it due unless it is leased, so that a worker can end it; repeating it changes nothing."""
    await world.suspended("asleep", waiting_for=signals("go"))
    await world.a.create(new_run("later", start_at=at(500)), now=NOW)
    for run_id in ("asleep", "later"):
        await world.b.cancel(run_id, now=at(1))
        first = await world.row(run_id)
        equal((first.cancel_requested, first.wake_at), (True, at(1)), "cancel_requested and wake_at")
        await world.b.cancel(run_id, now=at(2))
        equal(await world.row(run_id), first, "the row after a second cancel")
        equal((await world.take(run_id, now=at(2))).run.cancel_requested, True, "cancel_requested in the claim")


@promise
async def cancel_leaves_the_lease_of_a_driven_run(world: World) -> None:
    """Cancelling a run that is driven only sets the request, which its holder learns with its next reply."""
    claim = await world.start()
    await world.b.cancel("run", now=at(1))
    equal(await world.row(), msgspec.structs.replace(claim.run, cancel_requested=True), "the row")
    equal((await world.a.record(claim.lease, now=at(1))).cancel_requested, True, "the pulse")


@promise
async def an_ended_run_cannot_be_cancelled(world: World) -> None:
    """`cancel` raises `RunFinished` for an ended run and `RunNotFound` for an unknown one."""
    for status in ENDS:
        await world.ended(status, status)
        with refused(RunFinished(status, status), f"cancel of a {status} run"):
            await world.b.cancel(status, now=NOW)
        equal((await world.row(status)).cancel_requested, False, "cancel_requested")
    with refused(RunNotFound("unknown"), "cancel of an unknown run"):
        await world.b.cancel("unknown", now=NOW)
