"""Streams: items that a run shows while it goes on, numbered in each stream, and its progress."""

from __future__ import annotations

import asyncio

from perdure.model.records import Item, Pulse
from perdure.testing.contract.cases import promise_with
from perdure.testing.contract.identity import NAMES
from perdure.testing.contract.recording import PAYLOADS
from perdure.testing.contract.world import (
    EXPIRED,
    ITEM,
    NOW,
    TTL,
    FullWorld,
    at,
    entry,
    equal,
    new_run,
    refused,
    refused_write,
)

OTHER = Item(stream="log", n=0, payload=b"other")


@promise_with("streams")
async def items_come_in_order_and_in_pages(world: FullWorld) -> None:
    """`items` gives those numbered above `after`, in order, a hundred at a time unless another limit is given."""
    lease = await world.lease()
    written = [Item(stream="log", n=n, payload=b"%d" % n) for n in range(105)]
    await world.a.record(lease, items=list(reversed(written)), now=NOW)
    equal(await world.b.items("run", "log"), written[:100], "the first page")
    equal(await world.b.items("run", "log", after=99), written[100:], "the second page")
    equal(await world.b.items("run", "log", after=3, limit=2), written[4:6], "a small page")
    equal(await world.b.items("run", "log", after=104), [], "the page after the last item")


@promise_with("streams")
async def a_record_takes_thousands_of_items(world: FullWorld) -> None:
    """One record takes as many items as the engine lets wait in memory, and is idempotent as any other."""
    lease = await world.lease()
    written = [Item(stream="log", n=n, payload=b"%d" % n * 100) for n in range(2500)]
    for _ in range(2):
        await world.a.record(lease, [entry(1)], items=written, now=NOW)
    equal(await world.b.items("run", "log", limit=3000), written, "the items")
    equal(await world.b.items("run", "log", after=2498, limit=1), written[2499:], "the last item, by its number")


@promise_with("streams")
async def streams_are_counted_apart(world: FullWorld) -> None:
    """Each stream of each run has its own numbers from 0, and an unknown run or stream has no items."""
    for run_id in ("run", "other"):
        lease = await world.lease(run_id)
        items = [Item(stream=name, n=n, payload=f"{run_id}/{name}/{n}".encode()) for name in ("log", "out") for n in range(2)]
        await world.a.record(lease, items=items, now=NOW)
    equal([item.payload for item in await world.b.items("other", "out")], [b"other/out/0", b"other/out/1"], "items of one stream")
    equal((await world.b.items("run", "none"), await world.b.items("none", "log")), ([], []), "items that do not exist")


@promise_with("streams")
async def streams_that_differ_stay_apart(world: FullWorld) -> None:
    """Names of streams are compared byte for byte."""
    lease = await world.lease()
    items = [Item(stream=name, n=0, payload=name.encode()) for name in NAMES]
    await world.a.record(lease, items=items, now=NOW)
    for item in items:
        equal(await world.b.items("run", item.stream), [item], f"stream {item.stream!r}")


@promise_with("streams")
async def a_claim_brings_the_length_of_each_stream(world: FullWorld) -> None:
    """`item_counts` of a claim, by `claim` or `acquire`, has the number of items in each stream."""
    lease = await world.lease()
    items = [Item(stream="log", n=n, payload=b"%d" % n) for n in range(3)] + [Item(stream="out", n=0, payload=b"x")]
    await world.a.record(lease, items=items, now=NOW)
    (claim,) = (await world.b.claim(1, TTL, [("flow", 1)], now=EXPIRED)).claims
    equal(claim.item_counts, {"log": 3, "out": 1}, "item_counts of claim()")
    equal((await world.take(now=at(99))).item_counts, {"log": 3, "out": 1}, "item_counts of acquire()")


@promise_with("streams")
async def items_and_progress_are_opaque_bytes(world: FullWorld) -> None:
    """Any bytes are kept as they are in items and progress, with NUL and without UTF-8."""
    for number, payload in enumerate(PAYLOADS):
        lease = await world.lease(f"run-{number}")
        item = Item(stream="log", n=0, payload=payload)
        await world.a.record(lease, items=[item], now=NOW)
        await world.a.report(lease, payload)
        equal(await world.b.items(lease.run_id, "log"), [item], "the item")
        equal((await world.row(lease.run_id)).progress, payload, "the progress")


@promise_with("streams")
async def items_and_entries_are_recorded_together(world: FullWorld) -> None:
    """Entries, consumed inbox rows and items of one record are there together; the run's row is not touched."""
    claim = await world.start()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.record(claim.lease, [entry(1)], consume=[1], items=[ITEM], now=at(1))
    seen = (await world.b.journal("run"), await world.b.inbox("run"), await world.b.items("run", "log"))
    equal(seen, ([entry(1)], [], [ITEM]), "journal, inbox and items")
    equal(await world.row(), claim.run, "the row")


@promise_with("streams")
async def a_lost_reply_with_items_can_be_sent_again(world: FullWorld) -> None:
    """The same items sent twice under one lease are there once; sent again with more, only the others are added."""
    lease = await world.lease()
    items = [Item(stream="log", n=n, payload=b"%d" % n) for n in range(3)]
    first = await world.a.record(lease, [entry(1)], items=items[:1], now=NOW)
    second = await world.a.record(lease, [entry(1)], items=items[:1], now=at(1))
    equal((first, second), (Pulse(0, False), Pulse(0, False)), "both answers")
    equal(await world.b.items("run", "log"), items[:1], "the items")
    await world.a.record(lease, [entry(1), entry(2)], items=items, now=NOW)
    equal(await world.b.items("run", "log"), items, "the items after more were sent")


