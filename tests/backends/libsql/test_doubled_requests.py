"""Every request that commits reaches the server twice, and that changes nothing."""

from collections.abc import AsyncIterator, Iterator

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.errors import LeaseLost
from perdure.model.records import Awaited, Item, Lease
from perdure.testing.contract.world import entry, new_run
from tests.backends.libsql.doubling import Doubling

TTL = 60.0


@pytest.fixture
def proxy(url: str) -> Iterator[Doubling]:
    proxy = Doubling(url)
    yield proxy
    proxy.close()


@pytest.fixture
async def doubled(proxy: Doubling, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(proxy.url, table=table)
    yield store
    await store.close()


@pytest.fixture
async def seen(url: str, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(url, table=table)
    yield store
    await store.close()


async def leased(store: LibsqlStore, run_id: str, **columns: object) -> Lease:
    claim = (await store.create(new_run(run_id, **columns), ttl=TTL)).claim
    assert claim is not None
    return claim.lease


async def test_a_record_that_arrives_twice_is_there_once(doubled: LibsqlStore, seen: LibsqlStore, proxy: Doubling) -> None:
    lease = await leased(seen, "run")
    await seen.signal("run", "go", b"1")
    await doubled.record(lease, [entry(1)], consume=[1], items=[Item(stream="s", n=0, payload=b"0")])
    assert proxy.doubled > 0
    assert b"SQLITE_CONSTRAINT" in proxy.second_answers[-1]
    assert await seen.journal("run") == [entry(1)]
    assert len(await seen.items("run", "s")) == 1
    assert await seen.inbox("run") == []


async def test_a_late_copy_of_a_record_cannot_change_a_run_that_was_taken_over(
    seen: LibsqlStore, proxy: Doubling, table: str
) -> None:
    lease = await leased(seen, "run")
    first = LibsqlStore(proxy.url, table=table)
    taken = await seen.acquire("run", TTL, now=lease.until + 1)
    assert taken is not None
    with pytest.raises(LeaseLost):
        await first.record(lease, [entry(1)])
    assert await seen.journal("run") == []
    await first.close()


async def test_a_whole_life_of_requests_that_arrive_twice(doubled: LibsqlStore, seen: LibsqlStore) -> None:
    parent = await leased(doubled, "parent")
    lease = await leased(doubled, "run", parent_id="parent", parent_key="pay")
    await doubled.record(lease, [entry(1)])
    assert await doubled.suspend(lease, wake_at=None, waiting_for=[Awaited("signal", "go")], entries=[entry(2)]) == []
    assert await doubled.signal("run", "go", b"1") == 1
    (claim,) = (await doubled.claim(5, TTL, [("flow", 1)])).claims
    assert (claim.run.id, [line.seq for line in claim.journal], [row.seq for row in claim.inbox]) == ("run", [1, 2], [1])
    await doubled.finish(claim.lease, "completed", b"1", entries=[entry(3)], consume=[1])
    assert [row.payload for row in await seen.inbox("parent")] == [b"1"]
    assert [line.seq for line in await seen.journal("run")] == [1, 2, 3]
    row = await seen.get("run")
    assert row is not None
    assert (row.status, row.attempts) == ("completed", 1)
    await doubled.release(parent)
