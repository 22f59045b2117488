"""Restoring: a whole run replaces what was there under its id."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from perdure.errors import LeaseHeld, RunFinished
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Claim, Item, RunRow, Signal, Status
from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.creating import FIRST, FULL
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.inbox import ENDS
from perdure.testing.contract.recording import PAYLOADS
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
    refused_write,
    run_row,
    signals,
)

# Every column of a row says something, and none of it is what a store would write by itself.
WHOLE: Final = RunRow(
    **{**msgspec.structs.asdict(FULL), "id": "run"},
    status="suspended",
    wake_at=at(-70),
    waiting_for=(Awaited("child", "pay"), Awaited("signal", "go")),
    epoch=3,
    lease_owner="somebody",
    lease_until=at(99),
    running_steps=b"1",
    attempts=4,
    held=True,
    progress=b"\x00half",
    cancel_requested=True,
    outcome=b"\xff",
    parent_notified=True,
    created_at=at(-500),
    updated_at=at(-400),
)
INBOX: Final = (
    Signal(seq=3, name="go", payload=b"\x00\xff", dedupe="d"),
    Signal(seq=7, name="pay", kind="child", payload=b"x" * 100_000),
)


async def _everything(world: FullWorld, run_id: str = "run") -> tuple[RunRow, list[Entry], list[Signal], list[Item]]:
    journal, inbox = await world.b.journal(run_id), await world.b.inbox(run_id)
    return await world.row(run_id), journal, inbox, await world.items_in(run_id)


async def _busy(world: FullWorld, run_id: str = "run") -> Claim:
    """A run that has something of everything the store keeps, and its claim."""
    claim = await world.start(run_id)
    await world.a.signal(run_id, "go", b"1", dedupe="d", now=NOW)
    await world.a.signal(run_id, "stop", b"2", now=NOW)
    await world.record_item(claim.lease, entry(1), entry(2))
    await world.a.record(claim.lease, consume=[1], now=NOW)
    if "streams" in world.a.capabilities:
        await world.a.report(claim.lease, b"half")
    return claim


@promise_with("operators")
async def a_restored_run_is_there_as_it_was_given(world: FullWorld) -> None:
    """Row, journal and inbox are as given, except: there is no lease, attempts are zero, epoch and `updated_at` are of now."""
    entries = [FIRST, entry(2, payload=b"\x00" * 1_000_000), entry(1, epoch=9)]
    await world.a.restore(WHOLE, entries, [INBOX[1], INBOX[0]], now=NOW)
    expected = msgspec.structs.replace(
        WHOLE, epoch=NOW, lease_owner=None, lease_until=None, running_steps=None, attempts=0, updated_at=NOW
    )
    row, journal, inbox, items = await _everything(world)
    equal(msgspec.structs.replace(row, waiting_for=tuple(sorted(row.waiting_for, key=lambda one: one.kind))), expected, "the row")
    equal(journal, [entry(1, epoch=9), entries[1], FIRST], "the journal")
    equal((inbox, items), (list(INBOX), []), "inbox and items")


@promise_with("operators")
async def a_restored_pending_run_is_due_when_it_says(world: FullWorld) -> None:
    """A pending run is due at its `wake_at`, or now if it has none, and waits for nothing."""
    await world.a.restore(run_row("soon", wake_at=None), [], now=at(1))
    await world.a.restore(run_row("later", wake_at=at(60), start_at=at(50), waiting_for=tuple(signals("go"))), [], now=at(1))
    equal(((await world.row("soon")).wake_at, (await world.row("later")).wake_at), (at(1), at(60)), "wake_at")
    equal((await world.row("later")).waiting_for, (), "what a pending run waits for")
    equal(list(await world.b.due(now=at(59))), ["soon"], "what is due before")
    equal((await world.b.claim(1, TTL, [("flow", 1)], now=at(1))).next_wake_at, at(60), "next_wake_at")
    equal(await claimed_ids(world.b, now=at(60)), ["soon", "later"], "what is claimed at its wake_at")


@promise_with("operators")
async def a_restored_running_run_is_pending(world: FullWorld) -> None:
    """A run that was driven where it came from is pending here and not leased."""
    row = run_row(status="running", wake_at=at(30), lease_owner="somebody", lease_until=at(30), attempts=2, epoch=at(999))
    await world.a.restore(row, [entry(1)], now=NOW)
    found = await world.row()
    equal((found.status, found.wake_at, found.attempts), ("pending", at(30), 0), "status, wake_at and attempts")
    equal((found.lease_owner, found.lease_until, found.epoch), (None, None, NOW), "lease and epoch")
    equal(await claimed_ids(world.b, now=at(30)), ["run"], "what is claimed at its wake_at")


@promise_with("operators")
async def a_restored_suspended_run_wakes_as_before(world: FullWorld) -> None:
    """A suspended run wakes by its timer, by what it waits for, and by nothing else."""
    waiting = tuple(signals("go", "stop"))
    await world.a.restore(run_row("timer", status="suspended", wake_at=at(60), waiting_for=waiting), [], now=NOW)
    await world.a.restore(run_row("waiting", status="suspended", wake_at=None, waiting_for=waiting), [], now=NOW)
    await world.b.signal("waiting", "other", b"1", now=NOW)
    equal(
        (await claimed_ids(world.b, now=at(59)), (await world.row("waiting")).wake_at), ([], None), "claimed, and wake_at, before"
    )
    await world.b.signal("waiting", "stop", b"1", now=at(59))
    equal(await claimed_ids(world.b, now=at(60)), ["waiting", "timer"], "what is claimed then")


@promise_with("operators")
async def a_restored_run_does_not_sleep_through_what_it_waits_for(world: FullWorld) -> None:
    """A suspended run that is restored with what it waits for in its inbox is due now, and so is any that was cancelled."""
    pay = (Awaited("child", "pay"),)
    await world.a.restore(run_row("arrived", status="suspended", wake_at=None, waiting_for=pay), [], INBOX, now=NOW)
    await world.a.restore(run_row("timed", status="suspended", wake_at=at(60), waiting_for=pay), [], INBOX, now=at(1))
    await world.a.restore(run_row("due", status="suspended", wake_at=at(-9), waiting_for=pay), [], INBOX, now=at(1))
    stop = tuple(signals("pay", "stop"))  # a signal and a child's outcome of one name are different things
    await world.a.restore(run_row("asleep", status="suspended", wake_at=None, waiting_for=stop), [], INBOX, now=NOW)
    for status, wake_at in (("suspended", None), ("pending", at(60))):
        row = run_row(f"cancelled {status}", status=status, wake_at=wake_at, waiting_for=stop, cancel_requested=True)
        await world.a.restore(row, [], INBOX, now=at(2))
    expected = ["due", "arrived", "timed", "cancelled pending", "cancelled suspended"]
    equal(list(await world.b.due(now=at(2))), expected, "what is due")
    equal((await world.row("due")).wake_at, at(-9), "wake_at of a run that was due before")


@promise_with("operators")
async def a_restored_run_that_has_ended_stays_so(world: FullWorld) -> None:
    """An ended run has its outcome, is never due and accepts no signals."""
    for status in ENDS:
        given = run_row(status, status=status, wake_at=at(1), waiting_for=tuple(signals("go")), outcome=status.encode())
        await world.a.restore(given, [entry(1)], now=NOW)
        row = await world.row(status)
        equal((row.status, row.outcome, row.ended), (status, status.encode(), True), "status and outcome")
        equal((row.wake_at, row.waiting_for), (None, ()), "timer and waits")
        equal((await world.b.create(new_run(status), ttl=TTL, now=NOW)).run, row, "what create() finds")
        equal(await world.b.acquire(status, TTL, due_only=False, now=NOW), None, "acquire of a run that has ended")
        with refused(RunFinished(status, status), f"a signal to a restored {status} run"):
            await world.b.signal(status, "go", b"1", now=NOW)
    equal((await claimed_ids(world.b, now=at(10**6)), list(await world.b.due(now=at(10**6)))), ([], []), "claimed and due")
    await world.b.reopen("failed", ["step-1"], now=at(1))
    equal([line.seq for line in (await world.take("failed", now=at(1))).journal], [1, 2], "the seqs of a reopened run")


@promise_with("operators")
async def restoring_replaces_everything_of_the_run(world: FullWorld) -> None:
    """Of the run that was there nothing is left: no entry, no inbox row, consumed or not, no item, no progress, no outcome."""
    claim = await _busy(world)
    await world.a.cancel("run", now=NOW)
    await world.a.finish(claim.lease, "failed", b"1", now=NOW)
    await world.b.restore(run_row(input_hash=b"other"), [entry(2, payload=b"new")], now=at(1))
    row, journal, inbox, items = await _everything(world)
    equal((row.status, row.input_hash, row.outcome, row.progress), ("pending", b"other", None, None), "the row")
    equal((row.cancel_requested, row.created_at), (False, at(-500)), "cancel_requested and created_at")
    equal((journal, inbox, items), ([entry(2, payload=b"new")], [], []), "journal, inbox and items")
    next_claim = await world.take(now=at(1))
    equal((next_claim.journal, next_claim.inbox), (journal, []), "journal and inbox in the next claim")
    equal((next_claim.inbox_seq, next_claim.item_counts), (0, {}), "inbox_seq and item_counts in the next claim")
    equal(await world.a.signal("run", "go", b"3", dedupe="d", now=at(1)), 1, "the seq of a signal that the old run had")
    await world.b.restore(run_row(status="completed", outcome=b"2"), [], now=at(99))
    equal(((await world.row()).status, await world.b.journal("run")), ("completed", []), "status and journal once more")


@promise_with("operators")
async def restoring_leaves_other_runs_alone(world: FullWorld) -> None:
    """Only the run with just this id is replaced, however much another's id looks like it, and in this namespace alone."""
    other = await world.open_namespace("other")
    await other.create(new_run("order-1"), now=NOW)
    for n, name in enumerate(NAMES):
        signal = Signal(seq=1, name=name, payload=b"%d" % n, dedupe=name)
        await world.a.restore(run_row(name, input=b"%d" % n), [entry(1, name, payload=b"%d" % n)], [signal], now=NOW)
    before = {name: await world.dump(name) for name in NAMES}
    await world.a.restore(run_row("order-1"), [], now=at(1))
    for n, name in enumerate(NAMES):
        if name != "order-1":
            equal(await world.dump(name), before[name], f"everything of run {name!r}")
            equal(((await world.row(name)).id, (await world.row(name)).input), (name, b"%d" % n), f"run {name!r}")
    equal((await world.b.journal("order-1"), await world.b.inbox("order-1")), ([], []), "journal and inbox of the restored one")
    row = await other.get("order-1")
    equal(row and row.updated_at, NOW, "updated_at of the run in another namespace")
    equal(list(await world.b.due(now=NOW, limit=1000)), sorted(NAMES), "the ids that are due")


