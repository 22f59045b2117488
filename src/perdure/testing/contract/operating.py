"""Operators: hold a run, delete it, purge old ones, count them, and see which are due."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.errors import LeaseHeld, RunNotFound
from perdure.model.records import WorkerRow
from perdure.model.run_filter import RunFilter
from perdure.store import require
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.inbox import ENDS
from perdure.testing.contract.listing import HIGHEST, WILDCARDS, create_different_runs, while_runs_change
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    STAGGER,
    TTL,
    FullWorld,
    after,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    new_run,
    outcomes,
    refused,
)


@promise_with("operators")
async def a_held_run_waits_for_its_operator(world: FullWorld) -> None:
    """A run on hold is neither claimed nor acquired nor due until `unhold`; then it is as due as before."""
    await world.a.create(new_run(), now=NOW)
    await world.b.hold("run")
    await world.b.hold("run")
    equal((await claimed_ids(world.a, now=at(1)), list(await world.a.due(now=at(1)))), ([], []), "claimed and due while held")
    with refused(LeaseHeld.by_operator("run"), "acquire of a held run"):
        await world.a.acquire("run", TTL, due_only=False, now=at(1))
    equal((await world.a.claim(1, TTL, [("flow", 1)], now=at(-1))).next_wake_at, None, "next_wake_at while held")
    await world.b.unhold("run")
    equal((await world.row()).held, False, "held after unhold")
    equal(await claimed_ids(world.a, now=at(1)), ["run"], "claimed after unhold")


@promise_with("operators")
async def a_hold_does_not_stop_the_present_holder(world: FullWorld) -> None:
    """The holder of a run that is put on hold goes on writing and renewing; the next one has to wait."""
    lease = await world.lease()
    await world.b.hold("run")
    await world.a.record(lease, [entry(1)], now=at(1))
    holds((await world.a.renew([lease], TTL, now=at(1)))[0] is not None, "the lease of a held run can be renewed")
    await world.b.signal("run", "go", b"1", now=at(1))
    await world.a.release(lease, now=at(2))
    equal(((await world.row()).held, await claimed_ids(world.b, now=at(2))), (True, []), "held, and claimed, after release")


@promise_with("operators")
async def a_hold_touches_only_its_own_column(world: FullWorld) -> None:
    """`hold` and `unhold` change nothing of the run but whether it is on hold, and leave `updated_at` as it is."""
    claim = await world.start()
    await world.b.hold("run")
    equal(await world.row(), msgspec.structs.replace(claim.run, held=True), "the row on hold")
    await world.b.unhold("run")
    equal(await world.row(), claim.run, "the row after unhold")
    await world.a.finish(claim.lease, "completed", b"1", now=at(1))
    equal((await world.row()).status, "completed", "the status")


@promise_with("operators")
async def held_runs_delay_no_others(world: FullWorld) -> None:
    """Runs on hold are passed over, however many are due before."""

    async def in_the_way(n: int) -> None:
        await world.a.create(new_run(f"held-{n}", priority=9), now=NOW)
        await world.a.hold(f"held-{n}")

    await asyncio.gather(*map(in_the_way, range(40)))
    await world.a.create(new_run("ready"), now=at(1))
    equal(await claimed_ids(world.b, 1, now=at(1)), ["ready"], "what is claimed")


@promise_with("operators")
async def only_a_known_run_can_be_held(world: FullWorld) -> None:
    """`hold` and `unhold` raise `RunNotFound` for an unknown run."""
    with refused(RunNotFound("unknown"), "hold of an unknown run"):
        await world.a.hold("unknown")
    with refused(RunNotFound("unknown"), "unhold of an unknown run"):
        await world.a.unhold("unknown")
    equal(await world.a.get("unknown"), None, "the unknown run")


@promise_with("operators")
async def a_worker_is_kept_with_its_last_sign_of_life(world: FullWorld) -> None:
    """`put_worker` inserts or replaces by id and notes the instant, `workers` are by id, `drop_worker` may be repeated."""
    for worker_id in NAMES:
        await world.a.put_worker(worker_id, b"old", now=NOW)
    await world.b.put_worker("b", b"\x00\xff", now=at(5))
    await world.a.put_worker("a", b"", now=at(6))
    others = [WorkerRow(id=worker_id, seen_at=NOW, info=b"old") for worker_id in NAMES]
    both = [WorkerRow(id="b", seen_at=at(5), info=b"\x00\xff"), WorkerRow(id="a", seen_at=at(6), info=b"")]
    expected = sorted([*others, *both], key=lambda worker: worker.id.encode())
    equal(list(await world.b.workers()), expected, "the workers")
    for worker_id in (*NAMES, "a", "a", "never"):
        await world.b.drop_worker(worker_id)
    equal([worker.id for worker in await world.a.workers()], ["b"], "the workers that were not dropped")


@promise_with("operators")
async def a_worker_is_seen_by_the_clock_of_the_store(world: FullWorld) -> None:
    """Without `now` the sign of life has the time that a claim gives, also when it is repeated."""
    before = (await world.a.claim(0, TTL, [])).now
    for _ in range(2):
        await world.a.put_worker("worker", b"{}")
        (worker,) = await world.b.workers()
        after = (await world.a.claim(0, TTL, [])).now
        holds(before <= worker.seen_at <= after, f"seen at {worker.seen_at}, between {before} and {after}")
        before = after


@promise_with("operators")
async def a_deleted_run_leaves_nothing(world: FullWorld) -> None:
    """`delete` removes row, journal, inbox and items, takes the lease away, and is no error for a run that is not there."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", dedupe="d", now=NOW)
    await world.b.delete("run")
    await world.b.delete("run")
    await world.a.delete("never")
    equal((await world.a.get("run"), await world.a.journal("run"), await world.a.inbox("run")), (None, [], []), "what is left")
    equal((await claimed_ids(world.a, now=EXPIRED), list(await world.a.due(now=EXPIRED))), ([], []), "what is claimed and due")
    fresh = await world.a.create(new_run(input_hash=b"new"), ttl=TTL, now=at(1))
    holds(fresh.is_new and fresh.claim is not None, "the id is free again")
    holds(fresh.run.epoch > lease.epoch, f"epoch {fresh.run.epoch} of the new run is above {lease.epoch} of the deleted one")
    equal(await world.a.signal("run", "go", b"1", dedupe="d", now=at(1)), 1, "the first seq of the new run's inbox")


