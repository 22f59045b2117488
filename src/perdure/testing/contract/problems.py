"""Problems: a run that its worker cannot drive on is given back with the reason, and waits a while before it is tried again."""

from __future__ import annotations

from typing import Final

from perdure.model.records import Claim, RunRow
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.cases import promise, promise_with
from perdure.testing.contract.world import (
    NOW,
    TTL,
    FullWorld,
    World,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    new_run,
    run_row,
)

PROBLEM: Final = "step 'charge' is recorded and the code no longer asks for it"


def _problem_of(row: RunRow) -> tuple[str | None, int | None, int]:
    return row.problem, row.problem_at, row.problem_count


async def _misfit(world: World, run_id: str = "run", *, wake_at: int, now: int = NOW) -> Claim:
    """A new run that was given back with a problem; its claim."""
    claim = await world.start(run_id, now=now)
    await world.a.release(claim.lease, wake_at=wake_at, problem=PROBLEM, now=now)
    return claim


@promise
async def a_run_with_a_problem_is_pending_until_its_next_try(world: World) -> None:
    """`release` with `wake_at` and `problem` keeps the reason and its time, counts it but no attempt, and is due at `wake_at`."""
    await _misfit(world, wake_at=at(60), now=at(1))
    row = await world.row()
    equal((row.status, row.wake_at, row.lease_until, row.lease_owner), ("pending", at(60), None, None), "the row")
    equal((*_problem_of(row), row.attempts, row.updated_at), (PROBLEM, at(1), 1, 0, at(1)), "its problem, attempts, updated_at")
    equal(await claimed_ids(world.b, now=at(60) - 1), [], "what can be claimed before its next try")
    equal((await world.b.claim(1, TTL, [("flow", 1)], now=at(2))).next_wake_at, at(60), "next_wake_at")
    equal(await world.b.acquire("run", TTL, now=at(60) - 1), None, "acquire before its next try")
    equal(await claimed_ids(world.b, now=at(60)), ["run"], "what can be claimed then")


@promise
async def a_list_shows_problems(world: World) -> None:
    """A line of `list` has the run's problem, or None."""
    await _misfit(world, "stuck", wake_at=at(60), now=at(1))
    await world.a.create(new_run("fine"), now=NOW)
    expected = [("stuck", PROBLEM), ("fine", None)]
    equal([(line.id, line.problem) for line in await world.b.list()], expected, "the lines of all")
    equal([(line.id, line.problem) for line in await world.b.list(RunFilter(prefix="s"))], expected[:1], "the lines of a prefix")
    equal(
        [(line.id, line.problem) for line in await world.b.list(RunFilter(status=("pending",), workflow="flow"))],
        expected,
        "of a workflow",
    )


@promise
async def problems_in_a_row_are_counted(world: World) -> None:
    """`claim`, `acquire`, `renew` and `record` keep problem and count; the next problem replaces the text and is counted too."""
    await _misfit(world, wake_at=at(5))
    second = await world.take(now=at(5))
    equal((_problem_of(second.run), second.run), ((PROBLEM, NOW, 1), await world.row()), "the problem of the acquired run")
    await world.a.record(second.lease, [entry(1)], now=at(6))
    await world.a.renew([second.lease], TTL, now=at(6))
    equal(_problem_of(await world.row()), (PROBLEM, NOW, 1), "the problem after record and renew")
    await world.b.release(second.lease, wake_at=at(20), problem="another", now=at(7))
    (third,) = (await world.b.claim(1, TTL, [("flow", 1)], now=at(20))).claims
    equal(_problem_of(third.run), ("another", at(7), 2), "the problem of the claimed run")
    await world.a.release(third.lease, wake_at=at(50), problem="a third", now=at(21))
    equal(_problem_of(await world.row()), ("a third", at(21), 3), "the problem after the third release")


