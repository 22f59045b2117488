import asyncio

import pytest

from perdure.backends.mysql import MysqlStore
from perdure.backends.mysql.connections import MysqlConnections
from perdure.errors import LeaseLost, PersistenceError
from perdure.testing.contract.world import entry, new_run, outcomes
from tests.backends.mysql.conftest import ask
from tests.servers.mysql import MysqlServer

TTL = 600.0


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nothing_acknowledged_is_lost_when_the_server_restarts_under_load(restartable: MysqlServer, how: str) -> None:
    store = MysqlStore(restartable.dsn)
    acknowledged: dict[str, int] = {}
    over = asyncio.Event()

    async def drive(run_id: str) -> None:
        claim = (await store.create(new_run(run_id), ttl=TTL)).claim
        assert claim is not None
        while not over.is_set():
            seq = acknowledged.get(run_id, 0) + 1
            await store.record(claim.lease, [entry(seq)])
            acknowledged[run_id] = seq
        await store.finish(claim.lease, "completed", b"1")

    async def progress(number: int) -> None:
        wanted = sum(acknowledged.values()) + number
        while sum(acknowledged.values()) < wanted:
            assert not any(driver.done() for driver in drivers)
            await asyncio.sleep(0.01)

    drivers = [asyncio.create_task(drive(f"run-{n}")) for n in range(20)]
    for _ in range(2):
        await progress(100)
        await asyncio.to_thread(getattr(restartable, how))
        await asyncio.to_thread(restartable.start)
        await progress(100)
    over.set()
    await asyncio.gather(*drivers)
    for run_id, seq in acknowledged.items():
        assert [line.seq for line in await store.journal(run_id)] == list(range(1, seq + 1))
    assert await store.count(status="completed") == 20
    await store.close()


async def test_a_server_that_stays_away_is_an_error_in_bounded_time(
    restartable: MysqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MysqlConnections, "PATIENCE", 0.5)
    store = MysqlStore(restartable.dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    await asyncio.to_thread(restartable.stop)
    async with asyncio.timeout(20):
        with pytest.raises(PersistenceError) as refusal:
            await store.record(claim.lease, [entry(1)])
    assert _password(restartable.dsn) not in str(refusal.value)
    await asyncio.to_thread(restartable.start)
    await store.record(claim.lease, [entry(1)])
    await store.release(claim.lease)
    with pytest.raises(LeaseLost):
        await store.record(claim.lease, [entry(2)])
    await store.close()


async def test_many_callers_hear_at_once_that_the_server_stays_away(
    restartable: MysqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MysqlConnections, "PATIENCE", 1.0)
    store = MysqlStore(restartable.dsn)
    claims = [(await store.create(new_run(f"run-{n}"), ttl=TTL)).claim for n in range(50)]
    await asyncio.to_thread(restartable.stop)
    async with asyncio.timeout(20):
        answers = await outcomes(store.record(claim.lease, [entry(1)]) for claim in claims if claim is not None)
    assert all(isinstance(answer, PersistenceError) for answer in answers)
    assert len({id(answer) for answer in answers}) == 50
    await store.close()


async def test_a_write_outlasts_a_failover(restartable: MysqlServer) -> None:
    dsn = restartable.dsn
    store = MysqlStore(dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    # As a replica would be. A user with the right to write all the same does not notice, so that is taken away.
    await ask(dsn, "REVOKE READ_ONLY ADMIN, SUPER ON *.* FROM perdure@'127.0.0.1'")
    await ask(dsn.replace("perdure:", "root:").replace(_password(dsn), ""), "SET GLOBAL read_only = 1")
    await store._connections.run(_drop_connections(store))
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)]))
    await asyncio.wait([writing], timeout=0.5)
    assert not writing.done()
    await ask(dsn.replace("perdure:", "root:").replace(_password(dsn), ""), "SET GLOBAL read_only = 0")
    async with asyncio.timeout(10):
        await writing
    assert await store.journal("run") == [entry(1)]
    await store.close()


def _password(dsn: str) -> str:
    return dsn.partition("perdure:")[2].partition("@")[0]


async def _drop_connections(store: MysqlStore) -> None:
    """Rights are read when a connection is opened."""
    pool = store._connections._pool
    assert pool is not None
    await pool.clear()


async def test_a_write_outlasts_its_connection(dsn: str, store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    database = dsn.rpartition("/")[2]
    for seq in range(1, 6):
        others = await ask(
            dsn, f"SELECT id FROM information_schema.processlist WHERE db = '{database}' AND id <> CONNECTION_ID()"
        )
        for (number,) in others:
            await ask(dsn, f"KILL {number}")
        await store.record(claim.lease, [entry(seq)])
    assert [line.seq for line in await store.journal("run")] == [1, 2, 3, 4, 5]