@promise_with("operators")
async def epochs_grow_over_a_deletion(world: FullWorld) -> None:
    """A run that was deleted and created again has a higher epoch than before, though no trace of the old one is left."""
    await world.start()
    second = (await world.take(now=at(100))).lease
    await world.a.delete("run")
    third = (await world.start(now=at(200))).lease
    holds(third.epoch > second.epoch, "the epoch grows over delete and create")


@promise_with("operators")
async def purge_deletes_only_old_ended_runs(world: FullWorld) -> None:
    """`purge` deletes ended runs not changed for `older_than` seconds, says how many, and leaves every other run alone."""
    for status in ENDS:
        await world.ended(f"old {status}", status)
        await world.ended(f"new {status}", status, now=at(50))
    await world.a.create(new_run("pending"), now=NOW)
    await world.lease("running")
    await world.suspended("suspended")
    equal(await world.b.purge(100, now=at(100) - 1), 0, "purged just before they are old enough")
    equal(await world.b.purge(100, now=at(100)), 4, "purged when they are")
    equal(await world.b.purge(100, now=at(100)), 0, "purged the second time")
    left = {line.id for line in await world.a.list()}
    equal(left, {f"new {status}" for status in ENDS} | {"pending", "running", "suspended"}, "what is left")
    equal((await world.b.journal("old failed"), await world.b.inbox("old failed")), ([], []), "what is left of a purged run")


@promise_with("operators")
async def purge_takes_the_oldest_first(world: FullWorld) -> None:
    """`purge` deletes no more than `limit` runs at once, the longest unchanged first."""
    for n in (3, 1, 2, 4):
        await world.ended(f"run-{n}", now=at(n))
    equal(await world.b.purge(0, limit=2, now=at(10)), 2, "purged")
    equal(sorted(line.id for line in await world.a.list()), ["run-3", "run-4"], "what is left")