@promise
async def problems_count_no_attempts(world: World) -> None:
    """However often a run is given back with a problem, its next claim is the first attempt."""
    await world.a.create(new_run(), now=NOW)
    for n in range(12):
        claim = await world.take(now=at(n))
        equal(claim.run.attempts, 1, f"attempts at claim {n + 1}")
        await world.a.release(claim.lease, wake_at=at(n + 1), problem=PROBLEM, now=at(n))
    equal((await world.row()).problem_count, 12, "problem_count")


@promise
async def a_failed_attempt_counts_when_it_is_released(world: World) -> None:
    """`release` with `counts_attempt` keeps the attempt that the claim counted, with or without a problem."""
    first = await world.start()
    await world.a.release(first.lease, wake_at=at(10), counts_attempt=True, now=NOW)
    row = await world.row()
    equal((row.status, row.wake_at, row.attempts, *_problem_of(row)), ("pending", at(10), 1, None, None, 0), "the row")
    second = await world.take(now=at(10))
    equal(second.run.attempts, 2, "attempts at the second claim")
    await world.b.release(second.lease, wake_at=at(20), problem=PROBLEM, counts_attempt=True, now=at(10))
    row = await world.row()
    equal((row.attempts, *_problem_of(row)), (2, PROBLEM, at(10), 1), "attempts and problem after the second")


@promise
async def a_run_that_goes_on_has_no_problem(world: World) -> None:
    """`suspend`, `finish` and a `release` without a problem clear it and its count, and a reopened run has none."""
    for n, run_id in enumerate(("suspended", "failed", "drained")):
        await _misfit(world, run_id, wake_at=at(n))
    await world.a.suspend((await world.take("suspended", now=at(5))).lease, wake_at=at(500), now=at(5))
    failed = await world.take("failed", now=at(5))
    await world.a.finish(failed.lease, "failed", b"1", now=at(5))
    await world.a.release((await world.take("drained", now=at(5))).lease, now=at(5))
    for run_id in ("suspended", "failed", "drained"):
        equal(_problem_of(await world.row(run_id)), (None, None, 0), f"the problem of the {run_id} run")
    equal({line.problem for line in await world.b.list()}, {None}, "the problems in the list")
    await world.a.reopen("failed", [], now=at(6))
    equal(_problem_of(await world.row("failed")), (None, None, 0), "the problem of the reopened run")
    row = await world.row("drained")
    equal((row.status, row.wake_at, row.attempts), ("pending", at(5), 0), "the drained run")


@promise
async def an_end_that_notifies_a_parent_clears_only_its_own_problem(world: World) -> None:
    """An end that notifies a parent clears the child's problem too, and leaves the problem of the parent as it is."""
    await _misfit(world, "parent", wake_at=at(60))
    await world.start("child", parent_id="parent", parent_key="pay")
    taken = await world.take("child", now=at(20))
    await world.a.release(taken.lease, wake_at=at(20), problem=PROBLEM, now=at(20))
    taken = await world.take("child", now=at(20))
    await world.a.finish(taken.lease, "completed", b"1", now=at(20))
    equal(_problem_of(await world.row("child")), (None, None, 0), "the problem of the child")
    parent = await world.row("parent")
    equal((_problem_of(parent), parent.wake_at), ((PROBLEM, NOW, 1), at(60)), "the problem of the parent, and its next try")


@promise
async def a_signal_or_a_cancel_makes_a_run_with_a_problem_due(world: World) -> None:
    """`signal`, whatever its name, and `cancel` make a pending run with a problem due at once; other pending runs wait on."""
    for run_id in ("signalled", "cancelled"):
        await _misfit(world, run_id, wake_at=at(60))
    await world.b.signal("signalled", "hello", b"1", dedupe="d", now=at(5))
    await world.b.cancel("cancelled", now=at(6))
    await world.a.create(new_run("later", start_at=at(60)), now=NOW)
    drained = await world.lease("drained")
    await world.a.release(drained, wake_at=at(60), now=NOW)
    for run_id in ("later", "drained"):
        await world.b.signal(run_id, "hello", b"1", now=at(5))
        equal((await world.row(run_id)).wake_at, at(60), f"wake_at of the {run_id} run after a signal")
    equal([(await world.row(run_id)).wake_at for run_id in ("signalled", "cancelled")], [at(5), at(6)], "their wake_at")
    equal(_problem_of(await world.row("signalled")), (PROBLEM, NOW, 1), "the problem after the signal")
    equal(await claimed_ids(world.b, now=at(6)), ["signalled", "cancelled"], "what can be claimed")


