"""Runs that do not fit into one document: what is moved out of it is the same run still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import bson
import pytest

from perdure.backends.mongo import MongoStore, overflow, reading
from perdure.backends.mongo.schema import PARTS, Collections
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Item, Lease, Signal
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, new_run, run_row, signals

MIB = 1 << 20
LARGE = b"\x00x" * (4 * MIB)  # 8 MiB, as much as one value may have


async def leased(store: MongoStore, run_id: str = "run", **columns: Any) -> Lease:
    claim = (await store.create(new_run(run_id, **columns), ttl=TTL, now=NOW)).claim
    assert claim is not None
    return claim.lease


async def stored(store: MongoStore) -> dict[str, int]:
    """How many documents each collection has, unless it has none."""
    db = store._connections.collections("")

    async def count() -> dict[str, int]:
        return {part: await db.of(part).count_documents({}) for part in PARTS if part != "meta"}

    return {part: number for part, number in (await store._connections.run(count())).items() if number}


async def document(store: MongoStore, run_id: str = "run") -> dict[str, Any]:
    """The run's document."""
    found = await store._connections.run(store._connections.collections("").runs.find_one({"_id": run_id}))
    assert found is not None
    return found


async def test_a_run_may_have_more_than_a_document_holds(store: MongoStore) -> None:
    lease = await leased(store)
    for seq in range(1, 80):
        await store.record(lease, [entry(seq, payload=b"%d" % seq * (MIB // 8))], now=NOW)
    expected = [entry(seq, payload=b"%d" % seq * (MIB // 8)) for seq in range(1, 80)]
    assert sum(len(line.payload) for line in expected) > 16 * MIB
    assert await store.journal("run") == expected
    assert await store.journal("run", after=60) == expected[60:]
    claim = await store.acquire("run", TTL, now=EXPIRED)
    assert claim is not None
    assert claim.journal == expected
    with pytest.raises(PersistenceError, match="something else is recorded under seq 4"):
        await store.record(claim.lease, [entry(4)], now=EXPIRED)
    await store.record(claim.lease, expected[2:4], now=EXPIRED)  # a lost reply, long after it was moved
    assert (await document(store))["length"] == len(expected)
    assert len(bson.encode(await document(store))) < 2 * MIB
    await store.delete("run")
    assert await stored(store) == {}


async def test_one_record_may_have_more_than_a_document_holds(store: MongoStore) -> None:
    lease = await leased(store)
    large = [entry(seq, payload=LARGE) for seq in (1, 2, 3)]
    items = [Item(stream="log", n=0, payload=LARGE)]
    await store.record(lease, large, items=items, now=NOW)
    await store.record(lease, large, items=items, now=NOW)
    assert await store.journal("run") == large
    assert await store.items("run", "log") == items
    with pytest.raises(PersistenceError, match="under seq 2"):
        await store.record(lease, [entry(4, payload=LARGE), entry(2)], now=NOW)
    await store.finish(lease, "completed", LARGE, entries=[entry(4, payload=LARGE)], now=NOW)
    assert [line.seq for line in await store.journal("run")] == [1, 2, 3, 4]


async def test_every_column_may_be_large(store: MongoStore) -> None:
    lease = await leased(store, input=LARGE, metadata=LARGE)
    await store.report(lease, LARGE)
    await store.finish(lease, "completed", LARGE, now=NOW)
    row = await store.get("run")
    assert row is not None
    assert row.input == row.metadata == row.progress == row.outcome == LARGE
    assert not (await store.create(new_run(input=LARGE, metadata=LARGE), now=NOW)).is_new
    assert await store.purge(0, now=NOW) == 1
    assert await stored(store) == {}


async def test_a_long_inbox_is_moved_and_nothing_of_it_lost(store: MongoStore) -> None:
    lease = await leased(store)
    for n in range(1, 151):
        assert await store.signal("run", f"name-{n}", b"%d" % n, dedupe=f"d-{n}", now=NOW) == n
    assert (await stored(store))["signals"] >= 60
    assert [row.seq for row in await store.inbox("run")] == list(range(1, 151))
    assert await store.signal("run", "name-3", b"again", dedupe="d-3", now=NOW) == 3
    await store.record(lease, [entry(1)], consume=[2, 149], now=NOW)
    await store.record(lease, [entry(1)], consume=[2, 149], now=NOW)
    with pytest.raises(PersistenceError, match="no row 151"):
        await store.record(lease, [entry(2)], consume=[3, 151], now=NOW)
    assert [row.seq for row in await store.inbox("run", after=148)] == [150]
    assert len(await store.inbox("run")) == 148
    assert await store.signal("run", "name-2", b"again", dedupe="d-2", now=NOW) == 2
    arrived = await store.suspend(lease, wake_at=None, waiting_for=signals("name-5"), now=NOW)
    assert [row.seq for row in arrived] == [5]
    arrived = await store.suspend(lease, wake_at=None, waiting_for=signals("name-2", "name-5", "name-150"), now=NOW)
    assert [row.seq for row in arrived] == [5, 150]
    arrived = await store.suspend(lease, wake_at=None, waiting_for=signals("name-2", "name-5"), consume=[5], now=NOW)
    assert arrived == []
    claim = await store.acquire("run", TTL, due_only=False, now=NOW)
    assert claim is not None
    assert (len(claim.inbox), claim.inbox_seq) == (147, 150)


async def test_consumed_rows_are_marked_where_they_were_moved(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "MANY_CONSUMED", 5)
    monkeypatch.setattr("perdure.backends.mongo.recording.MANY_CONSUMED", 5)
    lease = await leased(store)
    await asyncio.gather(*(store.signal("run", "go", b"%d" % n, now=NOW) for n in range(1, 70)))
    for n in range(1, 30):
        await store.record(lease, [entry(n)], consume=[n], now=NOW)
    assert [row.seq for row in await store.inbox("run")] == list(range(30, 70))
    found = await document(store)
    assert len(found["consumed"]) <= 5
    assert found["moved_waiting"] == (await stored(store))["signals"] - 29


async def test_a_large_signal_wakes_its_run(store: MongoStore) -> None:
    lease = await leased(store)
    await store.suspend(lease, wake_at=None, waiting_for=signals("go"), now=NOW)
    assert await store.signal("run", "go", LARGE, dedupe="d", now=NOW) == 1
    assert await store.signal("run", "go", LARGE, dedupe="d", now=NOW) == 1
    assert await store.signal("run", "other", LARGE, now=NOW) == 2
    claim = await store.acquire("run", TTL, now=NOW)
    assert claim is not None
    assert [(row.seq, row.payload) for row in claim.inbox] == [(1, LARGE), (2, LARGE)]
    arrived = await store.suspend(claim.lease, wake_at=None, waiting_for=signals("go"), now=NOW)
    assert [row.seq for row in arrived] == [1]
    await store.record(claim.lease, [entry(1)], consume=[1], now=NOW)
    assert [row.seq for row in await store.inbox("run")] == [2]


async def test_many_children_with_large_outcomes_tell_one_parent(store: MongoStore) -> None:
    parent = await leased(store, "parent")
    outcome = b"x" * (100 << 10)
    leases = [await leased(store, f"child-{n}", parent_id="parent", parent_key=f"key-{n}") for n in range(12)]
    await asyncio.gather(*(store.finish(lease, "completed", outcome, now=NOW) for lease in leases))
    large = await leased(store, "large", parent_id="parent", parent_key="large")
    await store.finish(large, "completed", LARGE, now=NOW)
    rows = await store.inbox("parent")
    assert [row.seq for row in rows] == list(range(1, 14))
    assert {row.payload for row in rows[:-1]} == {outcome}
    assert rows[-1].payload == LARGE
    await store.record(parent, [entry(1)], consume=[1, 13], now=NOW)
    assert len(await store.inbox("parent")) == 11


async def test_streams_are_moved_and_counted(store: MongoStore) -> None:
    lease = await leased(store)
    for n in range(100):
        items = [Item(stream=stream, n=n, payload=b"%d" % n) for stream in ("log", "a\1b", "$out") if stream != "$out" or n < 3]
        await store.record(lease, items=items, now=NOW)
    await store.record(lease, items=[Item(stream="log", n=5, payload=b"5")], now=NOW)
    with pytest.raises(PersistenceError, match="another item 5"):
        await store.record(lease, items=[Item(stream="log", n=5, payload=b"other")], now=NOW)
    await store.record(lease, items=[Item(stream="$out", n=3, payload=b"3")], now=NOW)
    assert [item.n for item in await store.items("run", "log", limit=200)] == list(range(100))
    assert [item.n for item in await store.items("run", "a\1b", after=97)] == [98, 99]
    claim = await store.acquire("run", TTL, now=EXPIRED)
    assert claim is not None
    assert claim.item_counts == {"log": 100, "a\1b": 100, "$out": 4}


async def test_a_large_run_is_restored_as_a_whole(store: MongoStore) -> None:
    await leased(store)
    entries = [entry(seq, payload=b"%05d" % seq * 50_000) for seq in range(1, 71)]
    rows = [Signal(seq=seq, name="go", payload=b"%05d" % seq * (40_000 + 20_000 * (seq % 2))) for seq in range(3, 21)]
    await store.restore(run_row(), entries, rows, now=EXPIRED)
    assert (await store.journal("run"), await store.inbox("run")) == (entries, rows)
    before = await stored(store)
    await store.restore(run_row(), entries[:15], rows[:2], now=EXPIRED)
    assert (await store.journal("run"), await store.inbox("run")) == (entries[:15], rows[:2])
    after = await stored(store)
    assert before == {"runs": 1, "steps": 70, "signals": 18, "payloads": 9}
    assert after == {"runs": 1, "steps": 15, "payloads": 1}
    assert not (await store.create(new_run(), entries=entries, now=EXPIRED)).is_new
    assert await stored(store) == after


async def test_a_run_that_began_with_a_long_journal_goes_on_after_it(store: MongoStore) -> None:
    entries = [entry(seq) for seq in range(1, 1001)]
    claim = (await store.create(new_run(), ttl=TTL, entries=entries, now=NOW)).claim
    assert claim is not None
    assert claim.journal == entries
    await store.record(claim.lease, [entry(1001)], now=NOW)
    await store.finish(claim.lease, "failed", b"1", now=NOW)
    await store.reopen("run", ["step-7"], now=NOW)
    assert [line.seq for line in await store.journal("run")] == list(range(1, 1003))


async def test_who_moves_a_run_that_was_replaced_adds_nothing(store: MongoStore) -> None:
    lease = await leased(store)
    for seq in range(1, 64):
        await store.record(lease, [entry(seq)], now=NOW)
    db = store._connections.collections("")

    async def move() -> None:
        found = await db.runs.find_one({"_id": "run"})
        assert found is not None
        late = overflow._OverflowMove(found | {"weight": 1 << 30})
        await db.runs.delete_one({"_id": "run"})
        await overflow.insert_missing(db.steps, late.steps)
        await db.runs.update_one(late.condition, late.pipeline)

    await store._connections.run(move())
    with pytest.raises(LeaseLost):
        await store.record(lease, [entry(64)], now=NOW)
    other = await leased(store)
    await store.record(other, [entry(1, payload=b"new")], now=NOW)
    assert await store.journal("run") == [entry(1, payload=b"new")]


async def _late_move(store: MongoStore, meanwhile: Callable[[], Awaitable[object]]) -> None:
    """Move everything of the run, with something else happening between the look at it and the move."""
    db = store._connections.collections("")
    late = overflow._OverflowMove(await document(store) | {"weight": 1 << 30, "inbox_weight": 1 << 30})
    await meanwhile()

    async def move() -> None:
        await overflow.insert_missing(db.steps, late.steps)
        await overflow.insert_missing(db.signals, late.signals)
        await db.runs.update_one(late.condition, late.pipeline)

    await store._connections.run(move())


async def test_a_run_that_is_moved_while_it_is_loaded_is_claimed_whole(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await leased(store)
    await asyncio.gather(*(store.record(lease, [entry(n)], now=NOW) for n in range(1, 71)))
    await asyncio.gather(*(store.signal("run", "go", b"1", now=NOW) for _ in range(70)))
    really, times_moved = reading.inbox_of, 0

    async def moved_meanwhile(db: Collections, found: Any) -> list[Signal]:
        nonlocal times_moved
        if times_moved < 2:
            times_moved += 1
            await db.runs.update_one({"_id": "run"}, {"$inc": {"moves": 1}})
        return await really(db, found)

    monkeypatch.setattr("perdure.backends.mongo.claims.inbox_of", moved_meanwhile)
    (claim,) = (await store.claim(1, TTL, [("flow", 1)], now=EXPIRED)).claims
    assert (len(claim.journal), len(claim.inbox), claim.run.attempts, times_moved) == (70, 70, 1, 2)


async def test_what_is_consumed_while_it_is_moved_is_consumed(store: MongoStore) -> None:
    lease = await leased(store)
    for n in range(3):
        await store.signal("run", f"name-{n}", b"1", now=NOW)
    await _late_move(store, lambda: store.record(lease, [entry(1)], consume=[2], now=NOW))
    assert [row.seq for row in await store.inbox("run")] == [1, 3]
    assert (await document(store))["moved_waiting"] == 2
    assert await store.suspend(lease, wake_at=None, waiting_for=signals("name-1"), now=NOW) == []


async def test_who_moves_what_was_moved_already_takes_nothing_out(store: MongoStore) -> None:
    lease = await leased(store)
    await store.record(lease, [entry(1), entry(2)], now=NOW)
    await store.signal("run", "go", b"1", now=NOW)

    async def move_and_go_on() -> None:
        async def nothing() -> None:
            pass

        await _late_move(store, nothing)
        await store.record(lease, [entry(3), entry(4)], now=NOW)
        await store.signal("run", "go", b"2", now=NOW)

    await _late_move(store, move_and_go_on)
    assert await store.journal("run") == [entry(1), entry(2), entry(3), entry(4)]
    assert [row.seq for row in await store.inbox("run")] == [1, 2]


async def test_movers_at_once_lose_nothing(store: MongoStore) -> None:
    lease = await leased(store)
    db = store._connections.collections("")

    async def move() -> None:
        for _ in range(30):
            await overflow.move_overflow(db, ["run"])

    async def write() -> None:
        for seq in range(1, 101):
            await store.record(lease, [entry(seq, payload=b"x" * 20_000)], now=NOW)
            if seq % 4 == 0:
                await store.signal("run", "go", b"y" * 20_000, now=NOW)
                await store.record(lease, consume=[seq // 4], now=NOW)

    async with asyncio.timeout(60):
        await asyncio.gather(write(), *(store._connections.run(move()) for _ in range(3)))
    assert [line.seq for line in await store.journal("run")] == list(range(1, 101))
    assert await store.inbox("run") == []