@promise_with("operators")
async def restored_payloads_are_opaque_bytes(world: FullWorld) -> None:
    """Any bytes are kept as they are in the row, the entries and the inbox, with NUL and without UTF-8."""
    for n, payload in enumerate(PAYLOADS):
        run_id = f"run-{n}"
        columns = dict.fromkeys(("input", "seed", "metadata", "progress", "outcome"), payload)
        signal = Signal(seq=1, name="go", payload=payload)
        await world.a.restore(run_row(run_id, **columns), [entry(1, payload=payload, args_hash=payload)], [signal], now=NOW)
        row, journal, inbox, _ = await _everything(world, run_id)
        equal({name: getattr(row, name) for name in columns}, columns, "the row's payloads")
        equal((journal, inbox), ([entry(1, payload=payload, args_hash=payload)], [signal]), "journal and inbox")


@promise_with("operators")
async def a_restored_run_goes_on_after_its_journal(world: FullWorld) -> None:
    """The next holder has what was restored, adds to it under seqs of its own, and cannot write over it."""
    await world.a.restore(run_row(), [entry(1, epoch=at(10**6)), entry(5)], now=NOW)
    claim = (await world.b.claim(1, TTL, [("flow", 1)], now=NOW)).claims[0]
    equal(claim.journal, [entry(1, epoch=at(10**6)), entry(5)], "the journal in the claim")
    for taken in (entry(1), entry(5, payload=b"other")):
        with refused(refused_write("run", f"something else is recorded under seq {taken.seq} already"), "a restored seq"):
            await world.b.record(claim.lease, [entry(6), taken], now=NOW)
    await world.b.record(claim.lease, [entry(6)], now=NOW)
    await world.b.finish(claim.lease, "completed", b"1", entries=[entry(7)], now=NOW)
    equal([line.seq for line in await world.a.journal("run")], [1, 5, 6, 7], "the seqs in the journal")


