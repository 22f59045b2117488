"""Leases: renewing, releasing, and how attempts are counted."""

from __future__ import annotations

import msgspec

from perdure.model.records import Pulse
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import EXPIRED, NOW, TTL, World, at, claimed_ids, entry, equal, holds, new_run


@promise
async def renewing_prolongs_the_lease_from_now(world: World) -> None:
    """A renewed lease ends `ttl` seconds after the renewal, and the run is due no sooner."""
    lease = await world.lease()
    equal(await world.a.renew([lease], 30, now=at(5)), [Pulse(0, False)], "what renew() gave")
    row = await world.row()
    equal((row.lease_until, row.wake_at, row.status), (at(35), at(35), "running"), "lease_until, wake_at and status")
    equal(await claimed_ids(world.b, now=at(34)), [], "what others can claim before the new end")


@promise
async def renewing_many_answers_each_in_its_place(world: World) -> None:
    """`renew` takes many leases and gives None only in the place of each that is stale; the others are prolonged."""
    leases = [await world.lease(f"run-{n}") for n in range(5)]
    await world.take("run-1")
    await world.a.finish(leases[3], "completed", b"1", now=NOW)
    pulses = await world.a.renew(leases, TTL, now=EXPIRED)
    equal([pulse is None for pulse in pulses], [False, True, False, True, False], "which leases were stale")
    equal((await world.row("run-4")).lease_until, EXPIRED + round(TTL * 1_000_000), "the end of the last lease")
    equal(await world.a.renew([], TTL, now=EXPIRED), [], "what renewing nothing gives")


@promise
async def renewing_in_the_same_instant_is_not_losing(world: World) -> None:
    """A renewal that changes no value, such as a second one in the same microsecond, still finds the lease current."""
    lease = await world.lease()
    for _ in range(3):
        equal(await world.a.renew([lease], TTL, now=NOW), [Pulse(0, False)], "what renew() gave")


@promise
async def a_renewal_keeps_the_running_steps_of_each_run(world: World) -> None:
    """`renew` keeps what each holder says of its steps, in place of what it said before; a stale lease changes nothing."""
    leases = [await world.lease(f"run-{n}") for n in range(4)]
    await world.take("run-1")
    said = [b'[1,[["a",1]]]', b"stale", None, b"\x00\xff"]
    await world.a.renew(leases, TTL, running_steps=said, now=at(1))
    kept = [(await world.row(f"run-{n}")).running_steps for n in range(4)]
    equal(kept, [said[0], None, None, said[3]], "the running steps")
    await world.a.renew([leases[0], leases[2]], TTL, running_steps=[None, b"2"], now=at(2))
    await world.a.renew([leases[3]], TTL, now=at(2))
    kept = [(await world.row(f"run-{n}")).running_steps for n in (0, 2, 3)]
    equal(kept, [None, b"2", None], "the running steps after the next renewal")


@promise
async def running_steps_end_with_their_lease(world: World) -> None:
    """A run that was suspended, ended, released, claimed or acquired has no running steps."""
    ids = ["suspended", "ended", "released", "acquired", "claimed"]
    leases = [await world.lease(run_id) for run_id in ids]
    await world.a.renew(leases, TTL, running_steps=[b"1"] * len(leases), now=NOW)
    await world.a.suspend(leases[0], wake_at=None, now=NOW)
    await world.a.finish(leases[1], "completed", b"1", now=NOW)
    await world.a.release(leases[2], wake_at=at(1000), now=NOW)
    acquired = await world.b.acquire("acquired", TTL, now=EXPIRED)
    equal(acquired is not None and acquired.run.running_steps, None, "the running steps that acquire() gives")
    claims = (await world.b.claim(9, TTL, [("flow", 1)], now=EXPIRED)).claims
    equal([(claim.run.id, claim.run.running_steps) for claim in claims], [("claimed", None)], "what claim() gives")
    equal([(await world.row(run_id)).running_steps for run_id in ids], [None] * len(ids), "the running steps")


@promise
async def a_holder_learns_of_signals_and_cancellation(world: World) -> None:
    """`renew` and `record` answer with the highest inbox seq, consumed or not, and with whether a cancel was requested."""
    lease = await world.lease()
    equal(await world.a.record(lease, now=NOW), Pulse(0, False), "the first pulse")
    await world.b.signal("run", "go", b"1", now=NOW)
    await world.b.signal("run", "go", b"2", now=NOW)
    equal(await world.a.renew([lease], TTL, now=NOW), [Pulse(2, False)], "the pulse after two signals")
    await world.b.cancel("run", now=NOW)
    equal(await world.a.record(lease, [entry(1)], consume=[1, 2], now=NOW), Pulse(2, True), "the pulse after cancel")
    equal(await world.a.renew([lease], TTL, now=NOW), [Pulse(2, True)], "the pulse after everything was consumed")


