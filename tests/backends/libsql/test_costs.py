"""What verbs cost, counted on the wire."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import Awaited, Item, Lease
from perdure.testing.contract.world import entry, new_run
from tests.wire import Wire

TTL = 60.0


@pytest.fixture
def wire(url: str) -> Iterator[Wire]:
    wire = Wire(url)
    yield wire
    wire.close()


@pytest.fixture
async def store(wire: Wire, table: str) -> AsyncIterator[LibsqlStore]:
    store = LibsqlStore(wire.url, table=table)
    await store.setup()
    yield store
    await store.close()


async def leased(store: LibsqlStore, run_id: str) -> Lease:
    created = await store.create(new_run(run_id), ttl=TTL)
    assert created.claim is not None
    return created.claim.lease


async def test_a_record_is_one_round_trip_whatever_it_carries(store: LibsqlStore, wire: Wire) -> None:
    lease = await leased(store, "run")
    for n in range(20):
        await store.signal("run", "go", str(n).encode())
    before = wire.round_trips
    for n in range(20):
        await store.record(lease, [entry(n + 1)], consume=[n + 1], items=[Item(stream="s", n=n, payload=b"1")])
    assert wire.round_trips - before == 20
    assert len(await store.journal("run")) == len(await store.items("run", "s")) == 20
    assert await store.inbox("run") == []


async def test_going_to_sleep_is_one_round_trip_whether_there_is_reason_to_or_not(store: LibsqlStore, wire: Wire) -> None:
    for n in range(2):
        lease = await leased(store, f"run-{n}")
        if n:
            await store.signal(lease.run_id, "go", b"1")
        before = wire.round_trips
        arrived = await store.suspend(lease, wake_at=None, waiting_for=[Awaited("signal", "go")], entries=[entry(1)])
        assert (len(arrived), wire.round_trips - before) == (n, 1)


async def test_concurrent_one_step_runs_share_commits(store: LibsqlStore) -> None:
    async def run(n: int) -> None:
        lease = await leased(store, f"run-{n}")
        await store.finish(lease, "completed", b"1", entries=[entry(1)])

    await asyncio.gather(*map(run, range(100)))
    assert store._batchers.creations.statements + store._batchers.closings.statements < 0.2 * 200


async def test_concurrent_signals_share_commits_and_are_answered_one_by_one(store: LibsqlStore) -> None:
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    await store.finish(leases[9], "completed", b"1")
    wanted = [f"run-{n % 10}" for n in range(100)] + ["nowhere"]
    answers = await asyncio.gather(*(store.signal(run_id, "go", b"1") for run_id in wanted), return_exceptions=True)
    assert store._signals.statements < 10
    for n in range(9):
        assert answers[n:100:10] == list(range(1, 11))
    assert {type(answer) for answer in answers[9:100:10]} == {RunFinished}
    assert isinstance(answers[100], RunNotFound)


async def test_signals_and_heartbeats_are_one_round_trip(store: LibsqlStore, wire: Wire) -> None:
    leases = [await leased(store, f"run-{n}") for n in range(20)]
    before = wire.round_trips
    assert None not in await store.renew(leases, TTL)
    await store.signal("run-0", "go", b"1")
    assert wire.round_trips - before == 2


async def test_a_claim_that_finds_nothing_waits_for_no_writer(store: LibsqlStore, url: str, table: str) -> None:
    lease = await leased(store, "run")
    other = LibsqlStore(url, table=table)
    async with store.transaction(lease):
        idle = await asyncio.wait_for(other.claim(5, TTL, [("flow", 1)]), 3)
    assert (idle.claims, idle.next_wake_at) == ([], lease.until)
    await other.close()


async def test_a_read_is_one_round_trip(store: LibsqlStore, wire: Wire) -> None:
    lease = await leased(store, "run")
    await store.record(lease, [entry(1)])
    before = wire.round_trips
    for verb in (store.get, store.journal, store.inbox):
        await verb("run")
    await store.list()
    await store.count()
    await store.due()
    assert wire.round_trips - before == 6


async def test_a_connection_is_kept_from_request_to_request(store: LibsqlStore, wire: Wire) -> None:
    lease = await leased(store, "run")
    before = len(wire._threads)
    for seq in range(1, 21):
        await store.record(lease, [entry(seq)])
    assert len(wire._threads) == before