@promise_with("operators")
async def a_restored_journal_is_no_progress(world: FullWorld) -> None:
    """A restored run has no attempts behind it, and its journal is not what its next worker recorded."""
    await world.a.restore(run_row(attempts=7), [entry(1), entry(9)], now=NOW)
    equal((await world.row()).attempts, 0, "attempts of a restored run")
    equal([(await world.take(now=at(20 * n))).run.attempts for n in range(3)], [1, 2, 3], "attempts at the next acquisitions")


@promise_with("operators")
async def a_restored_inbox_is_consumed_like_any_other(world: FullWorld) -> None:
    """Restored rows keep their seqs, also with gaps; new ones come after the highest, and what is not there is not consumed."""
    await world.a.restore(run_row(), [], INBOX, now=NOW)
    equal(await world.b.signal("run", "go", b"again", dedupe="d", now=NOW), 3, "the seq of a signal that was restored")
    equal(await world.b.signal("run", "go", b"new", now=NOW), 8, "the seq of a new one")
    claim = await world.take(now=NOW)
    equal(([row.seq for row in claim.inbox], claim.inbox_seq), ([3, 7, 8], 8), "the inbox in a claim")
    for missing in (1, 5):
        with refused(refused_write("run", f"its inbox has no row {missing} to consume"), f"consuming row {missing}"):
            await world.b.record(claim.lease, [entry(1)], consume=[3, missing], now=NOW)
    equal((await world.b.record(claim.lease, [entry(1)], consume=[3], now=NOW)).inbox_seq, 8, "inbox_seq in a pulse")
    arrived = await world.b.suspend(claim.lease, wake_at=None, waiting_for=[Awaited("child", "pay")], now=NOW)
    equal(arrived, [INBOX[1]], "what suspend() gave")
    equal([row.seq for row in await world.a.inbox("run", after=3)], [7, 8], "the rows after 3")