@promise
async def a_run_that_does_not_fit_is_not_tried_without_a_pause(world: World) -> None:
    """A cancel request or a signal that came before the release does not shorten the pause."""
    lease = await world.lease()
    await world.b.signal("run", "go", b"1", now=at(1))
    await world.b.cancel("run", now=at(1))
    await world.a.release(lease, wake_at=at(60), problem=PROBLEM, now=at(2))
    row = await world.row()
    equal((row.wake_at, row.cancel_requested), (at(60), True), "wake_at and cancel_requested")
    await world.b.signal("run", "go", b"2", now=at(70))
    equal((await world.row()).wake_at, at(60), "wake_at of a run that is due already, after another signal")


@promise
async def any_text_is_a_problem(world: World) -> None:
    """A problem comes back as it was given, whatever characters it has."""
    texts = ["$status", "'; DROP TABLE runs; --", "Grüße\n\t\"quoted\" \\ {'a': 1}", "ß" * 4000, "\U0001f600 \x01\x7f", " "]
    for n, text in enumerate(texts):
        lease = await world.lease(f"run-{n}")
        await world.a.release(lease, wake_at=at(60), problem=text, now=NOW)
    equal([(await world.row(f"run-{n}")).problem for n in range(len(texts))], texts, "the problems")
    equal(sorted(line.problem or "" for line in await world.b.list()), sorted(texts), "the problems in the list")


@promise_with("operators")
async def unhold_makes_a_run_with_a_problem_due(world: FullWorld) -> None:
    """`unhold` makes a pending run with a problem due at once; a run that is due already or waits otherwise stays as it is."""
    await _misfit(world, "stuck", wake_at=at(60))
    await _misfit(world, "due", wake_at=at(1))
    await world.a.create(new_run("later", start_at=at(60)), now=NOW)
    for run_id in ("stuck", "due", "later"):
        await world.b.hold(run_id)
        await world.b.unhold(run_id, now=at(5))
    wake_ats = [(await world.row(run_id)).wake_at for run_id in ("stuck", "due", "later")]
    equal(wake_ats, [at(5), at(1), at(60)], "wake_at of the runs")
    equal(_problem_of(await world.row("stuck")), (PROBLEM, NOW, 1), "the problem after unhold")


@promise_with("operators")
async def a_restored_run_keeps_its_problem(world: FullWorld) -> None:
    """`restore` keeps the problem of a pending run with its next try; one that is suspended or has ended has none."""
    columns = {"problem": PROBLEM, "problem_at": at(-9), "problem_count": 3}
    await world.a.restore(run_row("pending", wake_at=at(60), **columns), [], now=NOW)
    row = await world.row("pending")
    equal((_problem_of(row), row.wake_at), ((PROBLEM, at(-9), 3), at(60)), "the problem and the next try")
    claim = await world.take("pending", now=at(60))
    await world.a.release(claim.lease, wake_at=at(99), problem=PROBLEM, now=at(60))
    equal((await world.row("pending")).problem_count, 4, "problem_count after the next problem")
    await world.a.restore(run_row("asleep", status="suspended", **columns), [], now=NOW)
    await world.a.restore(run_row("over", status="failed", outcome=b"1", **columns), [], now=NOW)
    for run_id in ("asleep", "over"):
        holds((await world.row(run_id)).problem is None, f"the {run_id} run has no problem")
