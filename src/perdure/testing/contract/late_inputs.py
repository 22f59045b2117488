"""Late inputs: a run may be restored without its input, and waits for a `create` that brings it."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.errors import RunConflict
from perdure.model.records import Awaited, Created, NewRun, RunRow
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.creating import FIRST, FULL
from perdure.testing.contract.restoring import INBOX
from perdure.testing.contract.world import (
    NOW,
    TTL,
    FullWorld,
    at,
    claimed_ids,
    entry,
    equal,
    new_run,
    outcomes,
    refused,
    run_row,
    signals,
)


def lacking(run_id: str = "run", **columns: Any) -> RunRow:
    """A row without its input."""
    return run_row(run_id, **{"input": b"", "input_hash": b"", **columns})


@promise_with("operators")
async def a_run_that_lacks_its_input_is_given_to_no_worker(world: FullWorld) -> None:
    """Restored without its input a run that has not ended is pending and never due, whatever is asked of it."""
    waiting = tuple(signals("go"))
    for status in ("pending", "running", "suspended"):
        await world.a.restore(lacking(status, status=status, wake_at=at(-5), waiting_for=waiting), [entry(1)], now=NOW)
    await world.a.restore(lacking("failed", status="failed", outcome=b"1"), [entry(1)], now=NOW)
    await world.b.reopen("failed", [], now=NOW)
    await world.b.cancel("pending", now=NOW)
    await world.b.signal("suspended", "go", b"1", now=NOW)
    await world.b.hold("running")
    await world.b.unhold("running")
    for run_id in ("pending", "running", "suspended", "failed"):
        row = await world.row(run_id)
        equal((row.status, row.wake_at, row.waiting_for), ("pending", None, ()), f"status, wake_at and waits of {run_id!r}")
        for due_only in (True, False):
            equal(await world.b.acquire(run_id, TTL, due_only=due_only, now=at(10**6)), None, f"acquire of {run_id!r}")
    equal((await claimed_ids(world.b, now=at(10**6)), list(await world.b.due(now=at(10**6)))), ([], []), "claimed and due")
    equal((await world.b.claim(9, TTL, [("flow", 1)], now=at(-99))).next_wake_at, None, "next_wake_at")


@promise_with("operators")
async def the_first_create_brings_a_restored_run_its_input(world: FullWorld) -> None:
    """The run takes input, queue, priority, start and deadline from the new one, keeps all else, and is due; unclaimed."""
    own = {"seed": b"own", "metadata": b'{"own": 1}', "progress": b"half", "definition_hash": "old", "start_at": at(9)}
    await world.a.restore(lacking("full", version=0, **own), [entry(1), FIRST], INBOX, now=NOW)
    before = await world.row("full")
    created = await world.b.create(FULL, ttl=TTL, entries=[entry(2)], created_at=at(-1), now=at(1))
    equal((created.is_new, created.claim), (False, None), "what create() says")
    row = await world.row("full")
    kept = (
        "seed", "metadata", "progress", "created_at", "epoch", "attempts", "held", "status",
        "generation", "continued_at",
    )  # fmt: skip
    equal({name: getattr(row, name) for name in kept}, {name: getattr(before, name) for name in kept}, "what is kept")
    taken = [name for name in msgspec.structs.asdict(FULL) if name not in kept]
    equal({name: getattr(row, name) for name in taken}, {name: getattr(FULL, name) for name in taken}, "what is taken")
    equal((row, row.wake_at, row.updated_at), (created.run, FULL.start_at, at(1)), "the row, wake_at and updated_at")
    equal((await world.b.journal("full"), await world.b.inbox("full")), ([entry(1), FIRST], list(INBOX)), "journal and inbox")
    equal(await claimed_ids(world.b, now=at(59), version=FULL.version), [], "claimed before start_at")
    claimed = await claimed_ids(world.b, now=at(60), version=FULL.version, queues=["mail"])
    equal(claimed, ["full"], "claimed at start_at, from its new queue")


@promise_with("operators")
async def a_run_with_its_input_is_due_at_once(world: FullWorld) -> None:
    """Without `start_at` a run that got its input is due now; so is one that was cancelled meanwhile, whatever `start_at`."""
    for run_id in ("plain", "cancelled"):
        await world.a.restore(lacking(run_id, start_at=at(99)), [entry(1)], now=NOW)
    await world.b.cancel("cancelled", now=NOW)
    await world.a.create(new_run("plain"), now=at(1))
    await world.a.create(new_run("cancelled", start_at=at(500)), now=at(2))
    equal(list(await world.b.due(now=at(2))), ["plain", "cancelled"], "what is due")
    claims = (await world.b.claim(9, TTL, [("flow", 1)], now=at(2))).claims
    equal([(claim.run.input, claim.journal) for claim in claims], [(b"[]", [entry(1)])] * 2, "input and journal in the claims")
    equal([claim.run.cancel_requested for claim in claims], [False, True], "cancel_requested in the claims")


@promise_with("operators")
async def a_restored_run_takes_the_input_of_its_own_workflow(world: FullWorld) -> None:
    """Another workflow's `create` is a conflict and changes nothing; a run whose workflow is not known takes any."""
    await world.a.restore(lacking("known"), [], now=NOW)
    await world.a.restore(lacking("unknown", workflow=""), [], now=NOW)
    before = await world.dump("known")
    for name in ("other", "FLOW", "flow "):
        with refused(RunConflict("known", "another workflow ('flow')"), "the input of another workflow"):
            await world.b.create(new_run("known", workflow=name), ttl=TTL, now=at(1))
    equal(await world.dump("known"), before, "everything of the run")
    created = await world.b.create(new_run("unknown", workflow="other"), now=at(1))
    equal((created.is_new, created.run.workflow), (False, "other"), "the run whose workflow was not known")
    equal(
        [await world.b.count(RunFilter(workflow=name)) for name in ("", "other")], [0, 1], "how many there are of each workflow"
    )
    equal(await claimed_ids(world.b, now=at(1), workflows=["other"]), ["unknown"], "what the other workflow's worker claims")