@promise_with("operators")
async def a_live_lease_keeps_a_run_from_being_restored(world: FullWorld) -> None:
    """While a lease is alive `restore` raises `LeaseHeld` and changes nothing; when it has expired its holder loses the run."""
    claim = await _busy(world)
    before = await world.dump("run")
    for now in (NOW, at(TTL) - 1):
        with refused(await world.lease_held(), "restore of a run that a worker drives"):
            await world.b.restore(run_row(), [entry(9)], INBOX, now=now)
        equal(await world.dump("run"), before, "everything of the run")
    await world.a.record(claim.lease, [entry(3)], now=NOW)
    await world.b.restore(run_row(), [entry(9)], now=at(TTL))
    equal(await world.a.renew([claim.lease], TTL, now=at(TTL)), [None], "what renewing the old lease gives")
    equal((await world.row()).status, "pending", "the status")


@promise_with("operators")
async def epochs_grow_over_a_restore(world: FullWorld) -> None:
    """The epoch is above the one before and not below the store's clock, whatever the restored row says."""
    lease = await world.lease()
    for epoch in (0, lease.epoch, at(10**6)):
        before = (await world.row()).epoch
        await world.a.restore(run_row(epoch=epoch), [], now=EXPIRED)
        row = await world.row()
        equal(row.epoch, max(before + 1, EXPIRED), "the epoch after a restore")
    holds((await world.take(now=EXPIRED)).lease.epoch > row.epoch, "the next lease has a higher one")
    await world.a.restore(run_row("new", epoch=at(10**6)), [], now=at(5))
    equal((await world.row("new")).epoch, at(5), "the epoch of a run that was not there")


