"""What the verbs cost in requests and bytes, counted at the object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from obstore.store import MemoryStore

from perdure.backends.key_value import KeyValueRunStore
from perdure.model.records import Lease
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.world import NOW, TTL, at, entry, new_run
from tests.backends.key_value.faulty import CountingBucket, StoppingBucket

pytestmark = pytest.mark.asyncio


@pytest.fixture
async def bucket() -> CountingBucket:
    return CountingBucket(MemoryStore())


@pytest.fixture
async def store(bucket: CountingBucket) -> AsyncIterator[KeyValueRunStore]:
    store = KeyValueRunStore(bucket)
    await store.setup()
    yield store
    await store.close()


async def leased(store: KeyValueRunStore, run_id: str = "run", **columns: Any) -> Lease:
    claim = (await store.create(new_run(run_id, **columns), ttl=TTL, now=NOW)).claim
    assert claim is not None
    return claim.lease


def kinds(asked: list[str]) -> list[str]:
    """What was asked of documents, chunks and so on: `put r`."""
    return [f"{line.split()[0]} {line.split('/')[2]}" for line in asked]


async def test_a_recorded_step_is_one_conditional_write(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    lease = await leased(store)
    for seq in range(1, 60):
        bucket.requests.clear()
        await store.record(lease, [entry(seq)], now=NOW)
        assert kinds(bucket.requests) == ["put r"]


async def test_the_price_of_a_step_does_not_grow_with_the_run(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    lease = await leased(store, input=b"x" * 1_000_000)
    spans: list[tuple[int, int]] = []
    for first in range(1, 641, 64):
        bucket.requests.clear()
        bucket.bytes_put = 0
        for seq in range(first, first + 64):
            await store.record(lease, [entry(seq)], now=NOW)
        spans.append((len(bucket.requests), bucket.bytes_put))
    requests, sizes = zip(*spans[1:], strict=True)
    assert set(requests) == {65}, "64 documents, and one chunk"
    assert max(sizes) < 1.05 * min(sizes), "bytes for 64 steps, also behind an input of a megabyte"
    assert [line.seq for line in await store.journal("run")] == list(range(1, 641))


async def test_steps_recorded_during_a_write_share_the_next(bucket: CountingBucket) -> None:
    stopping = StoppingBucket(bucket)
    store = KeyValueRunStore(stopping)
    await store.setup()
    lease = await leased(store)
    bucket.requests.clear()
    stopping.putting = "/r/"
    first = asyncio.create_task(store.record(lease, [entry(1)], now=NOW))
    await stopping.stop.reached()
    others = [asyncio.create_task(store.record(lease, [entry(seq)], now=NOW)) for seq in range(2, 51)]
    await asyncio.sleep(0)  # they have asked
    stopping.stop.go_on()
    await asyncio.gather(first, *others)
    assert kinds(bucket.requests) == ["put r", "put r"]
    assert [line.seq for line in await store.journal("run")] == list(range(1, 51))
    await store.close()


async def test_a_one_step_run_is_two_writes_of_its_document(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    bucket.requests.clear()
    lease = await leased(store)
    await store.finish(lease, "completed", b"1", entries=[entry(1)], now=at(1))
    documents = [line for line in kinds(bucket.requests) if line.endswith(" r")]
    assert documents == ["get r", "put r", "put r"], "looked for, created, finished"
    keys = [line for line in kinds(bucket.requests) if line.endswith(" x")]
    assert keys == ["put x", "put x", "put x", "delete x"], "its exists key and its due key, another due key for the first"


async def test_claim_does_not_look_at_runs_that_are_not_due(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    for n in range(50):
        await store.create(new_run(f"asleep-{n}", start_at=at(10_000 * (n + 1))), now=NOW)
        await store.create(new_run(f"theirs-{n}", workflow="other"), now=NOW)
    await store.create(new_run("due"), now=NOW)
    fresh = KeyValueRunStore(bucket)
    await fresh.setup()
    bucket.requests.clear()
    claims = await fresh.claim(10, TTL, [("flow", 1)], now=NOW)
    assert [claim.run.id for claim in claims.claims] == ["due"]
    assert kinds(bucket.requests).count("get r") == 1
    await fresh.close()


async def test_listing_reads_only_what_it_gives(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    for n in range(100):
        await store.create(new_run(f"run-{n:03}"), now=at(n))
    bucket.requests.clear()
    assert [line.id for line in await store.list(limit=5)] == [f"run-{n:03}" for n in (99, 98, 97, 96, 95)]
    assert kinds(bucket.requests).count("get r") <= 64
    bucket.requests.clear()
    assert await store.count(RunFilter(prefix="run-0", status=("pending",))) == 100
    assert kinds(bucket.requests).count("get r") == 0


async def test_a_large_payload_is_written_once(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    lease = await leased(store)
    await store.record(lease, [entry(1, payload=b"x" * 1_000_000)], now=NOW)
    bucket.bytes_put = 0
    for seq in range(2, 30):
        await store.record(lease, [entry(seq)], now=NOW)
    assert bucket.bytes_put < 200_000
    assert (await store.journal("run"))[0].payload == b"x" * 1_000_000


async def test_what_is_no_longer_needed_is_taken_away(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    lease = await leased(store, input=b"x" * 10_000)
    for n in range(5):
        await store.report(lease, b"%d" % n * 10_000)
        await store.signal("run", "go", b"%d" % n * 10_000, now=NOW)
    await store.record(lease, [entry(seq) for seq in range(1, 200)], consume=[1, 2, 3, 4, 5], now=NOW)
    await store.record(lease, [entry(200, payload=b"y" * 10_000)], now=NOW)
    beside = [path async for path in paths(bucket, "perdure/n-/o/")]
    assert len(beside) == 4, "the input, the last progress, one chunk and one step's payload"
    await store.delete("run")
    assert [path async for path in paths(bucket, "perdure/n-/o/")] == []
    assert [path async for path in paths(bucket, "perdure/n-/x/")] == []


async def paths(bucket: CountingBucket, prefix: str) -> AsyncIterator[str]:
    async for page in bucket.list(prefix):
        for one in page:
            yield one["path"]


async def test_a_signal_costs_the_same_however_many_were_sent(bucket: CountingBucket, store: KeyValueRunStore) -> None:
    lease = await leased(store)
    for n in range(1, 601):
        await store.signal("run", "go", b"1", dedupe=f"d-{n}", now=NOW)
        if n % 50 == 0:
            await store.record(lease, consume=range(n - 49, n + 1), now=NOW)
    bucket.bytes_put = 0
    await store.record(lease, [entry(1)], now=NOW)
    assert bucket.bytes_put < 12_000
    assert [await store.signal("run", "go", b"1", dedupe=f"d-{n}", now=NOW) for n in (1, 300, 600)] == [1, 300, 600]
    fresh = KeyValueRunStore(bucket)
    assert await fresh.signal("run", "go", b"1", dedupe="d-256", now=NOW) == 256
    await store.delete("run")
    assert [path async for path in paths(bucket, "perdure/n-/o/")] == []
    await fresh.close()
