import asyncio

import pytest

from perdure.backends.mongo import MongoStore
from perdure.errors import PersistenceError
from perdure.testing.contract.world import entry, new_run
from tests.servers.mongo import MongoServer

TTL = 600.0
RUNS = 10


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nothing_acknowledged_is_lost_when_the_server_restarts_under_load(
    restartable: MongoServer, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.backends.mongo.connections.MongoConnections.PATIENCE", 200.0)  # however slow the machine is
    store = MongoStore(restartable.dsn, database=how)
    acknowledged: dict[str, int] = {}
    signalled: dict[str, int] = {}
    over = asyncio.Event()

    async def drive(run_id: str) -> None:
        claim = (await store.create(new_run(run_id), ttl=TTL)).claim
        assert claim is not None
        while not over.is_set():
            seq = acknowledged.get(run_id, 0) + 1
            await store.record(claim.lease, [entry(seq)])
            acknowledged[run_id] = seq
            if seq % 5 == 0:
                signalled[run_id] = await store.signal(run_id, "go", b"%d" % seq)
        await store.finish(claim.lease, "completed", b"1")

    drivers = [asyncio.create_task(drive(f"run-{n}")) for n in range(RUNS)]
    await _more(acknowledged, 50, drivers)
    await asyncio.to_thread(getattr(restartable, how))
    await asyncio.to_thread(restartable.start)
    await _more(acknowledged, 50, drivers)
    over.set()
    await asyncio.gather(*drivers)
    for run_id, seq in acknowledged.items():
        assert [line.seq for line in await store.journal(run_id)] == list(range(1, seq + 1))
        assert [row.seq for row in await store.inbox(run_id)] == list(range(1, signalled.get(run_id, 0) + 1))
    assert await store.count(status="completed") == RUNS
    await store.close()


async def _more(acknowledged: dict[str, int], number: int, drivers: list[asyncio.Task[None]]) -> None:
    before = sum(acknowledged.values())
    while sum(acknowledged.values()) < before + number:
        done, _ = await asyncio.wait(drivers, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # it ends only by an error


async def test_a_server_that_stays_away_is_an_error_in_bounded_time(
    restartable: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.backends.mongo.connections.MongoConnections.PATIENCE", 0.5)
    store = MongoStore(f"{restartable.dsn}&serverSelectionTimeoutMS=500", database="away")
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    await store.watch(5)
    watching = asyncio.create_task(store.watch(60))
    await asyncio.to_thread(restartable.kill)
    async with asyncio.timeout(30):
        with pytest.raises(PersistenceError):
            await store.record(claim.lease, [entry(1)])
        await watching  # woken, as something may have been missed
    await asyncio.to_thread(restartable.start)
    await store.record(claim.lease, [entry(1)])
    assert await store.journal("run") == [entry(1)]
    await store.close()
