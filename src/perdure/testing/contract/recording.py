"""Recording: the journal only grows, and what is in it never changes."""

from __future__ import annotations

import asyncio
from typing import Final

from perdure.errors import LeaseLost, ValueNotStorable
from perdure.model.journal import Entry
from perdure.model.records import Pulse
from perdure.testing.contract.cases import promise
from perdure.testing.contract.world import (
    EXPIRED,
    NOW,
    World,
    at,
    entry,
    equal,
    new_input,
    new_run,
    refused,
    refused_write,
    signals,
)

FULL: Final = Entry(
    seq=4,
    key="charge/é",
    phase="open",
    kind="signal",
    name="charge",
    ok=False,
    payload=b"\x00\xff\xfe{",
    attempt=3,
    args_hash=b"\x00\xff",
    started_at=at(1),
    ended_at=at(2),
    epoch=NOW,
)
LONG: Final = 9 << 20  # more than a value may have that the engine gives to a store
PAYLOADS: Final = (b"", b"null", b"\x00", b"a\x00b", b"\xff\xfe", b"\xed\xa0\x80", bytes(range(256)), b"'; --", b"x" * 100_000)


@promise
async def an_entry_reads_back_as_it_was_written(world: World) -> None:
    """Every field of an entry reads back the same, on every handle."""
    lease = await world.lease()
    plain = entry(5, args_hash=None)
    await world.a.record(lease, [FULL, plain], now=NOW)
    equal(await world.b.journal("run"), [FULL, plain], "the journal")


@promise
async def payloads_are_opaque_bytes(world: World) -> None:
    """Any bytes are kept as they are in inputs, entries, signals and outcomes, with NUL and without UTF-8."""
    for n, payload in enumerate(PAYLOADS):
        run_id = f"run-{n}"
        hashed = payload or b"\xff"  # an empty hash would say that the run has no input
        claim = await world.start(run_id, input=payload, input_hash=hashed, seed=payload, metadata=payload)
        await world.a.signal(run_id, "go", payload, now=NOW)
        await world.a.record(claim.lease, [entry(1, payload=payload, args_hash=payload)], now=NOW)
        equal([row.payload for row in await world.b.inbox(run_id)], [payload], "the signal's payload")
        equal((await world.b.journal(run_id))[0], entry(1, payload=payload, args_hash=payload), "the entry")
        await world.a.finish(claim.lease, "completed", payload, now=NOW)
        row = await world.row(run_id)
        equal({row.input, row.seed, row.metadata, row.outcome}, {payload}, "the row's payloads")
        equal(row.input_hash, hashed, "the input's hash")


@promise
async def a_long_value_is_kept_or_refused_for_good(world: World) -> None:
    """Nine megabytes are kept; a store that says it cannot refuses with `ValueNotStorable`, and then nothing has changed."""
    most = world.factory.longest_value
    payload = b'"' * (LONG if most is None else most + 1)
    if most is None:
        lease = (await world.start(input=payload)).lease
        await world.a.record(lease, [entry(1, payload=payload)], now=NOW)
        await world.a.finish(lease, "completed", payload, now=NOW)
        equal([one.payload for one in await world.b.journal("run")], [payload], "the entry's payload")
        row = await world.row("run")
        equal({row.input, row.outcome}, {payload}, "the row's payloads")
        return
    with refused(ValueNotStorable, "a long input"):
        await world.a.create(new_run("long", input=payload), now=NOW)
    equal(await world.b.get("long"), None, "the run with a long input")
    lease = await world.lease()
    before = await world.row("run")
    with refused(ValueNotStorable, "a long result"):
        await world.a.record(lease, [entry(1), entry(2, payload=payload)], now=NOW)
    with refused(ValueNotStorable, "a long outcome"):
        await world.a.finish(lease, "completed", payload, entries=[entry(1)], now=NOW)
    with refused(ValueNotStorable, "a long input of a run that starts over"):
        await world.a.continue_as(lease, new_input(input=payload), now=NOW)
    with refused(ValueNotStorable, "a long signal"):
        await world.a.signal("run", "go", payload, now=NOW)
    equal(await world.b.journal("run"), [], "the journal")
    equal(await world.b.inbox("run"), [], "the inbox")
    equal(await world.row("run"), before, "the row")
    await world.a.record(lease, [entry(1), entry(2)], now=NOW)
    equal(await world.b.journal("run"), [entry(1), entry(2)], "the journal, with another value under the same number")


