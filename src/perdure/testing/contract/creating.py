"""Creating: one run per id, whoever asks and however often."""

from __future__ import annotations

import asyncio

import msgspec

from perdure.errors import RunConflict
from perdure.store import Created, NewRun
from perdure.testing.contract.cases import promise
from perdure.testing.contract.checks import equal, holds, refused
from perdure.testing.contract.world import EXPIRED, NOW, TTL, World, at, claimed_ids, new_run

FULL = NewRun(
    id="full",
    workflow="flow",
    input=b"\x00\xff[1]",
    input_hash=b"\x00\x01",
    seed=b"\xfe\x00",
    definition_hash="d1",
    metadata=b'{"who": "ada"}',
    queue="mail",
    priority=-3,
    limit_key="tenant-1",
    start_at=at(60),
    deadline=at(3600),
    parent_id="parent",
    parent_key="child-1",
)


@promise
async def a_run_is_there_as_it_was_created(world: World) -> None:
    """Every field given to `create` is in the row, which is pending and unleased."""
    await world.a.create(FULL, now=NOW)
    row = await world.row("full")
    columns = {name: getattr(row, name) for name in msgspec.structs.asdict(FULL)}
    equal(columns, msgspec.structs.asdict(FULL), "the row's columns")
    equal((row.status, row.epoch, row.attempts, row.held), ("pending", 0, 0, False), "status, epoch, attempts and held")
    equal((row.lease_until, row.outcome, row.progress), (None, None, None), "lease, outcome and progress")
    equal((row.created_at, row.updated_at), (NOW, NOW), "created_at and updated_at")


@promise
async def a_run_is_due_at_once_or_at_its_start(world: World) -> None:
    """A new run is due when it was created, or at its `start_at`."""
    await world.a.create(new_run("soon"), now=NOW)
    await world.a.create(new_run("later", start_at=at(60)), now=NOW)
    equal(((await world.row("soon")).wake_at, (await world.row("later")).wake_at), (NOW, at(60)), "wake_at")
    equal(await claimed_ids(world.b, now=at(59)), ["soon"], "claimed before start_at")
    holds("later" in await claimed_ids(world.b, now=at(60)), "it can be claimed at start_at")


@promise
async def a_run_created_with_ttl_is_leased_at_once(world: World) -> None:
    """With `ttl` the creator holds the lease, whatever `start_at` says, and it counts as the first attempt."""
    created = await world.a.create(new_run(start_at=at(60)), ttl=TTL, now=NOW)
    claim = created.claim
    if claim is None:
        raise AssertionError("create(ttl=) gives a claim")
    equal((created.run.status, created.run.attempts, created.run.lease_until), ("running", 1, at(TTL)), "status, attempts, lease")
    equal((claim.lease.run_id, claim.lease.epoch, claim.lease.until), ("run", created.run.epoch, at(TTL)), "the lease")
    equal((claim.journal, claim.inbox, claim.inbox_seq, claim.item_counts), ([], [], 0, {}), "what was recorded so far")
    equal((claim.run, await world.row()), (created.run, created.run), "the row in the claim and in the database")
    equal(await claimed_ids(world.b, now=at(1)), [], "what others can claim")


@promise
async def the_same_start_again_gives_the_run_that_is_there(world: World) -> None:
    """The same id, workflow and input hash give the existing run, unchanged and unclaimed, also with `ttl` and after its end."""
    first = await world.a.create(new_run(), now=NOW)
    again = await world.b.create(new_run(priority=5, seed=b"other"), ttl=TTL, now=at(1))
    equal((again.is_new, again.claim, again.run), (False, None, first.run), "what the second create() gave")
    equal(await world.row(), first.run, "the row")
    await world.ended("over")
    over = await world.b.create(new_run("over"), ttl=TTL, now=at(1))
    equal((over.is_new, over.claim, over.run.status), (False, None, "completed"), "create() for a run that has ended")


@promise
async def another_input_under_the_same_id_is_a_conflict(world: World) -> None:
    """Another input hash or another workflow under a known id raises `RunConflict` and changes nothing."""
    await world.a.create(new_run(), now=NOW)
    before = await world.dump("run")
    for other in (new_run(input_hash=b"else"), new_run(workflow="other"), new_run(input_hash=b"")):
        with refused(RunConflict, "another start under the same id"):
            await world.b.create(other, ttl=TTL, now=at(1))
    equal(await world.dump("run"), before, "the run")


@promise
async def many_creators_make_one_run(world: World) -> None:
    """When many create the same run at once, one of them made it and the others found it."""
    calls = [store.create(new_run(), ttl=TTL, now=NOW) for store in (world.a, world.b) * 10]
    created: list[Created] = await asyncio.gather(*calls)
    equal(sorted(answer.is_new for answer in created), [False] * 19 + [True], "who made the run")
    equal([answer.claim is not None for answer in created], [answer.is_new for answer in created], "who got the lease")
    holds(await world.a.count() == 1, "there is one run")


@promise
async def many_creators_with_different_inputs_make_one_run(world: World) -> None:
    """When many create one id with different inputs at once, one wins and the others get `RunConflict`."""
    calls = [store.create(new_run(input_hash=b"%d" % n), now=NOW) for n in range(10) for store in (world.a, world.b)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    accepted = [answer for answer in answers if isinstance(answer, Created)]
    equal(sum(answer.is_new for answer in accepted), 1, "how many made the run")
    equal({answer.run.input_hash for answer in accepted}, {(await world.row()).input_hash}, "the input that was accepted")
    equal(len(answers) - len(accepted), sum(isinstance(answer, RunConflict) for answer in answers), "conflicts")


@promise
async def a_deleted_run_leaves_nothing(world: World) -> None:
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
