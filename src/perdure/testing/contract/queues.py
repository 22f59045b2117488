"""Queue limits: how many runs of a queue, and of each limit key in it, are leased at once."""

from __future__ import annotations

import asyncio

from perdure.model.records import QueueLimits
from perdure.store import require
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.world import NOW, TTL, FullWorld, at, claimed_ids, equal, new_run, signals


async def _queue(world: FullWorld, *ids: str, **columns: object) -> None:
    for run_id in ids:
        await world.a.create(new_run(run_id, **columns), now=NOW)


@promise_with("schedules")
async def limits_are_kept_by_queue(world: FullWorld) -> None:
    """`limit_queue` sets or replaces a queue's limits, and `queue_limits` gives what was set."""
    await world.a.limit_queue("mail", QueueLimits(concurrency=1))
    await world.a.limit_queue("mail", QueueLimits(concurrency=5, key_concurrency=2))
    await world.a.limit_queue("default", QueueLimits(key_concurrency=1))
    expected = {"mail": QueueLimits(concurrency=5, key_concurrency=2), "default": QueueLimits(key_concurrency=1)}
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
    await world.a.limit_queue("default", QueueLimits(concurrency=1))
    await world.lease("crashed")
    await _queue(world, "ready")
    equal(await claimed_ids(world.b, now=at(TTL - 1)), [], "claimed while the lease is alive")
    equal(await claimed_ids(world.b, now=at(TTL)), ["ready"], "claimed when it has expired")


@promise_with("schedules")
async def each_limit_key_has_its_own_limit(world: FullWorld) -> None:
    """`key_concurrency` counts the runs of each `limit_key` in the queue apart; runs without one are not counted."""
    await world.a.limit_queue("default", QueueLimits(key_concurrency=1))
    await _queue(world, "a1", "a2", limit_key="ada")
    await _queue(world, "b1", "b2", limit_key="bob")
    await _queue(world, "free1", "free2")
    equal(await claimed_ids(world.b), ["a1", "b1", "free1", "free2"], "what is claimed")
    await _queue(world, "m1", "m2", limit_key="ada", queue="mail")
    equal(await claimed_ids(world.b), ["m1", "m2"], "what is claimed from a queue without limits")


@promise_with("schedules")
async def both_limits_hold_together(world: FullWorld) -> None:
    """A run is claimed when the queue and its limit key both have room, and one that has not takes no place."""
    await world.a.limit_queue("default", QueueLimits(concurrency=3, key_concurrency=1))
    await _queue(world, "a1", "a2", "a3", limit_key="ada")
    await _queue(world, "b1", "b2", limit_key="bob")
    await _queue(world, "c1", "d1")
    equal(await claimed_ids(world.b), ["a1", "b1", "c1"], "what is claimed")


@promise_with("schedules")
async def a_full_queue_delays_no_other_run(world: FullWorld) -> None:
    """Runs of a full queue are passed over, also when `limit` of them come first."""
    await world.a.limit_queue("full", QueueLimits(concurrency=0))
    await _queue(world, *(f"stuck-{n}" for n in range(30)), queue="full", priority=9)
    await _queue(world, "ready")
    equal(await claimed_ids(world.b, 1), ["ready"], "what is claimed")


@promise_with("schedules")
async def a_limit_can_be_lifted(world: FullWorld) -> None:
    """A limit of None is no limit."""
    await world.a.limit_queue("default", QueueLimits(concurrency=0))
    await _queue(world, "a", "b", limit_key="ada")
    equal(await claimed_ids(world.b), [], "claimed with limit 0")
    await world.a.limit_queue("default", QueueLimits())
    equal(await claimed_ids(world.b), ["a", "b"], "claimed without limits")


@promise_with("schedules")
async def a_run_leased_by_its_id_is_not_limited(world: FullWorld) -> None:
    """`create(ttl=)` and `acquire` lease one run also over its queue's limit; those leases count for `claim`."""
    await world.a.limit_queue("default", QueueLimits(concurrency=1))
    await world.lease("first")
    await world.lease("second")
    await _queue(world, "third", "fourth")
    equal((await world.take("third", now=NOW)).run.status, "running", "the status of the third")
    equal(await claimed_ids(world.b), [], "what can be claimed")


@promise_with("schedules")
async def many_workers_keep_to_the_limit(world: FullWorld) -> None:
    """When many claim at once on two handles, they keep to the limit together."""
    await world.a.limit_queue("default", QueueLimits(concurrency=3, key_concurrency=2))
    for n in range(20):
        await world.a.create(new_run(f"run-{n:02}", limit_key=("ada", "bob")[n % 2]), now=NOW)
    shares = await asyncio.gather(*(claimed_ids(store, 2) for store in (world.a, world.b) * 8))
    equal(sum(len(share) for share in shares), 3, "how many runs were leased")


@promise_with("schedules")
async def queues_and_limit_keys_that_differ_stay_apart(world: FullWorld) -> None:
    """Names of queues and limit keys are compared byte for byte."""
    for index, name in enumerate(NAMES):
        await world.a.create(new_run(f"run-{index:02}", queue=name, limit_key=name), now=NOW)
        await world.a.limit_queue(name, QueueLimits(concurrency=1, key_concurrency=1))
    equal(set(await world.b.queue_limits()), set(NAMES), "the queues with limits")
    for index, name in enumerate(NAMES):
        equal(await claimed_ids(world.b, queues=[name]), [f"run-{index:02}"], f"claimed from queue {name!r}")


@promise_with("schedules")
async def namespaces_have_their_own_limits(world: FullWorld) -> None:
    """A limit holds in its own namespace alone."""
    other = require(await world.open_namespace("other"), "schedules")
    await other.limit_queue("default", QueueLimits(concurrency=0))
    equal(await world.a.queue_limits(), {}, "queue limits of another namespace")
    await _queue(world, "ready")
    equal(await claimed_ids(world.b), ["ready"], "what is claimed")


@promise_with("schedules")
async def returned_limits_can_be_changed_afterwards(world: FullWorld) -> None:
    """The dict that `queue_limits` returns is the caller's: changing it changes no limit."""
    await world.a.limit_queue("mail", QueueLimits(concurrency=1))
    (await world.a.queue_limits()).clear()
    equal(await world.a.queue_limits(), {"mail": QueueLimits(concurrency=1)}, "the queue limits")