@promise_with("operators")
async def purge_takes_these_statuses_and_this_workflow(world: FullWorld) -> None:
    """`purge` deletes runs of the given statuses and workflow only, and refuses a status that is no end."""
    for status in ENDS:
        for workflow in ("orders", "mails"):
            await world.ended(f"{workflow} {status}", status, workflow=workflow)
    equal(await world.b.purge(0, status=["failed", "dead"], workflow="orders", now=at(10)), 2, "purged of one workflow")
    equal(await world.b.purge(0, workflow="order", now=at(10)), 0, "purged of a workflow whose name begins alike")
    equal(await world.b.purge(0, status=(), now=at(10)), 0, "purged of no status")
    equal(await world.b.purge(0, status=["completed"], now=at(10)), 2, "purged of one status")
    left = {line.id for line in await world.a.list()}
    equal(left, {"orders cancelled", "mails cancelled", "mails failed", "mails dead"}, "what is left")
    with refused(
        ValueError("an ended run is one of completed, failed, cancelled, dead, not 'running'"), "purge of a status that is no end"
    ):
        await world.b.purge(0, status=["running"], now=at(10))  # type: ignore[list-item]
    with refused(TypeError("status must be a collection of statuses, not 'failed'"), "purge of a status that is no collection"):
        await world.b.purge(0, status="failed", now=at(10))  # type: ignore[arg-type]
    with refused(TypeError("a workflow's name must be a str, not bytes"), "purge of a workflow whose name is no text"):
        await world.b.purge(0, workflow=b"orders", now=at(10))  # type: ignore[arg-type]
    equal(len(await world.a.list()), 4, "runs after refused calls")


@promise_with("operators")
async def purge_leaves_a_run_that_was_reopened(world: FullWorld) -> None:
    """`purge` leaves a run that was reopened, also when it has ended again and that end is not old enough."""
    for run_id in ("open", "ended again"):
        await world.ended(run_id, "failed")
        await world.a.reopen(run_id, (), now=at(50))
    lease = (await world.take("ended again", now=at(60))).lease
    await world.a.finish(lease, "failed", b"null", now=at(60))
    equal(await world.b.purge(100, now=at(100)), 0, "purged")
    equal(await world.b.purge(40, now=at(100)), 1, "purged when the second end is old enough")
    equal([line.id for line in await world.a.list()], ["open"], "what is left")


