"""Queue limits: how many runs of a queue, and of each limit key in it, are leased at once, and how fast runs start."""

from __future__ import annotations

import asyncio

from perdure.model.durations import MICROSECOND as SECOND
from perdure.model.records import QueueLimits
from perdure.store import require
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.world import (
    NOW,
    TTL,
    FullWorld,
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


async def _fill(world: FullWorld, queue: str) -> None:
    """Limit the queue to one run, and lease one."""
    await world.a.limit_queue(queue, QueueLimits(concurrency=1))
    await world.a.create(new_run(f"holds-{queue}", queue=queue), now=NOW)
    await world.take(f"holds-{queue}", now=NOW)


async def _queue(world: FullWorld, *ids: str, **columns: object) -> None:
    for run_id in ids:
        await world.a.create(new_run(run_id, **columns), now=NOW)


@promise_with("schedules")
async def limits_are_kept_by_queue(world: FullWorld) -> None:
    """`limit_queue` sets or replaces a queue's limits, and `queue_limits` gives what was set."""
    await world.a.limit_queue("mail", QueueLimits(concurrency=1))
    await world.a.limit_queue("mail", QueueLimits(concurrency=5, per_key=2))
    await world.a.limit_queue("default", QueueLimits(per_key=1))
    await world.a.limit_queue("slow", QueueLimits(interval=86_400 * SECOND))
    expected = {
        "mail": QueueLimits(concurrency=5, per_key=2),
        "default": QueueLimits(per_key=1),
        "slow": QueueLimits(interval=86_400 * SECOND),
    }
    equal(await world.b.queue_limits(), expected, "the limits")


@promise_with("schedules")
async def no_more_runs_are_claimed_than_the_queue_allows(world: FullWorld) -> None:
    """A queue's limit holds within one `claim` and over several, and a place is free again when a lease ends."""
    await world.a.limit_queue("default", QueueLimits(concurrency=2))
    await _queue(world, "a", "b", "c", "d", "e")
    claims = (await world.b.claim(10, TTL, [("flow", 1)], now=NOW)).claims
    equal([claim.run.id for claim in claims], ["a", "b"], "the first claim")
    equal(await claimed_ids(world.a), [], "the second claim")
    await world.a.finish(claims[0].lease, "completed", b"1", now=NOW)
    equal(await claimed_ids(world.a), ["c"], "claimed when one has finished")
    await world.b.suspend(claims[1].lease, wake_at=None, waiting_for=signals("go"), now=NOW)
    equal(await claimed_ids(world.a), ["d"], "claimed when one sleeps")


@promise_with("schedules")
async def an_expired_lease_takes_no_place(world: FullWorld) -> None:
    """Only leases that have not expired count, so a crashed worker does not block its queue."""
    await _queue(world, "crashed", "ready")
    await world.a.limit_queue("default", QueueLimits(concurrency=1))
    equal(await claimed_ids(world.a), ["crashed"], "what the worker had that crashed")
    equal(await claimed_ids(world.b, now=at(TTL - 1)), [], "claimed while the lease is alive")
    equal(await claimed_ids(world.b, now=at(TTL)), ["ready"], "claimed when it has expired")


@promise_with("schedules")
async def each_limit_key_has_its_own_limit(world: FullWorld) -> None:
    """`per_key` counts the runs of each `limit_key` in the queue apart; runs without one are not counted."""
    await world.a.limit_queue("default", QueueLimits(per_key=1))
    await _queue(world, "a1", "a2", limit_key="ada")
    await _queue(world, "b1", "b2", limit_key="bob")
    await _queue(world, "free1", "free2")
    equal(await claimed_ids(world.b), ["a1", "b1", "free1", "free2"], "what is claimed")
    await _queue(world, "m1", "m2", limit_key="ada", queue="mail")
    equal(await claimed_ids(world.b), ["m1", "m2"], "what is claimed from a queue without limits")


@promise_with("schedules")
async def both_limits_hold_together(world: FullWorld) -> None:
    """A run is claimed when the queue and its limit key both have room, and one that has not takes no place."""
    await world.a.limit_queue("default", QueueLimits(concurrency=3, per_key=1))
    await _queue(world, "a1", "a2", "a3", limit_key="ada")
    await _queue(world, "b1", "b2", limit_key="bob")
    await _queue(world, "c1", "d1")
    equal(await claimed_ids(world.b), ["a1", "b1", "c1"], "what is claimed")


@promise_with("schedules")
async def a_full_queue_delays_no_other_run(world: FullWorld) -> None:
    """Runs of a full queue are passed over, also when `limit` of them come first."""
    await _fill(world, "full")
    await _queue(world, *(f"stuck-{n}" for n in range(30)), queue="full", priority=9)
    await _queue(world, "ready")
    equal(await claimed_ids(world.b, 1), ["ready"], "what is claimed")


@promise_with("schedules")
async def a_limit_can_be_lifted(world: FullWorld) -> None:
    """A queue whose limits are all None has none, is not among `queue_limits`, and `create` leases its runs again."""
    await _fill(world, "default")
    await _queue(world, "a", "b", limit_key="ada")
    equal(await claimed_ids(world.b), [], "claimed from a full queue")
    await world.a.limit_queue("default", QueueLimits())
    await world.a.limit_queue("unknown", QueueLimits())
    equal(await world.b.queue_limits(), {}, "the limits that are left")
    equal(await claimed_ids(world.b), ["a", "b"], "claimed without limits")
    await world.lease("c")


@promise_with("schedules")
async def leases_from_before_the_limit_count(world: FullWorld) -> None:
    """A lease takes a place also when it was given, by `create` or `acquire`, before the queue was limited."""
    await world.lease("first")
    await _queue(world, "second", "third")
    await world.take("second", now=NOW)
    await world.a.limit_queue("default", QueueLimits(concurrency=2))
    equal(await claimed_ids(world.b), [], "what can be claimed")


@promise_with("schedules")
async def create_gives_no_lease_in_a_limited_queue(world: FullWorld) -> None:
    """`create(ttl=)` in a queue with any limit gives a run that is pending and due, and no claim, also when there is room."""
    limits = {"few": QueueLimits(concurrency=9), "keys": QueueLimits(per_key=9), "slow": QueueLimits(interval=SECOND)}
    for queue, one in limits.items():
        await world.b.limit_queue(queue, one)
        created = await world.a.create(new_run(queue, queue=queue), ttl=TTL, entries=[entry(1)], now=NOW)
        equal((created.is_new, created.claim), (True, None), f"is_new and claim of a run in queue {queue!r}")
        row = await world.row(queue)
        equal(created.run, row, "the row that was returned")
        equal((row.status, row.wake_at, row.epoch, row.attempts), ("pending", NOW, 0, 0), "status, wake_at, epoch and attempts")
        equal((row.lease_owner, row.lease_until), (None, None), "owner and end of the lease")
        equal(await world.b.journal(queue), [entry(1)], "the journal")
        again = await world.a.create(new_run(queue, queue=queue), ttl=TTL, now=NOW)
        equal((again.is_new, again.claim), (False, None), "is_new and claim of the same run again")
    equal(await claimed_ids(world.b), sorted(limits), "what is claimed then")
    await world.lease("free", queue="other")


@promise_with("schedules")
async def acquire_keeps_to_the_limits(world: FullWorld) -> None:
    """`acquire` gives None while the queue or the limit key has no room, whatever `due_only`, and its leases count."""
    await world.a.limit_queue("default", QueueLimits(concurrency=2, per_key=1))
    await _queue(world, "a1", "a2", limit_key="ada")
    await _queue(world, "b1", "b2", limit_key="bob")
    await _queue(world, "asleep", start_at=at(99))
    first = await world.take("a1", now=NOW)
    for due_only in (True, False):
        equal(await world.a.acquire("a2", TTL, due_only=due_only, now=NOW), None, "a run whose limit key has no room")
    await world.take("b1", now=NOW)
    for run_id in ("a2", "b2", "asleep"):
        equal(await world.a.acquire(run_id, TTL, due_only=False, now=NOW), None, f"run {run_id!r} of a full queue")
    equal((await world.row("b2")).status, "pending", "the status of a run that had no room")
    with refused(await world.lease_held("a1"), "acquire of a leased run of a full queue"):
        await world.a.acquire("a1", TTL, now=NOW)
    equal(await claimed_ids(world.b), [], "what can be claimed from the full queue")
    await world.b.finish(first.lease, "completed", b"1", now=NOW)
    equal((await world.take("a2", now=NOW)).run.status, "running", "the status of a run that has room")
    equal((await world.take("b2", now=at(TTL))).run.status, "running", "the status when the other leases have expired")


@promise_with("schedules")
async def many_acquires_keep_to_the_limit(world: FullWorld) -> None:
    """When many acquire runs of one queue at once on two handles, they keep to the limit together."""
    await world.a.limit_queue("default", QueueLimits(concurrency=3))
    await _queue(world, *(f"run-{n}" for n in range(8)))
    calls = (store.acquire(f"run-{n}", TTL, now=NOW) for n, store in enumerate((world.a, world.b) * 4))
    equal(sum(claim is not None for claim in await asyncio.gather(*calls)), 3, "how many runs were leased")


@promise_with("schedules")
async def a_rate_lets_runs_start_evenly(world: FullWorld) -> None:
    """A claim starts one run of a queue with an interval, the next one when the interval has passed; idle time saves up none."""
    await world.a.limit_queue("default", QueueLimits(interval=SECOND))
    await _queue(world, "a", "b", "c", "d", "e")
    equal(await claimed_ids(world.b), ["a"], "the first claim")
    equal(await claimed_ids(world.a), [], "a claim at the same instant")
    equal(await claimed_ids(world.a, now=at(1) - 1), [], "a claim a microsecond before the interval has passed")
    equal(await claimed_ids(world.b, now=at(1)), ["b"], "a claim when the interval has passed")
    equal(await claimed_ids(world.a, now=at(2) - 1), [], "a claim just before the next interval has passed")
    equal(await claimed_ids(world.a, now=at(5)), ["c"], "a claim after a pause")
    equal(await claimed_ids(world.b, now=at(6) - 1), [], "a claim soon after the pause")
    equal(await claimed_ids(world.b, now=at(6)), ["d"], "a claim an interval after that")


@promise_with("schedules")
async def a_claim_says_when_the_rate_lets_the_next_run_start(world: FullWorld) -> None:
    """`next_wake_at` is at the latest the instant at which a due run may start that the rate held back."""
    await world.a.limit_queue("default", QueueLimits(interval=SECOND))
    await _queue(world, "a", "b", "c")
    for index, run_id in enumerate("ab"):
        for store in (world.a, world.b):  # the first one starts a run, the second one finds the rate used up
            found = await store.claim(9, 10 * TTL, [("flow", 1)], now=at(index))
            expected = [run_id] if store is world.a else []
            equal([claim.run.id for claim in found.claims], expected, "what is claimed")
            holds(found.next_wake_at is not None, "there is an instant to wake at")
            holds(at(index) < (found.next_wake_at or 0) <= at(index + 1), "it is after now, and not after the next start")


@promise_with("schedules")
async def a_rate_holds_back_first_leases_alone(world: FullWorld) -> None:
    """A run that was leased before goes on whatever the rate: resumed, released, taken over or reopened. It spends nothing."""
    await world.a.limit_queue("default", QueueLimits(interval=100 * SECOND))
    await _queue(world, "1-asleep", "2-released", "3-lost", "4-failed", "5-new", "6-new")
    leases = []
    for n in range(4):
        (claim,) = (await world.a.claim(9, TTL, [("flow", 1)], now=at(100 * n))).claims
        leases.append(claim.lease)
        if n == 0:
            await world.a.suspend(claim.lease, wake_at=at(320), now=at(100 * n))
        if n == 1:
            await world.a.release(claim.lease, wake_at=at(320), now=at(100 * n))
        if n == 2:
            await world.a.renew([claim.lease], 120.0, now=at(100 * n))  # its holder is lost then
        if n == 3:
            await world.a.finish(claim.lease, "failed", b"1", now=at(100 * n))
    await world.a.reopen("4-failed", [], now=at(320))
    equal(await claimed_ids(world.b, now=at(320)), ["1-asleep", "2-released", "3-lost", "4-failed"], "what goes on")
    equal(await claimed_ids(world.b, now=at(399)), ["1-asleep", "2-released", "3-lost", "4-failed"], "what is taken over")
    equal(await claimed_ids(world.b, now=at(400)), ["5-new"], "what starts when the interval has passed")


@promise_with("schedules", "operators")
async def a_rate_does_not_hold_back_a_restored_run(world: FullWorld) -> None:
    """A restored run has a new epoch, so its first lease here is no start; a run that was deleted and created again starts."""
    await world.a.limit_queue("default", QueueLimits(interval=SECOND))
    await _queue(world, "a")
    equal(await claimed_ids(world.b), ["a"], "what starts")
    await world.a.delete("a")
    await _queue(world, "a")
    await world.a.restore(run_row("b"), [], now=NOW)
    equal(await claimed_ids(world.b), ["b"], "what is claimed while the rate is used up")
    equal(await claimed_ids(world.b, now=at(1)), ["a"], "what starts when the interval has passed")


@promise_with("schedules")
async def acquire_spends_the_rate(world: FullWorld) -> None:
    """`acquire` of a run that has not started gives None while the rate holds it back, and its start counts for `claim`."""
    await world.a.limit_queue("default", QueueLimits(interval=SECOND))
    await _queue(world, "a", "b", "c")
    lease = (await world.take("b", now=NOW)).lease
    for due_only in (True, False):
        equal(await world.a.acquire("a", TTL, due_only=due_only, now=at(1) - 1), None, "a run that may not start yet")
    equal(await claimed_ids(world.a, now=at(1) - 1), [], "what is claimed before the interval has passed")
    await world.b.release(lease, now=NOW)
    equal((await world.take("b", now=at(1) - 1)).run.id, "b", "a run that has started")
    equal((await world.take("a", now=at(1))).run.id, "a", "a run that may start now")
    equal(await claimed_ids(world.a, now=at(2) - 1), [], "what is claimed too early")
    equal(await claimed_ids(world.a, now=at(2)), ["c"], "what is claimed then")


@promise_with("schedules")
async def a_rate_is_spent_by_starts_alone(world: FullWorld) -> None:
    """A run that another limit keeps back spends nothing, and the one after it starts; higher priority starts first."""
    await world.a.limit_queue("default", QueueLimits(per_key=1, interval=SECOND))
    await _queue(world, "a1", "a2", "a3", limit_key="ada", priority=5)
    await _queue(world, "b1", limit_key="bob")
    await _queue(world, "first", priority=9)
    equal(await claimed_ids(world.b), ["first"], "what starts first")
    equal(await claimed_ids(world.b, now=at(1)), ["a1"], "what starts next")
    equal(await claimed_ids(world.b, now=at(2)), ["b1"], "what starts while its predecessors have no room")
    equal(await claimed_ids(world.b, now=at(3)), [], "what starts when none has room")
    await _queue(world, "c1", limit_key="eve")
    equal(await claimed_ids(world.b, now=at(3)), ["c1"], "what starts then")


@promise_with("schedules")
async def a_slow_queue_delays_no_other_run(world: FullWorld) -> None:
    """Runs that a rate holds back are passed over, also when `limit` of them come first, as far as they have not started."""
    await world.a.limit_queue("slow", QueueLimits(interval=SECOND))
    await _queue(world, "started", queue="slow", priority=-1)
    (claim,) = (await world.a.claim(1, TTL, [("flow", 1)], now=NOW)).claims
    await world.a.release(claim.lease, now=NOW)
    await _queue(world, *(f"stuck-{n}" for n in range(30)), queue="slow", priority=9)
    await _queue(world, "ready")
    equal(await claimed_ids(world.b, 1), ["ready"], "what is claimed first")
    equal(await claimed_ids(world.b, 1), ["started"], "what is claimed next")


@promise_with("schedules")
async def setting_a_rate_again_does_not_reset_it(world: FullWorld) -> None:
    """`limit_queue` keeps the queue's last start: the same limits change nothing, others hold from that start on."""
    await world.a.limit_queue("default", QueueLimits(interval=10 * SECOND))
    await _queue(world, "a", "b", "c", "d")
    equal(await claimed_ids(world.a), ["a"], "what starts")
    await world.b.limit_queue("default", QueueLimits(interval=10 * SECOND))
    equal(await claimed_ids(world.a, now=at(9)), [], "what starts when the same limits were set again")
    await world.b.limit_queue("default", QueueLimits(interval=4 * SECOND, concurrency=3))
    equal(await claimed_ids(world.a, now=at(4) - 1), [], "what starts before the shorter interval has passed")
    equal(await claimed_ids(world.a, now=at(4)), ["b"], "what starts when it has passed")
    await world.b.limit_queue("default", QueueLimits(interval=20 * SECOND))
    starts = [run_id for run_id in await claimed_ids(world.a, now=at(24) - 1) if run_id in ("c", "d")]
    equal(starts, [], "what starts before the longer interval has passed")
    starts = [run_id for run_id in await claimed_ids(world.a, now=at(24)) if run_id in ("c", "d")]
    equal(starts, ["c"], "what starts when it has passed")


@promise_with("schedules")
async def many_workers_keep_to_the_limit(world: FullWorld) -> None:
    """When many claim at once on two handles, they keep to the limit together."""
    await world.a.limit_queue("default", QueueLimits(concurrency=3, per_key=2))
    for n in range(20):
        await world.a.create(new_run(f"run-{n:02}", limit_key=("ada", "bob")[n % 2]), now=NOW)
    shares = await asyncio.gather(*(claimed_ids(store, 2) for store in (world.a, world.b) * 8))
    equal(sum(len(share) for share in shares), 3, "how many runs were leased")


@promise_with("schedules")
async def many_workers_keep_to_the_rate(world: FullWorld) -> None:
    """When many claim and acquire at once on two handles, one run starts."""
    await world.a.limit_queue("default", QueueLimits(interval=SECOND))
    await _queue(world, *(f"run-{n}" for n in range(12)))
    claims = (claimed_ids(store, 2) for store in (world.a, world.b) * 4)
    acquires = (store.acquire(f"run-{n + 4}", TTL, now=NOW) for n, store in enumerate((world.a, world.b) * 4))
    shares, single = await asyncio.gather(asyncio.gather(*claims), asyncio.gather(*acquires))
    equal(sum(map(len, shares)) + sum(claim is not None for claim in single), 1, "how many runs started")


@promise_with("schedules")
async def queues_and_limit_keys_that_differ_stay_apart(world: FullWorld) -> None:
    """Names of queues and limit keys are compared byte for byte."""
    for index, name in enumerate(NAMES):
        await world.a.create(new_run(f"run-{index:02}", queue=name, limit_key=name), now=NOW)
        await world.a.limit_queue(name, QueueLimits(concurrency=1, per_key=1))
    equal(set(await world.b.queue_limits()), set(NAMES), "the queues with limits")
    for index, name in enumerate(NAMES):
        equal(await claimed_ids(world.b, queues=[name]), [f"run-{index:02}"], f"claimed from queue {name!r}")


@promise_with("schedules")
async def namespaces_have_their_own_limits(world: FullWorld) -> None:
    """A limit holds, and a rate is spent, in its own namespace alone."""
    other = require(await world.open_namespace("other"), "schedules")
    await other.limit_queue("default", QueueLimits(concurrency=1, interval=SECOND))
    equal(await world.a.queue_limits(), {}, "queue limits of another namespace")
    await _queue(world, "a", "b")
    equal(await claimed_ids(world.b), ["a", "b"], "what is claimed without limits")
    await world.a.limit_queue("default", QueueLimits(interval=SECOND))
    await _queue(world, "c")
    await other.create(new_run("there"), now=NOW)
    equal(await claimed_ids(world.b), ["c"], "what starts here")
    equal(await claimed_ids(other), ["there"], "what starts there")


@promise_with("schedules")
async def returned_limits_can_be_changed_afterwards(world: FullWorld) -> None:
    """The dict that `queue_limits` returns is the caller's: changing it changes no limit."""
    await world.a.limit_queue("mail", QueueLimits(concurrency=1))
    (await world.a.queue_limits()).clear()
    equal(await world.a.queue_limits(), {"mail": QueueLimits(concurrency=1)}, "the queue limits")
