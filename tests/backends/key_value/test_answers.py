"""Replies that are lost, due keys that no document names, and runs that change while they are read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from obstore.store import MemoryStore

from perdure.backends.key_value import KeyValueRunStore, lookup
from perdure.backends.key_value.keys import DueKey, run_name
from perdure.errors import PersistenceError, SnapshotCorrupt
from perdure.model.records import Awaited
from perdure.testing.contract.world import EXPIRED, NOW, TTL, at, entry, new_run, signals
from tests.backends.key_value.faulty import Bucket, ForgetfulBucket, SlowBucket, StoppingBucket
from tests.campaign import times


@pytest.mark.parametrize("says", ["nothing", "no"])
async def test_a_write_whose_answer_was_lost_is_known_by_its_mark(says: str) -> None:
    memory = MemoryStore()
    forgetful = ForgetfulBucket(memory, says=says)
    store = KeyValueRunStore(forgetful)
    created = await store.create(new_run(), ttl=TTL, now=NOW)
    assert created.is_new
    assert created.claim is not None
    assert [await store.signal("run", "go", b"1", now=NOW) for _ in range(3)] == [1, 2, 3]
    await store.record(created.claim.lease, [entry(1)], consume=[2], now=NOW)
    await store.finish(created.claim.lease, "failed", b"1", now=NOW)
    await store.reopen("run", ["step-1"], now=at(1))
    claims = (await store.claim(5, TTL, [("flow", 1)], now=at(1))).claims
    assert [line.phase for line in claims[0].journal] == ["close", "drop"]
    assert [row.seq for row in claims[0].inbox] == [1, 3]
    assert forgetful.lost >= 8
    await store.close()
    healthy = KeyValueRunStore(memory)
    assert [line.seq for line in await healthy.journal("run")] == [1, 2]
    assert await healthy.count() == 1
    await healthy.close()


async def test_a_mark_is_found_also_when_others_have_written_since() -> None:
    memory = MemoryStore()
    other = KeyValueRunStore(memory)

    class Overtaken(ForgetfulBucket):
        async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
            try:
                return await super().put_async(path, data, **options)
            except ConnectionError:
                await other.signal("run", "theirs", b"1", now=NOW)
                raise

    store = KeyValueRunStore(Overtaken(memory, says="nothing"))
    await other.create(new_run(), now=NOW)
    assert await store.signal("run", "ours", b"1", now=NOW) == 1
    assert [row.name for row in await other.inbox("run")] == ["ours", "theirs"]
    await store.close()
    await other.close()


async def test_an_error_that_wrote_nothing_is_told() -> None:
    class Broken(Bucket):
        async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
            if "/r/" in path:
                raise ConnectionError("there is no way\nAuthorization: secret")
            return await super().put_async(path, data, **options)

    store = KeyValueRunStore(Broken(MemoryStore()))
    with pytest.raises(PersistenceError, match="ConnectionError: there is no way") as told:
        await store.create(new_run(), now=NOW)
    assert "secret" not in str(told.value)
    await store.close()


async def test_due_keys_that_no_document_names_are_ignored_and_then_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryStore()
    store = KeyValueRunStore(memory)
    await store.create(new_run("there"), now=NOW)
    row = await store.get("there")
    assert row is not None
    stale = DueKey.of(row, owes_parent=False).with_nonce()
    ghost = stale._replace(run=run_name("ghost")).with_nonce()
    for due_key in (stale, ghost):
        await memory.put_async(f"perdure/n-/x/{due_key.name}", b"-")
    assert [claim.run.id for claim in (await store.claim(9, TTL, [("flow", 1)], now=NOW)).claims] == ["there"]
    assert [line.id for line in await store.list()] == ["there"]
    assert await store.count() == 1
    monkeypatch.setattr(lookup, "_GRACE", 0.0)
    await store.due(now=NOW)
    left = [one["path"] async for page in memory.list("perdure/n-/x/") for one in page]
    assert len(left) == 2, "its due key and its exists key"
    assert (await store.create(new_run("ghost"), now=NOW)).is_new
    assert list(await store.due(now=NOW)) == ["ghost"]
    await store.close()


async def test_a_run_with_a_due_key_too_many_keeps_its_place_in_lists() -> None:
    memory = MemoryStore()
    store = KeyValueRunStore(memory)
    for n in range(3):
        await store.create(new_run(f"run-{n}"), now=NOW + n)
    oldest = await store.get("run-0")
    assert oldest is not None
    await memory.put_async(f"perdure/n-/x/{DueKey.of(oldest, owes_parent=False).with_nonce().name}", b"-")
    for limit in (1, 2, 3):
        expected = ["run-2", "run-1", "run-0"][:limit]
        assert [line.id for line in await store.list(limit=limit)] == expected
    await store.close()


async def test_a_due_key_that_was_deleted_too_early_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the write of a run's due key and that of its document another process finds the key and deletes it."""
    monkeypatch.setattr(lookup, "_GRACE", 0.0)
    memory = MemoryStore()
    slow, hasty = StoppingBucket(memory, putting="/r/"), StoppingBucket(memory, deleting="/x/due/")
    writer, sweeper = KeyValueRunStore(slow), KeyValueRunStore(hasty)
    creating = asyncio.create_task(writer.create(new_run(), now=NOW))
    await slow.stop.reached()
    sweeping = asyncio.create_task(sweeper.due(now=NOW))
    await hasty.stop.reached()
    slow.stop.go_on()
    assert (await creating).is_new
    hasty.stop.go_on()
    await sweeping
    assert list(await sweeper.due(now=NOW)) == ["run"]
    assert [claim.run.id for claim in (await writer.claim(9, TTL, [("flow", 1)], now=NOW)).claims] == ["run"]
    await writer.close()
    await sweeper.close()