@promise
async def an_expired_lease_writes_until_it_is_taken_over(world: World) -> None:
    """Only a newer epoch or token ends a lease: one that expired may write and be renewed until the run is taken over."""
    lease = await world.lease()
    await world.a.record(lease, [entry(1)], now=EXPIRED)
    equal(await world.a.renew([lease], TTL, now=EXPIRED), [Pulse(0, False)], "what renew() gave")
    await world.a.finish(lease, "completed", b"1", now=EXPIRED)
    equal((await world.row()).status, "completed", "the status")


@promise
async def the_end_written_in_a_lease_gives_no_right(world: World) -> None:
    """A lease is judged by epoch and token alone; the `until` it carries is for its holder's information."""
    lease = await world.lease()
    await world.a.renew([lease], 60, now=NOW)
    await world.a.record(msgspec.structs.replace(lease, until=0), [entry(1)], now=at(30))
    equal(await world.b.journal("run"), [entry(1)], "the journal")


@promise
async def a_released_run_is_due_at_once(world: World) -> None:
    """`release` makes the run pending and due now, so that another worker can take it over without waiting for the lease."""
    lease = await world.lease()
    await world.a.release(lease, now=at(1))
    row = await world.row()
    equal((row.status, row.wake_at, row.lease_until, row.lease_owner), ("pending", at(1), None, None), "the row")
    equal(await claimed_ids(world.b, now=at(1)), ["run"], "what can be claimed")


@promise
async def attempts_count_claims_without_progress(world: World) -> None:
    """Each claim or acquisition counts an attempt; it counts from one again when the journal grew since the last."""
    equal((await world.start()).run.attempts, 1, "attempts at create(ttl=)")
    second = await world.take(now=at(20))
    equal(second.run.attempts, 2, "attempts at the next acquire")
    third = (await world.b.claim(1, TTL, [("flow", 1)], now=at(40))).claims[0]
    equal(third.run.attempts, 3, "attempts at the next claim")
    await world.a.record(third.lease, [entry(1)], now=at(40))
    fourth = (await world.b.claim(1, TTL, [("flow", 1)], now=at(60))).claims[0]
    equal(fourth.run.attempts, 1, "attempts when the journal grew")
    equal((await world.take(now=at(80))).run.attempts, 2, "attempts when it did not")


@promise
async def a_first_claim_is_the_first_attempt(world: World) -> None:
    """A run that was only created has no attempts; its first claim is number one."""
    created = await world.a.create(new_run(), now=NOW)
    equal(created.run.attempts, 0, "attempts of a new run")
    equal((await world.b.claim(1, TTL, [("flow", 1)], now=NOW)).claims[0].run.attempts, 1, "attempts at the first claim")


@promise
async def a_released_attempt_does_not_count(world: World) -> None:
    """`release` gives the attempt back, and never counts below zero."""
    await world.lease()
    second = await world.take(now=at(20))
    await world.b.release(second.lease, now=at(20))
    equal((await world.row()).attempts, 1, "attempts after release")
    third = await world.take(now=at(20))
    equal(third.run.attempts, 2, "attempts at the next acquire")
    fresh = await world.lease("fresh")
    await world.a.release(fresh, now=NOW)
    equal((await world.row("fresh")).attempts, 0, "attempts after the first one was released")


@promise
async def suspending_starts_the_count_of_attempts_anew(world: World) -> None:
    """A run that suspended in good order has no failed attempts behind it."""
    await world.lease()
    second = await world.take(now=at(20))
    await world.b.suspend(second.lease, wake_at=at(20), now=at(20))
    equal((await world.row()).attempts, 0, "attempts of a suspended run")
    equal((await world.take(now=at(20))).run.attempts, 1, "attempts at the next acquire")


@promise
async def updated_at_follows_the_run_and_not_calls_from_outside(world: World) -> None:
    """`updated_at` changes when a run is claimed, renewed, released, suspended, finished or reopened, and at nothing else."""
    lease = await world.lease()
    await world.a.record(lease, [entry(1)], now=at(1))
    await world.b.signal("run", "go", b"1", now=at(2))
    await world.b.cancel("run", now=at(3))
    equal((await world.row()).updated_at, NOW, "updated_at after record, signal and cancel")
    await world.a.renew([lease], TTL, now=at(4))
    equal((await world.row()).updated_at, at(4), "updated_at after renew")
    await world.a.release(lease, now=at(5))
    equal((await world.row()).updated_at, at(5), "updated_at after release")
    claim = await world.take(now=at(6))
    equal((await world.row()).updated_at, at(6), "updated_at after acquire")
    await world.a.suspend(claim.lease, wake_at=at(7), now=at(7))
    equal((await world.row()).updated_at, at(7), "updated_at after suspend")
    claim = (await world.b.claim(1, TTL, [("flow", 1)], now=at(8))).claims[0]
    equal((await world.row()).updated_at, at(8), "updated_at after claim")
    await world.a.finish(claim.lease, "failed", b"1", now=at(9))
    equal((await world.row()).updated_at, at(9), "updated_at after finish")
    await world.a.reopen("run", [], now=at(10))
    row = await world.row()
    equal((row.updated_at, row.created_at), (at(10), NOW), "updated_at and created_at after reopen")
    holds(row.status == "pending", "the run is pending")
