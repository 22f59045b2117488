"""Generations: how often a run has begun anew under its id."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from perdure.errors import LeaseLost, RunConflict
from perdure.model.records import Awaited, Claim, Item
from perdure.testing.contract.cases import promise, promise_with
from perdure.testing.contract.inbox import ENDS
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    STAGGER,
    TTL,
    FullWorld,
    World,
    after,
    at,
    claimed_ids,
    entry,
    equal,
    holds,
    new_input,
    new_run,
    refused,
    signals,
)


@promise
async def a_reopened_run_stays_in_its_generation(world: World) -> None:
    """`reopen` leaves the generation as it is: only a run that starts over gets a new one."""
    for status in ENDS:
        if status == "completed":
            continue
        await world.a.create(new_run(status, generation=2), now=NOW)
        claim = await world.take(status, now=NOW)
        await world.a.finish(claim.lease, status, b"1", now=NOW)
        await world.b.reopen(status, [], now=at(1))
        equal((await world.row(status)).generation, 2, "the generation after reopen")


@promise
async def create_compares_with_the_first_input(world: World) -> None:
    """A run that has had other inputs is found again by the first one, and by none of the others."""
    columns: dict[str, Any] = {"input_hash": b"third", "first_input_hash": b"first", "generation": 2, "continued_at": at(-5)}
    created = await world.a.create(new_run(**columns), now=NOW)
    stored = await world.row()
    equal({name: getattr(stored, name) for name in columns}, columns, "the columns")
    for again in (new_run(input_hash=b"first"), new_run(**columns)):
        found = await world.b.create(again, now=at(1))
        equal((found.is_new, found.run), (False, stored), "what a repeated create finds")
    equal(created.run, stored, "what create gave")
    for input_hash in (b"second", b"third"):
        with refused(RunConflict("run", "another input"), f"create with the hash {input_hash!r}"):
            await world.b.create(new_run(input_hash=input_hash), now=at(1))
    equal(msgspec.structs.asdict(await world.row()), msgspec.structs.asdict(stored), "the row")


@promise
async def a_run_can_start_over(world: World) -> None:
    """`continue_as` leaves an empty journal and the new input; pending and due, one generation on, and all else as it was."""
    claim = await world.start(queue="mail", priority=3, metadata=b'{"a": 1}', parent_id="parent", parent_key="key", version=2)
    await world.a.record(claim.lease, [entry(1), entry(2)], now=NOW)
    await world.a.release(claim.lease, problem="broken", wake_at=at(1), now=NOW)
    claim = await world.take(now=at(1))
    new = new_input(1, definition_hash="d2", deadline=at(900))
    await world.a.continue_as(claim.lease, new, now=at(2))
    row = await world.row()
    expected = {
        **msgspec.structs.asdict(claim.run),
        **msgspec.structs.asdict(new),
        "status": "pending",
        "wake_at": at(2),
        "updated_at": at(2),
        "continued_at": at(2),
        "generation": 1,
        "first_input_hash": b"hash",
        "attempts": 0,
        "lease_owner": None,
        "lease_until": None,
        "problem": None,
        "problem_at": None,
        "problem_count": 0,
    }
    equal(msgspec.structs.asdict(row), expected, "the row")
    equal(await world.b.journal("run"), [], "the journal")
    again = await world.take(now=at(2))
    holds(again.lease.epoch > claim.lease.epoch, "the epoch of the next lease is a new one")
    equal((again.journal, again.run.attempts, again.run.input), ([], 1, new.input), "the next claim")


@promise
async def a_run_that_started_over_is_claimed(world: World) -> None:
    """A run that starts over is due at once, and a run on hold stays on hold."""
    lease = await world.lease()
    await world.a.continue_as(lease, new_input(), now=at(5))
    equal(await claimed_ids(world.b, now=at(4)), [], "claimed before")
    equal(await claimed_ids(world.b, now=at(5)), ["run"], "claimed")


@promise
async def the_first_input_stays_the_first(world: World) -> None:
    """However often a run starts over, `create` finds it by the input it began with, and each time is a generation."""
    lease = await world.lease()
    for number in (1, 2, 3):
        await world.a.continue_as(lease, new_input(number), now=at(number))
        row = await world.row()
        equal((row.generation, row.first_input_hash, row.seed), (number, b"hash", b"seed-%d" % number), "the columns")
        lease = (await world.take(now=at(number))).lease
    found = await world.b.create(new_run(), ttl=TTL, now=at(4))
    equal((found.is_new, found.claim, found.run), (False, None, await world.row()), "what create gives for the first input")
    for number in (1, 3):
        with refused(RunConflict("run", "another input"), f"create with input {number}"):
            await world.b.create(new_run(input_hash=b"hash-%d" % number), now=at(4))


@promise
async def signals_outlast_a_new_start(world: World) -> None:
    """Unconsumed signals are there after `continue_as`, consumed ones are not; no seq is given twice, and no dedupe forgotten."""
    claim = await world.start()
    for name, dedupe in (("go", "first"), ("go", None), ("stop", "second"), ("go", None)):
        await world.a.signal("run", name, b"1", dedupe=dedupe, now=NOW)
    await world.a.record(claim.lease, consume=[1, 2, 4], now=NOW)
    before = await world.b.inbox("run")
    await world.a.continue_as(claim.lease, new_input(), now=at(1))
    equal((await world.b.inbox("run"), [row.seq for row in before]), (before, [3]), "the inbox")
    equal(await world.b.signal("run", "go", b"2", dedupe="first", now=at(1)), 1, "the seq of a consumed signal sent again")
    equal(await world.b.signal("run", "stop", b"2", dedupe="second", now=at(1)), 3, "the seq of a waiting one sent again")
    equal(await world.b.signal("run", "go", b"3", now=at(1)), 5, "the seq of a new one")
    again = await world.take(now=at(1))
    equal(([row.seq for row in again.inbox], again.inbox_seq), ([3, 5], 5), "the inbox in the next claim")
    await world.b.record(again.lease, consume=[3, 5], now=at(1))
    await world.b.continue_as(again.lease, new_input(2), now=at(2))
    equal(await world.a.signal("run", "go", b"4", now=at(2)), 6, "the seq after all were consumed")
    equal(await world.a.signal("run", "go", b"2", dedupe="first", now=at(2)), 1, "the seq of the first, two generations later")


@promise
async def a_run_that_started_over_can_wait(world: World) -> None:
    """A run all of whose signals were consumed before it started over is suspended until the next one comes, like any other."""
    claim = await world.start()
    for _ in range(2):
        await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.record(claim.lease, consume=[1, 2], now=NOW)
    await world.a.continue_as(claim.lease, new_input(), now=at(1))
    claim = await world.take(now=at(1))
    equal(await world.b.suspend(claim.lease, wake_at=None, waiting_for=signals("go"), now=at(1)), [], "what keeps it awake")
    equal(await world.a.signal("run", "go", b"2", now=at(2)), 3, "the seq of the next signal")
    equal([row.seq for row in (await world.take(now=at(2))).inbox], [3], "the inbox")


@promise
async def a_new_start_keeps_requests(world: World) -> None:
    """A cancel request is still there after `continue_as`, and a run that has not ended is in the lists as pending."""
    claim = await world.start()
    await world.b.cancel("run", now=NOW)
    await world.a.continue_as(claim.lease, new_input(), now=at(1))
    row = await world.row()
    equal((row.cancel_requested, row.status, row.outcome, row.parent_notified), (True, "pending", None, False), "the row")
    equal([line.status for line in await world.b.list()], ["pending"], "the list")


@promise_with("streams")
async def streams_outlast_a_new_start(world: FullWorld) -> None:
    """Items, their counts and the progress are there after `continue_as`, and a stream goes on where it was."""
    lease = await world.lease()
    written = [Item(stream="log", n=n, payload=b"%d" % n) for n in range(100)]
    await world.a.record(lease, [entry(seq) for seq in range(1, 101)], items=written[:60], now=NOW)
    await world.a.report(lease, b"half")
    await world.a.continue_as(lease, new_input(), now=at(1))
    again = await world.take(now=at(1))
    equal((again.item_counts, again.run.progress), ({"log": 60}, b"half"), "counts and progress")
    await world.b.record(again.lease, [entry(1)], items=written[60:], now=at(1))
    equal(await world.a.items("run", "log", limit=1000), written, "the stream")
    equal(await world.a.journal("run"), [entry(1)], "the journal")


@promise
async def a_journal_begins_anew(world: World) -> None:
    """After `continue_as` seqs are free again and nothing of the old journal comes back, however long it was."""
    lease = await world.lease()
    for start in range(1, 301, 60):
        await world.a.record(lease, [entry(seq, payload=b"x" * 5000) for seq in range(start, start + 60)], now=NOW)
    await world.a.record(lease, [entry(301, payload=b"y" * 700_000), entry(302, payload=b"y" * 700_000)], now=NOW)
    for number in (1, 2):
        await world.a.continue_as(lease, new_input(number, input=b"i" * 400_000), now=at(number))
        equal(await world.b.journal("run"), [], "the journal")
        claim = await world.take(now=at(number))
        equal((claim.journal, claim.run.input), ([], b"i" * 400_000), "what the next claim has")
        lease, lines = claim.lease, [entry(seq, f"new-{number}-{seq}", payload=b"x" * 5000) for seq in range(1, 151)]
        for start in range(0, 150, 50):
            await world.a.record(lease, lines[start : start + 50], now=at(number))
        await world.a.record(lease, lines[:50], now=at(number))  # the reply to the first was lost
        equal(await world.b.journal("run"), lines, "the new journal")
        equal(await world.b.journal("run", after=140), lines[140:], "its end")
        await world.a.release(lease, now=at(number))
        claim = await world.take(now=at(number))
        equal((claim.journal, claim.run.attempts), (lines, 1), "the journal and the attempts in a claim")
        lease = claim.lease


@promise
async def a_new_start_counts_attempts_anew(world: World) -> None:
    """After `continue_as` attempts count from one, and start over when the new journal grows, however short it is."""
    lease = await world.lease()
    await world.a.record(lease, [entry(seq) for seq in range(1, 6)], now=NOW)
    lease = (await world.take(now=EXPIRED)).lease
    await world.b.continue_as(lease, new_input(), now=EXPIRED)
    now = EXPIRED
    for attempts, grows in ((1, False), (2, True), (1, False), (2, False)):
        claim = await world.take(now=now)
        equal(claim.run.attempts, attempts, "attempts")
        if grows:
            await world.b.record(claim.lease, [entry(1)], now=now)
        now += EXPIRED - NOW


@promise
async def a_parent_waits_for_the_last(world: World) -> None:
    """A child that starts over tells its parent nothing; when it ends, the parent gets that outcome, once."""
    await world.suspended("parent", waiting_for=[Awaited("child", "pay")])
    lease = await world.lease("child", parent_id="parent", parent_key="pay")
    await world.a.continue_as(lease, new_input(), now=at(1))
    parent = await world.row("parent")
    equal((await world.b.inbox("parent"), parent.status, parent.wake_at), ([], "suspended", None), "the parent")
    claim = await world.take("child", now=at(1))
    await world.b.finish(claim.lease, "completed", b"2", now=at(2))
    equal([row.payload for row in await world.a.inbox("parent")], [b"2"], "the parent's inbox")


@promise
async def a_run_starts_over_or_is_taken_over_but_not_both(world: World) -> None:
    """When a stale worker lets a run start over while another takes it, one of them wins and the other is refused."""

    async def race(n: int) -> None:
        run_id = f"run-{n}"
        lease = await world.lease(run_id)
        await world.a.record(lease, [entry(1)], now=NOW)
        move_on = after(n % STAGGER, lambda: world.a.continue_as(lease, new_input(), now=EXPIRED))
        take = after(n // STAGGER, lambda: world.b.acquire(run_id, TTL, now=EXPIRED))
        moved, claim = await asyncio.gather(move_on, take, return_exceptions=True)
        if not isinstance(claim, Claim):
            raise AssertionError(f"the other worker got no claim but {claim!r}")
        has_moved = not isinstance(moved, LeaseLost)
        equal((claim.run.generation, claim.journal), (1, []) if has_moved else (0, [entry(1)]), "what the other worker got")
        equal(await world.a.journal(run_id), claim.journal, "the journal in the database")

    await asyncio.gather(*(race(n) for n in range(STAGGER * STAGGER)))