@pytest.mark.parametrize("seed", range(times(100)))
async def test_no_wake_is_lost_when_due_keys_are_deleted_while_runs_change(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at a due key that is not yet named by its run deletes it; the run gets another, and is found by that."""
    monkeypatch.setattr(lookup, "_GRACE", 0.0)
    memory = MemoryStore()
    writers = [KeyValueRunStore(SlowBucket(memory, seed * 10 + n, turns=100)) for n in range(3)]
    is_over = False

    async def write(store: KeyValueRunStore, n: int) -> None:
        created = await store.create(new_run(f"run-{n}"), ttl=TTL, now=NOW)
        assert created.claim is not None
        await store.suspend(created.claim.lease, wake_at=at(50), waiting_for=signals("go"), now=NOW)
        await store.signal(f"run-{n}", "go", b"1", now=at(1))

    async def sweep() -> None:
        store = KeyValueRunStore(SlowBucket(memory, -seed, turns=3))
        while not is_over:
            await store.due(now=EXPIRED)
            await store.list()
        await store.close()

    sweepers = [asyncio.create_task(sweep()) for _ in range(2)]
    await asyncio.gather(*(write(writers[n % 3], n) for n in range(6)))
    is_over = True
    await asyncio.gather(*sweepers)
    assert sorted(await writers[0].due(now=at(1))) == [f"run-{n}" for n in range(6)]
    for store in writers:
        await store.close()


async def test_readers_see_a_run_as_it_was_or_as_it_is() -> None:
    """Payloads that are taken away while somebody reads make him look again, and never are an error."""
    memory = MemoryStore()
    holder, reader = KeyValueRunStore(memory), KeyValueRunStore(SlowBucket(memory, 1))
    claim = (await holder.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    is_over = False

    async def read() -> int:
        seen = 0
        while not is_over:
            row = await reader.get("run")
            assert row is not None
            assert row.progress is None or len(row.progress) == 10_000
            seen += len(await reader.inbox("run"))
        return seen

    reading = asyncio.create_task(read())
    for n in range(60):
        await holder.report(claim.lease, bytes([n]) * 10_000)
        await holder.signal("run", "go", bytes([n]) * 10_000, now=NOW)
        await holder.record(claim.lease, consume=[n + 1], now=NOW)
    is_over = True
    await reading
    await holder.close()
    await reader.close()


async def test_a_child_tells_its_parent_once_whoever_tells_it() -> None:
    memory = MemoryStore()
    stores = [KeyValueRunStore(SlowBucket(memory, n)) for n in range(3)]
    claim = (await stores[0].create(new_run("parent"), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await stores[0].suspend(claim.lease, wake_at=None, waiting_for=[Awaited("child", "pay")], now=NOW)
    child = (await stores[0].create(new_run("child", parent_id="parent", parent_key="pay"), ttl=TTL, now=NOW)).claim
    assert child is not None
    ending = asyncio.create_task(stores[0].finish(child.lease, "completed", b"1", now=at(1)))
    while not ending.done():
        await asyncio.gather(*(store.due(now=at(2)) for store in stores[1:]))
    await ending
    await asyncio.gather(*(store.due(now=at(2)) for store in stores))
    assert [row.name for row in await stores[0].inbox("parent")] == ["pay"]
    for store in stores:
        await store.close()


async def test_a_run_that_cannot_be_read_holds_up_nobody_and_says_so() -> None:
    memory = MemoryStore()
    store = KeyValueRunStore(memory)
    await store.create(new_run("broken"), now=NOW)
    await store.create(new_run("whole"), now=NOW)
    path = f"perdure/n-/r/{run_name('broken')}"
    data = bytes(await (await memory.get_async(path)).bytes_async())
    for harmed in (data[:-1], data.replace(b'"format":2', b'"format":9') if b'"format"' in data else b"{}", b"\xff", b""):
        await memory.put_async(path, harmed)
        fresh = KeyValueRunStore(memory)
        assert list(await fresh.due(now=NOW)) == ["whole"]
        with pytest.raises(SnapshotCorrupt):
            await fresh.get("broken")
        with pytest.raises(SnapshotCorrupt):
            await fresh.create(new_run("broken"), now=NOW)
        await fresh.close()
    kept = bytes(await (await memory.get_async(path)).bytes_async())
    assert kept == b"", "what cannot be read was left as it is"
    await store.close()
