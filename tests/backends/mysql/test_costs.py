import asyncio
from collections.abc import Iterator

import pytest

from perdure.backends.mysql import MysqlStore
from perdure.errors import PersistenceError, ValueNotStorable
from perdure.model.records import Lease
from perdure.testing.contract.world import entry, new_run, signals
from tests.backends.mysql.conftest import ask
from tests.wire import Wire

TTL = 60.0


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    wire = Wire(dsn)
    yield wire
    wire.close()


async def leased(store: MysqlStore, run_id: str) -> Lease:
    created = await store.create(new_run(run_id), ttl=TTL)
    assert created.claim is not None
    return created.claim.lease


async def commits(dsn: str) -> int:
    """How many COMMITs the server has executed; no connection here has autocommit."""
    return int((await ask(dsn, "SHOW GLOBAL STATUS LIKE 'Com_commit'"))[0][1])


async def test_a_record_that_consumes_a_signal_is_one_round_trip(wire: Wire) -> None:
    store = MysqlStore(wire.url)
    lease = await leased(store, "run")
    for _ in range(10):
        await store.signal("run", "go", b"1")
    before = wire.round_trips
    for seq in range(1, 11):
        pulse = await store.record(lease, [entry(seq)], consume=[seq])
        assert pulse.inbox_seq == 10
    assert wire.round_trips - before == 10
    assert await store.inbox("run") == []
    await store.close()


async def test_going_to_sleep_is_one_round_trip(wire: Wire) -> None:
    store = MysqlStore(wire.url)
    lease = await leased(store, "run")
    before = wire.round_trips
    assert await store.suspend(lease, wake_at=None, waiting_for=signals("go"), entries=[entry(1)]) == []
    assert wire.round_trips - before == 1
    await store.close()


async def test_concurrent_runs_share_commits(dsn: str, store: MysqlStore) -> None:
    leases = [await leased(store, f"run-{n}") for n in range(100)]
    committed = await commits(dsn)

    async def drive(lease: Lease) -> None:
        for seq in range(1, 11):
            await store.record(lease, [entry(seq)])

    await asyncio.gather(*map(drive, leases))
    assert 0 < await commits(dsn) - committed < 0.2 * 1000


async def test_what_no_column_holds_fails_alone(store: MysqlStore) -> None:
    leases = [await leased(store, f"run-{n}") for n in range(10)]
    calls = [store.record(lease, [entry(1, kind="x" * 1000 if n == 3 else "step")]) for n, lease in enumerate(leases)]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [3]
    assert isinstance(answers[3], PersistenceError)


async def test_a_record_too_large_for_the_server_fails_alone_and_says_so(store: MysqlStore) -> None:
    small, large = await leased(store, "small"), await leased(store, "large")
    answers = await asyncio.gather(
        store.record(small, [entry(1)]), store.record(large, [entry(1, payload=b"x" * (17 << 20))]), return_exceptions=True
    )
    assert not isinstance(answers[0], BaseException)
    assert isinstance(answers[1], ValueNotStorable)
    assert "max_allowed_packet=16,777,216" in str(answers[1])
    assert await store.journal("small") == [entry(1)]
    await store.record(large, [entry(1, payload=b"x" * (8 << 20))])
    assert len((await store.journal("large"))[0].payload) == 8 << 20
