"""Claiming: which worker gets which run, and in which order."""

from __future__ import annotations

import asyncio

from perdure.errors import LeaseHeld, RunNotFound
from perdure.model.records import Claim, Lease
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    TTL,
    World,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    new_run,
    outcomes,
    refused,
    signals,
)


@promise
async def a_claim_brings_everything_the_driver_needs(world: World) -> None:
    """A claim has the lease, the row, the journal by seq, the unconsumed inbox, and its highest seq."""
    lease = await world.lease()
    for n in (1, 2, 3):
        await world.a.signal("run", "go", b"%d" % n, now=NOW)
    await world.a.record(lease, [entry(2), entry(1)], consume=[2, 3], now=NOW)
    claims = await world.b.claim(1, TTL, [("flow", 1)], now=EXPIRED)
    claim = claims.claims[0]
    equal(claim.journal, [entry(1), entry(2)], "the journal")
    equal([(row.seq, row.name, row.payload) for row in claim.inbox], [(1, "go", b"1")], "the unconsumed inbox")
    equal((claim.inbox_seq, claim.item_counts), (3, {}), "inbox_seq, and item_counts of a run without streams")
    equal(claim.run, await world.row(), "the row")
    equal((claim.run.status, claim.run.epoch), ("running", claim.lease.epoch), "status and epoch")
    until = EXPIRED + round(TTL * 1_000_000)
    equal((claim.lease.until, claim.run.lease_until, claim.run.wake_at), (until, until, until), "the end of the lease")


@promise
async def acquire_brings_the_same_as_claim(world: World) -> None:
    """`acquire` of one run gives the same claim as `claim` would."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.record(lease, [entry(1)], now=NOW)
    claim = await world.take()
    equal((claim.journal, claim.inbox_seq, claim.item_counts), ([entry(1)], 1, {}), "journal, inbox_seq and item_counts")
    equal([row.seq for row in claim.inbox], [1], "the inbox")
    equal((claim.run, claim.run.status, claim.run.epoch), (await world.row(), "running", claim.lease.epoch), "the row")
    equal((claim.lease.until, claim.run.wake_at), (claim.run.lease_until, claim.run.lease_until), "the end of the lease")


@promise
async def a_claim_has_the_time_of_the_store(world: World) -> None:
    """`now` of a claim is the store's time, or the one that was passed, also when nothing was claimed: when runs were leased."""
    passed = await world.a.claim(1, TTL, [("flow", 1)], now=NOW)
    equal(passed.now, NOW, "the time that was passed")
    before = (await world.a.create(new_run("first"))).run.updated_at
    claims = await world.b.claim(1, TTL, [("flow", 1)])
    nothing = await world.b.claim(0, TTL, ())
    acquired = (await world.a.create(new_run("last"), ttl=TTL)).claim
    assert acquired is not None
    equal([claim.run.updated_at for claim in claims.claims], [claims.now], "when the run was leased")
    after = acquired.run.updated_at
    holds(before <= claims.now <= nothing.now <= after, f"{before}, {claims.now}, {nothing.now} and {after} are in order")
    equal(acquired.lease.until - after, round(TTL * 1_000_000), "the length of the lease from then on")


@promise
async def priority_goes_first_then_longest_due_then_id(world: World) -> None:
    """`claim` takes the highest priority first, then the longest due, then the lowest id."""
    await world.a.create(new_run("d-late", start_at=at(-1)), now=NOW)
    await world.a.create(new_run("z-early", start_at=at(-2)), now=NOW)
    await world.a.create(new_run("b-late", start_at=at(-1)), now=NOW)
    await world.a.create(new_run("low", start_at=at(-9), priority=-1), now=NOW)
    await world.a.create(new_run("high", start_at=at(-1), priority=7), now=NOW)
    expected = ["high", "z-early", "b-late", "d-late", "low"]
    equal(await claimed_ids(world.a, 2), expected[:2], "the first two")
    equal(await claimed_ids(world.b), expected[2:], "the others")


@promise
async def no_run_is_given_to_two_callers(world: World) -> None:
    """Many workers claiming at once on two handles share the due runs out: each is given once, and none is forgotten."""
    await asyncio.gather(*(world.a.create(new_run(f"run-{n:02}"), now=NOW) for n in range(60)))

    async def work(worker: int) -> list[str]:
        store = (world.a, world.b)[worker % 2]
        mine: list[str] = []
        while got := await claimed_ids(store, 1 + worker % 3, now=at(1)):
            mine += got
        return mine

    shares = await asyncio.gather(*(work(worker) for worker in range(12)))
    equal(sorted(run_id for share in shares for run_id in share), [f"run-{n:02}" for n in range(60)], "what was given out")


@promise
async def one_of_many_acquires_one_run(world: World) -> None:
    """When many acquire the same run at once, one gets it and the others get `LeaseHeld`."""
    await world.a.create(new_run(), now=NOW)
    answers = await outcomes(store.acquire("run", TTL, now=NOW) for store in (world.a, world.b) * 8)
    equal(sum(isinstance(answer, Claim) for answer in answers), 1, "how many got it")
    equal(sum(isinstance(answer, LeaseHeld) for answer in answers), 15, "how many got LeaseHeld")