@promise_with("operators")
async def a_run_is_purged_or_reopened_but_not_both(world: FullWorld) -> None:
    """If an old run is purged while another reopens and ends it again, it is gone and the other is told, or it has a new end."""

    async def end_again(run_id: str) -> None:
        await world.b.reopen(run_id, (), now=at(100))
        lease = (await world.take(run_id, now=at(100))).lease
        await world.b.finish(lease, "failed", b"again", now=at(100))

    async def race(n: int) -> None:
        run_id = f"run-{n:02}"
        await world.ended(run_id, "failed")
        purging = after(n % STAGGER, lambda: world.a.purge(100, now=at(150)))
        purged, answer = await outcomes([purging, after(n // STAGGER, lambda: end_again(run_id))])
        row = await world.b.get(run_id)
        equal(purged, int(row is None), "how many were purged")
        if row is None:
            holds(isinstance(answer, RunNotFound), f"who reopens a run that was purged is told so, not {answer!r}")
        else:
            equal((answer, row.status, row.outcome), (None, "failed", b"again"), "a run that was not purged")

    for n in range(2 * STAGGER):
        await race(n)


@promise_with("operators")
async def purge_leaves_the_children_of_a_live_run(world: FullWorld) -> None:
    """`purge` leaves a run whose parent has not ended, which keeps no other run from being deleted."""
    await world.lease("parent")
    await world.ended("over")
    for n in range(3):
        await world.ended(f"child {n}", parent_id="parent", parent_key=f"k{n}", now=at(n))
    await world.ended("orphan", parent_id="nobody", parent_key="k", now=at(5))
    await world.ended("of one that is over", parent_id="over", parent_key="k", now=at(6))
    await world.ended("alone", now=at(7))
    equal(await world.b.purge(0, limit=2, now=at(10)), 2, "purged at first")
    equal(await world.b.purge(0, now=at(10)), 2, "purged then")
    equal({line.id for line in await world.a.list()}, {"parent", "child 0", "child 1", "child 2"}, "what is left")
    await world.a.finish((await world.take("parent", now=at(100))).lease, "completed", b"1", now=at(100))
    equal(await world.b.purge(0, now=at(100)), 4, "purged when the parent has ended")


@promise_with("operators")
async def count_has_no_limit(world: FullWorld) -> None:
    """`count` counts all runs, also more than a list would give."""
    for n in range(103):
        await world.a.create(new_run(f"run-{n}"), now=NOW)
    equal(await world.b.count(), 103, "the number of runs")


@promise_with("operators")
async def counts_can_be_narrowed(world: FullWorld) -> None:
    """`count` takes what `list` takes, and agrees with it."""
    for wanted, ids in await create_different_runs(world):
        equal(await world.b.count(wanted), len(ids), f"the number of runs with {wanted}")


@promise_with("operators")
async def a_counted_prefix_is_literal(world: FullWorld) -> None:
    """Wildcards, backslashes and case in a prefix mean themselves, up to the last code point."""
    for ids, prefixes in (WILDCARDS, HIGHEST):
        for run_id in ids:
            await world.a.create(new_run(run_id), now=NOW)
        for prefix in prefixes:
            expected = sum(run_id.startswith(prefix) for run_id in ids)
            equal(await world.b.count(RunFilter(prefix=prefix)), expected, f"the number of runs with prefix {prefix!r}")


@promise_with("operators")
async def a_run_is_counted_while_it_changes(world: FullWorld) -> None:
    """A run that is there all the time is in every count, once, also when it changes meanwhile."""

    async def look(ids: list[str]) -> None:
        equal(
            (await world.a.count(), await world.a.count(RunFilter(prefix="run-"))),
            (len(ids), len(ids)),
            "the number of runs that change",
        )

    await while_runs_change(world, look)


@promise_with("operators")
async def due_lists_what_may_be_claimed(world: FullWorld) -> None:
    """`due` gives the ids that may be claimed now, in any queue, longest due first and then by id, up to the limit."""
    await world.a.create(new_run("b", start_at=at(-1), priority=9), now=NOW)
    await world.a.create(new_run("a", start_at=at(-1), queue="mail"), now=NOW)
    await world.suspended("timer", wake_at=at(-5))
    await world.a.create(new_run("later", start_at=at(1)), now=NOW)
    await world.a.create(new_run("held", start_at=at(-9)), now=NOW)
    await world.a.hold("held")
    await world.lease("leased")
    await world.ended("over")
    equal(list(await world.b.due(now=NOW)), ["timer", "a", "b"], "what is due")
    equal(list(await world.b.due(now=NOW, limit=2)), ["timer", "a"], "what is due first")
    equal(list(await world.b.due(now=EXPIRED)), ["timer", "a", "b", "later", "leased"], "what is due when the lease has expired")


@promise_with("operators")
async def operators_name_exactly_one_run(world: FullWorld) -> None:
    """`due`, `hold` and `delete` compare ids byte for byte."""
    for name in NAMES:
        await world.a.create(new_run(name), now=NOW)
    equal(list(await world.b.due(now=NOW, limit=1000)), sorted(NAMES), "the ids that are due, in the order of their bytes")
    await world.a.hold("Order-1")
    await world.a.delete("order-1")
    equal(list(await world.b.due(now=NOW, limit=1000)), sorted(set(NAMES) - {"Order-1", "order-1"}), "the ids that are due then")
    equal({line.id for line in await world.b.list(limit=1000)}, set(NAMES) - {"order-1"}, "the ids after one was deleted")


@promise_with("operators")
async def operators_act_in_one_namespace(world: FullWorld) -> None:
    """`count`, `due` and `purge` see the runs of their own namespace, and `delete` removes no others."""
    other = require(await world.open_namespace("other"), "operators")
    await other.create(new_run(), now=NOW)
    equal((await world.a.count(), list(await world.a.due(now=NOW))), (0, []), "runs of another namespace")
    await world.ended()
    await other.delete("run")
    equal((await other.count(), await other.purge(0, now=at(1)), await world.a.count()), (0, 0, 1), "what is left")