@promise_with("operators")
async def a_restored_run_takes_its_input_once(world: FullWorld) -> None:
    """Once it has its input, another one is a conflict and the same one finds the run, unchanged."""
    await world.a.restore(lacking(), [entry(1)], now=NOW)
    first = await world.b.create(new_run(), now=at(1))
    before = await world.dump("run")
    again = await world.a.create(new_run(priority=3), ttl=TTL, now=at(2))
    equal((again.is_new, again.claim, again.run), (False, None, first.run), "the same start again")
    with refused(RunConflict("run", "another input"), "another input for a run that has one"):
        await world.a.create(new_run(input_hash=b"else"), now=at(2))
    equal(await world.dump("run"), before, "everything of the run")


@promise_with("operators")
async def an_ended_run_takes_its_input_and_stays_ended(world: FullWorld) -> None:
    """A run that was restored after its end, without its input, is found with its outcome, and knows its input from then on."""
    await world.a.restore(lacking(status="completed", outcome=b'"done"'), [entry(1)], now=NOW)
    created = await world.b.create(new_run(), ttl=TTL, now=at(1))
    equal((created.run.status, created.run.outcome, created.claim), ("completed", b'"done"', None), "what create() gave")
    row = await world.row()
    equal((row.input_hash, row.wake_at, row.status), (b"hash", None, "completed"), "the row")
    equal((await claimed_ids(world.b, now=at(10**6)), list(await world.b.due(now=at(10**6)))), ([], []), "claimed and due")
    with refused(RunConflict("run", "another input"), "another input for an ended run that has one"):
        await world.a.create(new_run(input_hash=b"else"), now=at(2))


@promise_with("operators")
async def a_parent_can_bring_a_restored_child_its_input(world: FullWorld) -> None:
    """A run restored without a parent takes that of the `create` which brings its input; one that has a parent keeps it."""
    child: dict[str, Any] = {"parent_id": "parent", "parent_key": "pay"}
    await world.suspended("parent", waiting_for=[Awaited("child", "pay")])
    await world.a.restore(lacking("orphan"), [], now=NOW)
    await world.a.restore(lacking("kept", parent_id="other", parent_key="key"), [], now=NOW)
    for run_id in ("orphan", "kept"):
        await world.a.create(new_run(run_id, **child), now=NOW)
    row = await world.row("kept")
    equal((row.parent_id, row.parent_key), ("other", "key"), "the parent of a run that had one")
    await world.b.finish((await world.take("orphan", now=NOW)).lease, "completed", b"1", now=at(1))
    equal([row.payload for row in await world.a.inbox("parent")], [b"1"], "the parent's inbox")


@promise_with("operators")
async def many_inputs_for_one_restored_run(world: FullWorld) -> None:
    """When many bring different inputs at once, the run takes one of them and the others get `RunConflict`."""
    await world.a.restore(lacking(), [entry(1)], now=NOW)
    inputs: list[NewRun] = [new_run(input=b"%d" % n, input_hash=b"hash %d" % n) for n in range(10)]
    answers = await outcomes(store.create(new, ttl=TTL, now=at(1)) for new in inputs for store in (world.a, world.b))
    accepted = [answer for answer in answers if isinstance(answer, Created)]
    row = await world.row()
    equal([(answer.is_new, answer.claim, answer.run) for answer in accepted], [(False, None, row)] * 2, "what was accepted")
    equal(row.input_hash, b"hash " + row.input, "input and hash")
    equal(sum(isinstance(answer, RunConflict) for answer in answers), 18, "how many got RunConflict")
    equal((await world.take(now=at(1))).journal, [entry(1)], "the journal")
