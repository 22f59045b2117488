import asyncio

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.postgres import PostgresStore
from perdure.errors import LeaseLost, PersistenceError
from perdure.testing.contract.world import entry, new_run, outcomes
from tests.servers.postgres import PostgresServer

TTL = 600.0


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nothing_acknowledged_is_lost_when_the_server_restarts_under_load(restartable: PostgresServer, how: str) -> None:
    store = PostgresStore(restartable.dsn)
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

    drivers = [asyncio.create_task(drive(f"run-{n}")) for n in range(20)]
    for _ in range(2):
        await asyncio.sleep(0.3)
        before = sum(acknowledged.values())
        await asyncio.to_thread(getattr(restartable, how))
        await asyncio.to_thread(restartable.start)
        while sum(acknowledged.values()) < before + 100:  # noqa: ASYNC110 - progress is all there is to wait for
            await asyncio.sleep(0.01)
    over.set()
    await asyncio.gather(*drivers)
    for run_id, seq in acknowledged.items():
        assert [line.seq for line in await store.journal(run_id)] == list(range(1, seq + 1))
    assert await store.count(status="completed") == 20
    await store.close()


async def test_a_server_that_stays_away_is_an_error_in_bounded_time(
    restartable: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.backends.postgres.connections.PostgresConnections.PATIENCE", 0.5)
    store = PostgresStore(restartable.dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    await asyncio.to_thread(restartable.stop)
    async with asyncio.timeout(20):
        with pytest.raises(PersistenceError) as refusal:
            await store.record(claim.lease, [entry(1)])
    assert "perdure:" not in str(refusal.value)
    await asyncio.to_thread(restartable.start)
    await store.record(claim.lease, [entry(1)])
    await store.release(claim.lease)
    with pytest.raises(LeaseLost):
        await store.record(claim.lease, [entry(2)])
    await store.close()


async def test_a_watch_goes_on_after_the_server_restarted(restartable: PostgresServer) -> None:
    store = PostgresStore(restartable.dsn)
    await store.setup()
    await store.watch(5)
    assert _is_live(store)
    watching = asyncio.create_task(store.watch(3600))
    await asyncio.sleep(0)
    await asyncio.to_thread(restartable.stop)
    async with asyncio.timeout(60):
        await watching  # woken, as something may have been missed
    await asyncio.to_thread(restartable.start)
    async with asyncio.timeout(60):
        while not _is_live(store):
            await store.watch(0.1)
    watching = asyncio.create_task(store.watch(3600))
    await asyncio.sleep(0)
    await store.create(new_run())
    async with asyncio.timeout(60):
        await watching
    await store.close()


def _is_live(store: PostgresStore) -> bool:
    return store._listener.is_live


async def test_many_callers_hear_at_once_that_the_server_stays_away(
    restartable: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.backends.postgres.connections.PostgresConnections.PATIENCE", 1.0)
    store = PostgresStore(restartable.dsn)
    claims = [(await store.create(new_run(f"run-{n}"), ttl=TTL)).claim for n in range(50)]
    await asyncio.to_thread(restartable.stop)
    async with asyncio.timeout(30):  # one after the other would take 50
        answers = await outcomes(store.record(claim.lease, [entry(1)]) for claim in claims if claim is not None)
    assert all(isinstance(answer, PersistenceError) for answer in answers)
    assert len({id(answer) for answer in answers}) == 50
    await store.close()


async def test_a_write_outlasts_a_failover(restartable: PostgresServer) -> None:
    store = PostgresStore(restartable.dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    operator = await asyncpg.connect(restartable.dsn)
    await operator.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")  # as a standby would be
    await operator.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datid <> 0")
    writing = asyncio.ensure_future(store.record(claim.lease, [entry(1)]))
    await asyncio.wait([writing], timeout=0.5)
    assert not writing.done()
    await operator.execute("SET default_transaction_read_only = off")
    await operator.execute("ALTER DATABASE postgres RESET default_transaction_read_only")
    async with asyncio.timeout(60):
        await writing
    assert await store.journal("run") == [entry(1)]
    await operator.close()
    await store.close()