@promise_with("operators")
async def a_hold_outlasts_a_restore(world: FullWorld) -> None:
    """A run that was there stays on hold or not as it was; one that was not is as given. A held one is given to no worker."""
    for held in (True, False):
        run_id = f"was {held}"
        await world.a.create(new_run(run_id), now=NOW)
        if held:
            await world.a.hold(run_id)
        await world.a.restore(run_row(run_id, held=not held), [], now=NOW)
        await world.a.restore(run_row(f"given {held}", held=held), [], now=NOW)
        equal([(await world.row(name)).held for name in (run_id, f"given {held}")], [held, held], "held")
    equal(await claimed_ids(world.b, now=at(1)), ["given False", "was False"], "what can be claimed")
    with refused(LeaseHeld.by_operator("given True"), "acquire of a restored run on hold"):
        await world.b.acquire("given True", TTL, now=at(1))
    await world.b.unhold("given True")
    equal(await claimed_ids(world.b, now=at(1)), ["given True"], "what can be claimed after unhold")


@promise_with("operators")
async def a_restore_that_contradicts_itself_is_refused(world: FullWorld) -> None:
    """Seqs not above zero or not unique, consumed inbox rows and repeated dedupes raise `ValueError`; nothing changes."""
    await _busy(world)
    before = await world.dump("run")
    for entries, wrong in (
        ([entry(0)], "seq 0 is in the journal, but they count from 1"),
        ([entry(1), entry(1)], "seq 1 is twice in the journal"),
        ([entry(2), entry(2, payload=b"x")], "seq 2 is twice in the journal"),
    ):
        with refused(ValueError(wrong), f"restore with the seqs {[line.seq for line in entries]}"):
            await world.b.restore(run_row(), entries, now=EXPIRED)
    first = INBOX[0]
    twice = "two inbox rows have the name and dedupe ('go', 'd'); a signal that was repeated is one row"
    for inbox, wrong in (
        ([msgspec.structs.replace(first, seq=0)], "seq 0 is in the inbox, but they count from 1"),
        ([first, first], "seq 3 is twice in the inbox"),
        (
            [msgspec.structs.replace(first, consumed_by="somebody")],
            "inbox row 3 was consumed; leave it out, its outcome is in the journal",
        ),
        ([first, msgspec.structs.replace(first, seq=9)], twice),
        (
            [msgspec.structs.replace(first, kind="child")],
            "inbox row 3 is a child's outcome and has a dedupe, which only signals have",
        ),
    ):
        with refused(ValueError(wrong), f"restore with the inbox {inbox}"):
            await world.b.restore(run_row(), [], inbox, now=EXPIRED)
    equal(await world.dump("run"), before, "everything of the run")


@promise_with("operators")
async def a_restored_child_notifies_its_parent_when_it_ends_here(world: FullWorld) -> None:
    """Restoring an ended child does not notify its parent; one that ends after it was restored does, like any other."""
    await world.suspended("parent", waiting_for=[Awaited("child", "pay")])
    await world.a.restore(run_row("over", status="completed", outcome=b"1", parent_id="parent", parent_key="pay"), [], now=NOW)
    equal((await world.b.inbox("parent"), (await world.row("over")).parent_notified), ([], False), "inbox and parent_notified")
    await world.a.restore(run_row("child", parent_id="parent", parent_key="pay"), [], now=NOW)
    claim = await world.take("child", now=NOW)
    await world.b.finish(claim.lease, "completed", b"2", now=at(1))
    equal([row.payload for row in await world.a.inbox("parent")], [b"2"], "the parent's inbox")
    equal((await world.row("parent")).wake_at, at(1), "wake_at of the parent")