@promise
async def an_expired_lease_has_one_successor(world: World) -> None:
    """When a lease expires and many claim, one gets the run."""
    await world.lease()
    shares = await asyncio.gather(*(claimed_ids(store, now=EXPIRED) for store in (world.a, world.b) * 10))
    equal([run_id for share in shares for run_id in share], ["run"], "what was given out")


@promise
async def a_lease_is_alive_until_its_end(world: World) -> None:
    """A leased run is given to no other worker before `until`, and from then on to the next that asks."""
    await world.lease()
    await world.lease("other", workflow="other")
    last = at(TTL) - 1
    equal(await claimed_ids(world.b, now=last), [], "claimed one microsecond before the end")
    with refused(await world.lease_held(), "acquire one microsecond before the end"):
        await world.b.acquire("run", TTL, now=last)
    equal(await claimed_ids(world.b, now=at(TTL)), ["run"], "claimed at the end")
    equal((await world.take("other", now=at(TTL))).run.status, "running", "the status of a run acquired at the end of its lease")


@promise
async def runs_that_cannot_be_claimed_delay_no_others(world: World) -> None:
    """Runs of other workflows or in other queues are passed over, however many are due before."""

    async def in_the_way(n: int) -> None:
        await world.a.create(new_run(f"unknown-{n}", workflow="gone", priority=9), now=NOW)
        await world.a.create(new_run(f"queued-{n}", queue="other", priority=9), now=NOW)

    await asyncio.gather(*map(in_the_way, range(40)))
    await world.a.create(new_run("ready"), now=at(1))
    equal(await claimed_ids(world.b, 1, now=at(1), queues=["default"]), ["ready"], "what is claimed")
    equal((await world.row("unknown-0")).status, "pending", "the status of a run of a workflow that was not asked for")


@promise
async def a_run_that_kills_its_workers_goes_to_the_end_of_the_line(world: World) -> None:
    """A run whose lease expires again and again is behind those that were due before its last lease ended."""
    await world.lease("poisoned")
    for n in range(3):
        await world.a.create(new_run(f"ready-{n}"), now=at(TTL - 1))
    got = [(await claimed_ids(world.b, 1, now=EXPIRED))[0] for _ in range(4)]
    equal(got, ["ready-0", "ready-1", "ready-2", "poisoned"], "the order of claims")


@promise
async def claim_takes_only_what_was_asked_for(world: World) -> None:
    """`claim` keeps to its limit, its workflows and its queues; no workflows means nothing, no queues means all."""
    for name in ("one", "two"):
        await world.a.create(new_run(f"{name}-mail", workflow=name, queue="mail"), now=NOW)
        await world.a.create(new_run(f"{name}-default", workflow=name), now=NOW)
    equal(await claimed_ids(world.b, 0, workflows=["one", "two"]), [], "with limit 0")
    equal(await claimed_ids(world.b, workflows=[]), [], "without workflows")
    equal(await claimed_ids(world.b, workflows=["one"], queues=[]), [], "with no queue at all")
    equal(await claimed_ids(world.b, workflows=["one"], queues=["mail"]), ["one-mail"], "of one workflow in one queue")
    equal(await claimed_ids(world.b, 1, workflows=["one", "two"]), ["one-default"], "one of the rest")
    equal(await claimed_ids(world.b, workflows={"one", "two"}), ["two-default", "two-mail"], "the rest")


@promise
async def claim_gives_the_next_instant_at_which_a_run_comes_due(world: World) -> None:
    """`next_wake_at` is the earliest instant after now at which a run comes due: a timer's, a start's, or the end of a lease."""
    equal((await world.a.claim(5, TTL, [("flow", 1)], now=NOW)).next_wake_at, None, "next_wake_at of an empty store")
    await world.a.create(new_run("later", start_at=at(500)), now=NOW)
    await world.suspended("timer", wake_at=at(300))
    await world.suspended("untimed", waiting_for=signals("go"))
    equal((await world.b.claim(5, TTL, [("flow", 1)], now=NOW)).next_wake_at, at(300), "next_wake_at with timers")
    await world.start("leased")
    equal((await world.b.claim(5, TTL, [("flow", 1)], now=NOW)).next_wake_at, at(TTL), "next_wake_at with another's lease")
    for run_id in ("due-1", "due-2"):
        await world.a.create(new_run(run_id, start_at=at(2)), now=NOW)
    await world.a.create(new_run("soon", start_at=at(3)), now=NOW)
    equal(
        (await world.b.claim(1, TTL, [("flow", 1)], now=at(2))).next_wake_at,
        at(3),
        "next_wake_at with more due than was asked for",
    )