@promise
async def the_journal_is_by_seq(world: World) -> None:
    """`journal` gives entries by seq, whatever the order of writing, only those above `after`, and none for an unknown run."""
    lease = await world.lease()
    await world.a.record(lease, [entry(12), entry(2)], now=NOW)
    await world.a.record(lease, [entry(1)], now=NOW)
    equal([line.seq for line in await world.b.journal("run")], [1, 2, 12], "all seqs")
    equal([line.seq for line in await world.b.journal("run", after=2)], [12], "seqs above 2")
    equal(await world.b.journal("unknown"), [], "the journal of an unknown run")


@promise
async def a_record_does_not_touch_the_row(world: World) -> None:
    """`record` only inserts: the run's row stays as it is."""
    claim = await world.start()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.record(claim.lease, [entry(1)], consume=[1], now=at(1))
    equal(await world.row(), claim.run, "the row")


@promise
async def a_lost_reply_can_be_sent_again(world: World) -> None:
    """The same record sent twice under one lease changes nothing the second time and gives the same answer."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    batch = [entry(1), entry(2)]
    first = await world.a.record(lease, batch, consume=[1], now=NOW)
    before = await world.dump("run")
    second = await world.a.record(lease, batch, consume=[1], now=at(1))
    equal((first, second), (Pulse(1, False), Pulse(1, False)), "both answers")
    equal(await world.dump("run"), before, "everything of the run")


@promise
async def a_lost_reply_may_be_sent_again_with_more(world: World) -> None:
    """When some entries of a record are there already, the same as before, only the others are added."""
    lease = await world.lease()
    await world.a.record(lease, [entry(1), entry(2)], now=NOW)
    await world.a.record(lease, [entry(1), entry(2), entry(3)], now=NOW)
    await world.a.suspend(lease, wake_at=None, entries=[entry(3), entry(4)], now=NOW)
    equal(await world.b.journal("run"), [entry(1), entry(2), entry(3), entry(4)], "the journal")


@promise
async def what_is_recorded_is_never_overwritten(world: World) -> None:
    """Another entry under a seq that is taken raises `PersistenceError`, and nothing of that record is written."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.record(lease, [entry(1)], now=NOW)
    before = await world.dump("run")
    other, error = entry(1, payload=b"other"), refused_write("run", "something else is recorded under seq 1 already")
    for changed in (other, entry(1, epoch=lease.epoch + 1), entry(1, attempt=2)):
        with refused(error, "record of another entry under a seq that is taken"):
            await world.a.record(lease, [entry(2), changed], consume=[1], now=NOW)
    with refused(error, "suspend with another entry under a seq that is taken"):
        await world.a.suspend(lease, wake_at=None, entries=[other], consume=[1], now=NOW)
    with refused(error, "finish with another entry under a seq that is taken"):
        await world.a.finish(lease, "completed", b"1", entries=[other], consume=[1], now=NOW)
    equal(await world.dump("run"), before, "everything of the run")


@promise
async def a_record_has_one_entry_for_each_seq(world: World) -> None:
    """Two different entries under one seq in one record are refused, and the same one twice is there once."""
    lease, error = await world.lease(), refused_write("run", "two different entries have seq 1")
    with refused(error, "record of two different entries under one seq"):
        await world.a.record(lease, [entry(1), entry(2), entry(1, payload=b"other")], now=NOW)
    with refused(error, "finish with two different entries under one seq"):
        await world.a.finish(lease, "completed", b"1", entries=[entry(1), entry(1, attempt=2)], now=NOW)
    equal(await world.b.journal("run"), [], "the journal")
    await world.a.record(lease, [entry(1), entry(1)], now=NOW)
    equal(await world.b.journal("run"), [entry(1)], "the journal")