@promise_with("operators")
async def restored_runs_are_listed_counted_and_purged_like_others(world: FullWorld) -> None:
    """`list`, `count`, `due` and `purge` go by what was restored, and by when: `updated_at` is the instant of the restore."""
    await world.ended("replaced", now=at(-300))
    await world.lease("revived", now=at(-300), workflow="old")
    await world.a.restore(run_row("replaced", wake_at=at(-2)), [], now=at(1))
    await world.a.restore(run_row("revived", status="failed", outcome=b"1", workflow="new"), [], now=at(2))
    await world.a.restore(run_row("asleep", status="suspended", wake_at=None), [], now=at(3))
    equal([line.id for line in await world.b.list()], ["asleep", "revived", "replaced"], "the list")
    equal(
        [line.id for line in await world.b.list(RunFilter(status=("pending",), prefix="re"))],
        ["replaced"],
        "pending ones with a prefix",
    )
    statuses: tuple[Status, ...] = ("pending", "running", "suspended", "completed", "failed")
    counts = [await world.b.count(RunFilter(status=(status,))) for status in statuses]
    equal(counts, [1, 0, 1, 0, 1], "how many there are of each status")
    equal(
        [await world.b.count(RunFilter(workflow=name)) for name in ("flow", "old", "new")], [2, 0, 1], "how many of each workflow"
    )
    equal(list(await world.b.due(now=at(3))), ["replaced"], "what is due")
    equal(await world.b.purge(100, now=at(102) - 1), 0, "purged just before the restored one is old enough")
    equal(await world.b.purge(100, now=at(102)), 1, "purged when it is")
    equal(await world.b.count(), 2, "what is left")


@promise_with("operators")
async def a_run_is_restored_or_taken_but_not_both(world: FullWorld) -> None:
    """When a restore and an acquisition race, either the new holder has what was restored, or the restore was refused."""

    async def race(n: int) -> None:
        run_id = f"run-{n}"
        await world.a.create(new_run(run_id), entries=[entry(1), entry(2)], now=NOW)
        restore = after(n % STAGGER, lambda: world.a.restore(run_row(run_id), [entry(7)], INBOX, now=NOW))
        take = after(n // STAGGER, lambda: world.b.acquire(run_id, TTL, now=NOW))
        restored, claim = await outcomes([restore, take])
        if not isinstance(claim, Claim):
            raise AssertionError(f"the worker got no claim but {claim!r}")
        holds(restored is None or isinstance(restored, LeaseHeld), f"restore() worked or was refused: {restored!r}")
        expected = [entry(7)] if restored is None else [entry(1), entry(2)]
        equal((claim.journal, len(claim.inbox)), (expected, 2 if restored is None else 0), "what the worker's claim brings")
        equal(await world.a.journal(run_id), expected, "the journal")
        await world.b.record(claim.lease, [entry(8)], now=NOW)

    await asyncio.gather(*(race(n) for n in range(STAGGER * STAGGER)))


@promise_with("operators")
async def a_stale_worker_adds_nothing_to_a_restored_run(world: FullWorld) -> None:
    """When a worker whose lease expired records while its run is restored, the journal is what was restored and no more."""

    async def race(n: int) -> None:
        run_id = f"run-{n}"
        lease = await world.lease(run_id)
        write = after(n % STAGGER, lambda: world.record_item(lease, entry(1), entry(2), now=EXPIRED))
        restore = after(n // STAGGER, lambda: world.b.restore(run_row(run_id), [entry(1)], now=EXPIRED))
        await outcomes([write, restore])
        equal((await world.a.journal(run_id), await world.items_in(run_id)), ([entry(1)], []), "journal and items")

    await asyncio.gather(*(race(n) for n in range(STAGGER * STAGGER)))


@promise_with("operators")
async def of_many_restores_one_is_there_whole(world: FullWorld) -> None:
    """When many restore one run at once, row, journal and inbox are afterwards those of one of them."""

    async def restore(store: FullStore, n: int) -> None:
        inbox = [Signal(seq=seq, name=f"of {n}", payload=b"1") for seq in range(1, n + 2)]
        entries = [entry(seq, payload=b"%d" % n) for seq in range(1, n + 2)]
        await store.restore(run_row(input=b"%d" % n), entries, inbox, now=NOW)

    lengths = [n * 7 % 16 for n in range(16)]  # neither growing nor shrinking, so that what one leaves out another may have
    await asyncio.gather(*(restore((world.a, world.b)[n % 2], n) for n in lengths))
    row, journal, inbox, _ = await _everything(world)
    n = int(row.input)
    equal([line.payload for line in journal], [b"%d" % n] * (n + 1), "the journal")
    equal([signal.name for signal in inbox], [f"of {n}"] * (n + 1), "the inbox")