@promise_with("streams")
async def an_item_is_never_overwritten(world: FullWorld) -> None:
    """Another item under a number that is taken raises `PersistenceError`, and nothing of that record is written."""
    lease = await world.lease()
    await world.a.signal("run", "go", b"1", now=NOW)
    await world.a.record(lease, items=[ITEM], now=NOW)
    before = await world.dump("run")
    with refused(refused_write("run", "stream 'log' has another item 0 already"), "another item under a number that is taken"):
        await world.a.record(lease, [entry(1)], consume=[1], items=[Item(stream="log", n=1, payload=b"1"), OTHER], now=NOW)
    equal(await world.dump("run"), before, "everything of the run")


@promise_with("streams")
async def a_record_has_one_item_for_each_number(world: FullWorld) -> None:
    """Two different items under one number in one record are refused, and the same one twice is there once."""
    lease = await world.lease()
    with refused(refused_write("run", "stream 'log' gets two different items 0"), "two different items under one number"):
        await world.a.record(lease, [entry(1)], items=[ITEM, OTHER], now=NOW)
    equal((await world.b.journal("run"), await world.b.items("run", "log")), ([], []), "journal and items")
    await world.a.record(lease, items=[ITEM, ITEM], now=NOW)
    equal(await world.b.items("run", "log"), [ITEM], "the items")


@promise_with("streams")
async def many_items_may_be_submitted_at_once(world: FullWorld) -> None:
    """Items submitted by many tasks of the holder, on both handles, are all there."""
    leases = [await world.lease(f"run-{n}") for n in range(4)]
    calls = [
        (world.a, world.b)[n % 2].record(lease, [entry(n + 1)], items=[Item(stream="log", n=n, payload=b"x")], now=NOW)
        for n in range(25)
        for lease in leases
    ]
    equal(await asyncio.gather(*calls), [Pulse(0, False)] * 100, "the answers")
    for lease in leases:
        equal([item.n for item in await world.b.items(lease.run_id, "log")], list(range(25)), "the numbers of the items")


@promise_with("streams")
async def passed_items_can_be_changed_afterwards(world: FullWorld) -> None:
    """The store keeps no list of the caller's: one that is changed after `record` changes no stream."""
    items = [ITEM]
    await world.a.record(await world.lease(), items=items, now=NOW)
    items.clear()
    equal(await world.a.items("run", "log"), [ITEM], "the items")


@promise_with("streams")
async def progress_is_replaced_by_its_holder(world: FullWorld) -> None:
    """`report` replaces the run's progress, which every reader and the next holder find; `updated_at` stays as it is."""
    lease = await world.lease()
    await world.a.report(lease, b"\x00\xff")
    equal((await world.row()).progress, b"\x00\xff", "the progress")
    await world.a.report(lease, b"")
    equal(((await world.row()).progress, (await world.row()).updated_at), (b"", NOW), "the progress after the second report")
    equal((await world.take()).run.progress, b"", "the progress the next holder finds")


@promise_with("streams")
async def an_expired_lease_streams_until_it_is_taken_over(world: FullWorld) -> None:
    """A lease that expired may report progress and record items until another worker takes the run over."""
    lease = await world.lease()
    await world.a.record(lease, items=[ITEM], now=EXPIRED)
    await world.a.report(lease, b"1")
    equal(((await world.row()).progress, await world.b.items("run", "log")), (b"1", [ITEM]), "progress and items")


@promise_with("streams", "operators")
async def a_deleted_run_leaves_no_items(world: FullWorld) -> None:
    """`delete` removes the run's items and no others."""
    for run_id in ("run", "other"):
        await world.a.record(await world.lease(run_id), items=[ITEM], now=NOW)
    await world.a.delete("other")
    equal((await world.b.items("other", "log"), await world.b.items("run", "log")), ([], [ITEM]), "items after a run was deleted")


@promise_with("streams", "operators")
async def a_purged_run_leaves_no_items(world: FullWorld) -> None:
    """`purge` removes the items of the runs that it deletes: a new run with the same id begins with empty streams."""
    for run_id in ("run", "other"):
        await world.a.record(await world.lease(run_id), items=[ITEM], now=NOW)
    lease = (await world.take("other", now=EXPIRED)).lease
    await world.a.finish(lease, "completed", b"1", now=EXPIRED)
    equal(await world.a.purge(0, now=at(99)), 1, "the runs that were purged")
    equal((await world.b.items("other", "log"), await world.b.items("run", "log")), ([], [ITEM]), "items after a run was purged")
    again = (await world.a.create(new_run("other"), ttl=TTL, now=at(99))).claim
    equal(None if again is None else again.item_counts, {}, "item_counts of a new run with the same id")


@promise_with("streams")
async def a_reopened_run_keeps_its_items(world: FullWorld) -> None:
    """`reopen` leaves the items alone, and the next claim has the length of each stream."""
    lease = await world.lease()
    items = [Item(stream="log", n=n, payload=b"%d" % n) for n in range(3)]
    await world.a.record(lease, [entry(1)], items=items, now=NOW)
    await world.a.finish(lease, "failed", b"1", now=NOW)
    await world.a.reopen("run", ["step-1"], now=at(1))
    claim = await world.take(now=at(2))
    equal((await world.b.items("run", "log"), claim.item_counts), (items, {"log": 3}), "items and item_counts after reopen")