@promise
async def acquire_gives_only_what_is_due(world: World) -> None:
    """`acquire` gives None for a run that is not due, unless `due_only=False`, and None for one that has ended."""
    await world.a.create(new_run("later", start_at=at(60)), now=NOW)
    await world.suspended("waiting", waiting_for=signals("go"))
    await world.ended("over")
    for run_id in ("later", "waiting"):
        equal(await world.b.acquire(run_id, TTL, now=NOW), None, f"acquire of {run_id!r}")
        claim = await world.take(run_id, due_only=False, now=NOW)
        equal((claim.run.status, claim.run.waiting_for), ("running", ()), "status and waiting_for once acquired")
    for due_only in (True, False):
        equal(await world.b.acquire("over", TTL, due_only=due_only, now=NOW), None, "acquire of a run that has ended")


@promise
async def acquire_refuses_a_leased_run(world: World) -> None:
    """`acquire` raises `LeaseHeld` while a live lease holds the run, and `RunNotFound` for an unknown one."""
    await world.lease("leased")
    for due_only in (True, False):
        with refused(await world.lease_held("leased"), "acquire of a leased run"):
            await world.b.acquire("leased", TTL, due_only=due_only, now=at(1))
    with refused(RunNotFound("unknown"), "acquire of an unknown run"):
        await world.b.acquire("unknown", TTL, now=NOW)


@promise
async def epochs_only_grow_and_tokens_never_repeat(world: World) -> None:
    """Each acquisition has a higher epoch, also within one microsecond, and a token that cannot be guessed."""
    leases: list[Lease] = [await world.lease()]
    for _ in range(5):
        await world.a.release(leases[-1], now=NOW)
        leases.append((await world.take(now=NOW)).lease)
    epochs = [lease.epoch for lease in leases]
    equal(epochs, sorted(set(epochs)), "the epochs of six acquisitions")
    equal(len({lease.token for lease in leases}), 6, "how many tokens differ")
    holds(all(len(lease.token) >= 16 for lease in leases), "a token has at least 16 characters")


@promise
async def an_epoch_is_at_least_the_time(world: World) -> None:
    """The epoch is never below the store's clock in microseconds, so that a run which was removed needs no tombstone."""
    first = (await world.start()).lease
    holds(first.epoch >= NOW, f"epoch {first.epoch} is at least the time, {NOW}")
    second = (await world.take(now=at(100))).lease
    holds(second.epoch >= at(100), f"epoch {second.epoch} is at least the time, {at(100)}")


async def _lose(world: World, run_id: str, times: int) -> None:
    """A new run whose holders were lost so many times, each a minute after the one before; it is due from the last minute on."""
    await world.a.create(new_run(run_id), now=NOW)
    for n in range(times):
        holds(await world.a.acquire(run_id, 60, now=at(60 * n)) is not None, f"{run_id} can be acquired")


@promise
async def suspects_are_claimed_a_few_at_a_time(world: World) -> None:
    """With `suspects` a claim takes at most so many running runs with two or more attempts, those that come first."""
    for run_id in ("lost-1", "lost-2", "lost-3"):
        await _lose(world, run_id, 2)
    equal(await claimed_ids(world.b, now=at(120), suspects=0), [], "what a claim takes with suspects=0")
    equal(await claimed_ids(world.b, now=at(120), suspects=1), ["lost-1"], "with suspects=1")
    equal(await claimed_ids(world.b, now=at(120)), ["lost-2", "lost-3"], "without")
    equal([(await world.row(run_id)).attempts for run_id in ("lost-1", "lost-2")], [3, 3], "their attempts")


@promise
async def suspects_delay_no_other_run(world: World) -> None:
    """Suspects that are passed over, however long they are due, keep no other run of the same queue waiting."""
    for n in range(30):
        await _lose(world, f"lost-{n:02}", 2)
    await _lose(world, "once", 1)
    await world.a.create(new_run("new"), now=at(500))
    equal(await claimed_ids(world.b, 1, now=at(600), suspects=0), ["once"], "what a claim of one takes with suspects=0")
    equal(
        await claimed_ids(world.b, 5, now=at(600), suspects=1), ["lost-00", "new"], "what a claim of five takes with suspects=1"
    )
    equal(await claimed_ids(world.b, 5, now=at(600), suspects=0), [], "what is left for a claim with suspects=0")


@promise
async def only_a_run_that_lost_its_holders_is_a_suspect(world: World) -> None:
    """A run that its holders gave back, whatever its attempts, one that was lost once, and one that goes on, are no suspects."""
    await world.a.create(new_run("given-back"), now=NOW)
    for n in range(3):
        claim = await world.take("given-back", now=at(n))
        await world.a.release(claim.lease, wake_at=at(n + 1), counts_attempt=True, now=at(n))
    await _lose(world, "lost-once", 1)
    await _lose(world, "asleep", 2)
    await world.a.suspend((await world.take("asleep", now=at(120))).lease, wake_at=at(130), now=at(120))
    expected = ["given-back", "lost-once", "asleep"]
    equal(await claimed_ids(world.b, now=at(200), suspects=0), expected, "what a claim takes with suspects=0")