@promise
async def only_what_is_in_the_inbox_can_be_consumed(world: World) -> None:
    """Consuming an inbox row that is not there raises `PersistenceError`, and nothing of that record is written."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    before = await world.dump("run")
    for missing in (2, 0, -1):
        with refused(refused_write("run", f"its inbox has no row {missing} to consume"), f"consuming inbox row {missing}"):
            await world.a.record(lease, [entry(1)], consume=[1, missing], now=NOW)
    with refused(refused_write("run", "its inbox has no row 2 to consume"), "finish with an inbox row that is not there"):
        await world.a.finish(lease, "completed", b"1", consume=[2], now=NOW)
    equal(await world.dump("run"), before, "everything of the run")


@promise
async def a_wait_closes_and_its_signal_is_consumed_together(world: World) -> None:
    """Entries and consumed inbox rows of one record are there together or not at all."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.take()
    with refused(LeaseLost("run", lease.epoch), "record with a stale lease"):
        await world.a.record(lease, [entry(1)], consume=[1], now=EXPIRED)
    equal([row.seq for row in await world.b.inbox("run")], [1], "the inbox, as the signal's wait was not recorded")
    equal(await world.b.journal("run"), [], "the journal")
    claim = await world.take(now=at(99))
    await world.b.record(claim.lease, [entry(1)], consume=[1], now=at(99))
    equal((await world.a.inbox("run"), await world.a.journal("run")), ([], [entry(1)]), "inbox and journal once it was recorded")


@promise
async def every_closing_verb_records_first(world: World) -> None:
    """`suspend` and `finish` write their entries and consume their inbox rows in the same transition."""
    first = await world.lease("suspending")
    second = await world.lease("finishing")
    for run_id in ("suspending", "finishing"):
        await world.a.signal(run_id, "go", b"1", now=NOW)
    await world.a.suspend(first, wake_at=None, waiting_for=signals("go"), entries=[entry(1)], consume=[1], now=NOW)
    await world.a.finish(second, "failed", b"1", entries=[entry(1)], consume=[1], now=NOW)
    for run_id, status in (("suspending", "suspended"), ("finishing", "failed")):
        equal((await world.row(run_id)).status, status, "the status")
        equal((await world.b.journal(run_id), await world.b.inbox(run_id)), ([entry(1)], []), "journal and inbox")


@promise
async def a_holder_may_submit_many_records_at_once(world: World) -> None:
    """Records submitted by many tasks of the holder, on both handles, are all there."""
    leases = [await world.lease(f"run-{n}") for n in range(4)]
    calls = [(world.a, world.b)[seq % 2].record(lease, [entry(seq)], now=NOW) for seq in range(1, 26) for lease in leases]
    equal(await asyncio.gather(*calls), [Pulse(0, False)] * 100, "the answers")
    for lease in leases:
        equal([line.seq for line in await world.b.journal(lease.run_id)], list(range(1, 26)), "the seqs in the journal")


@promise
async def what_was_passed_in_can_be_changed_afterwards(world: World) -> None:
    """The store keeps nothing of the caller's: lists changed after a call, or filled for the next one, change no run."""
    lease = await world.lease()
    batch, waiting = [entry(1)], signals("go")
    await world.a.record(lease, batch, now=NOW)
    batch.append(entry(2))
    await world.a.suspend(lease, wake_at=None, waiting_for=waiting, entries=batch, now=NOW)
    waiting.clear()
    batch.clear()
    equal([line.seq for line in await world.a.journal("run")], [1, 2], "the journal")
    equal(list((await world.row()).waiting_for), signals("go"), "what the run waits for")


@promise
async def what_was_returned_can_be_changed_afterwards(world: World) -> None:
    """What a store returns is the caller's: changing it changes no run."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.record_item(lease, entry(1))
    before = await world.dump("run")
    (await world.a.journal("run")).clear()
    (await world.a.inbox("run")).clear()
    (await world.items_in("run")).clear()
    (await world.a.list()).clear()
    equal(await world.dump("run"), before, "everything of the run")
    claim = await world.take()
    counts = dict(claim.item_counts)
    claim.journal.append(entry(9))
    claim.inbox.clear()
    claim.item_counts["log"] = 7
    again = await world.take(now=at(99))
    equal((len(again.journal), len(again.inbox), again.item_counts), (1, 1, counts), "what the next claim brings")
    await world.a.create(new_run("fresh"), now=NOW)
    equal(await world.a.journal("fresh"), [], "the journal of another run")
