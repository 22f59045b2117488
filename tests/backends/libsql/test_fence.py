"""Writes that are under way while a run is taken over: open transactions on the server, and streams that it ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.backends.libsql.hrana import committed_results, in_transaction
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Lease
from perdure.testing.contract.world import TTL, entry, new_run
from tests.campaign import times
from tests.servers.libsql import LibsqlServer


@pytest.fixture
async def store(url: str, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(url, table=table)
    yield store
    await store.close()


@pytest.fixture
async def other(url: str, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(url, table=table)
    yield store
    await store.close()


async def leased(store: LibsqlStore, run_id: str = "run") -> Lease:
    claim = (await store.create(new_run(run_id), ttl=TTL)).claim
    assert claim is not None
    return claim.lease


async def test_a_transaction_that_is_held_open_across_a_takeover_writes_nothing(store: LibsqlStore, other: LibsqlStore) -> None:
    """The server ends a transaction that keeps another writer waiting for five seconds; what it recorded is gone with it."""
    lease = await leased(store)

    async def hold_open() -> None:
        async with store.transaction(lease) as transaction:
            await transaction.record([entry(1)])
            taken = await other.acquire("run", TTL, now=lease.until + 1)
            assert taken is not None
            assert taken.journal == []
            await transaction.record([entry(2)])

    with pytest.raises(PersistenceError):
        await hold_open()
    with pytest.raises(LeaseLost):
        await store.record(lease, [entry(1)])
    assert await other.journal("run") == []


async def test_a_transaction_that_commits_before_a_takeover_is_seen_by_the_new_holder(
    store: LibsqlStore, other: LibsqlStore
) -> None:
    lease = await leased(store)
    async with store.transaction(lease) as transaction:
        await transaction.record([entry(1)])
        taking = asyncio.create_task(other.acquire("run", TTL, now=lease.until + 1))
        await asyncio.sleep(0)
    taken = await taking
    assert taken is not None
    assert taken.journal == [entry(1)]


async def test_verbs_wait_for_a_transaction_and_then_go_on(store: LibsqlStore) -> None:
    lease, another = await leased(store), await leased(store, "another")
    async with store.transaction(lease) as transaction:
        writing = [asyncio.ensure_future(store.record(another, [entry(seq)])) for seq in range(1, 20)]
        creating = asyncio.ensure_future(store.create(new_run("third")))
        await transaction.record([entry(1)])
        assert await store.journal("another") == []
    await asyncio.gather(*writing, creating)
    assert [line.seq for line in await store.journal("another")] == list(range(1, 20))


async def test_a_transaction_goes_on_however_many_wait_for_it(store: LibsqlStore) -> None:
    """Its next request never stands in line behind those that wait for its end."""
    lease = await leased(store)
    client = store._connections.client
    nothing = in_transaction([])
    async with store.transaction(lease) as transaction:
        waiting = [asyncio.create_task(store._connections.run(client.batch(nothing))) for _ in range(20)]  # out of turn
        while not client._pool._slots.locked():  # noqa: ASYNC110 - until every connection waits
            await asyncio.sleep(0)
        await asyncio.wait_for(transaction.record([entry(1)]), 3)
    for ends in await asyncio.gather(*waiting):
        assert committed_results(ends) == []
    assert await store.journal("run") == [entry(1)]


async def test_a_holder_and_its_successor_never_both_write(store: LibsqlStore, other: LibsqlStore) -> None:
    """Records in flight at the moment of a takeover are in the journal that the new holder loads, or refused."""
    for n in range(times(200)):
        lease = await leased(store, f"run-{n}")
        acknowledged: list[int] = []

        async def write(seq: int, lease: Lease = lease, acknowledged: list[int] = acknowledged) -> None:
            with contextlib.suppress(LeaseLost):
                await store.record(lease, [entry(seq)])
                acknowledged.append(seq)

        writing = [asyncio.create_task(write(seq)) for seq in range(1, 11)]
        taken = await other.acquire(f"run-{n}", TTL, now=lease.until + 1)
        assert taken is not None
        await asyncio.gather(*writing)
        assert sorted(acknowledged) == [line.seq for line in taken.journal]
        assert await other.journal(f"run-{n}") == taken.journal


async def test_a_server_that_is_killed_under_load_loses_nothing_that_was_acknowledged(restartable: LibsqlServer) -> None:
    store = LibsqlStore(restartable.url)
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    acknowledged: dict[str, int] = {lease.run_id: 0 for lease in leases}
    enough = asyncio.Event()

    async def drive(lease: Lease) -> None:
        while not enough.is_set():
            seq = acknowledged[lease.run_id] + 1
            await store.record(lease, [entry(seq)])
            acknowledged[lease.run_id] = seq

    driving = [asyncio.create_task(drive(lease)) for lease in leases]
    for _ in range(times(30)):
        target = sum(acknowledged.values()) + 200
        while sum(acknowledged.values()) < target:  # noqa: ASYNC110 - what is awaited is a number
            await asyncio.sleep(0.01)
        await asyncio.to_thread(restartable.kill)
        await asyncio.to_thread(restartable.start)
    enough.set()
    await asyncio.gather(*driving)
    for run_id, last in acknowledged.items():
        assert [line.seq for line in await store.journal(run_id)] == list(range(1, last + 1))
    await store.close()
