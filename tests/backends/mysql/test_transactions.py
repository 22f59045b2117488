import asyncio
from contextlib import AbstractAsyncContextManager

import asyncmy
import pytest

from perdure.backends.mysql import MysqlStore
from perdure.backends.sql import closing, recording
from perdure.backends.sql.recording import Write
from perdure.testing.contract.world import NOW, TTL, entry, new_run
from tests.backends.mysql.conftest import connect


async def test_unlocked_runs_do_not_wait_for_a_locked_one(dsn: str, store: MysqlStore) -> None:
    """Neither do the shared verbs, which a packet falls back to, nor in a table so small that the server might scan all of it."""
    leases = [claim.lease for n in "abc" if (claim := (await store.create(new_run(n), ttl=TTL)).claim) is not None]
    taker = await connect(dsn)
    await taker.begin()
    await taker.query("UPDATE perdure_runs SET held = 1 WHERE namespace = '' AND id = 'b'")

    async def look() -> None:
        records = [Write.record(lease, [entry(1)], []) for lease in leases[::2]]
        ends = [write._replace(status="failed") for write in records]
        await store._connections.perform("", lambda db, _: recording.record_all(db, records))
        await store._connections.perform("", lambda db, _: closing.close_all(db, ends))

    async with asyncio.timeout(5):
        await store._connections.run(look())
    await taker.rollback()
    taker.close()


async def test_a_signal_waits_for_an_open_transaction_and_is_not_lost(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        signalling = asyncio.create_task(store.signal("run", "go", b"1"))
        await asyncio.wait([signalling], timeout=0.1)
        await transaction.record([entry(1)])
    assert await signalling == 1
    assert [row.seq for row in await store.inbox("run")] == [1]


async def test_open_transactions_do_not_use_up_the_connections_of_the_verbs(dsn: str) -> None:
    store = MysqlStore(dsn, pool_size=2)
    leases = [claim.lease for n in range(2) if (claim := (await store.create(new_run(f"run-{n}"), ttl=TTL)).claim) is not None]
    async with asyncio.timeout(10), store.transaction(leases[0]), store.transaction(leases[1]):
        await asyncio.gather(*(store.get(f"run-{n}") for n in range(10)))
    await store.close()


async def _two_statements(context: AbstractAsyncContextManager[object]) -> None:
    async with context as transaction:
        await transaction.execute("SELECT 1; SELECT 2")  # type: ignore[attr-defined]  # it is a transaction


async def test_two_statements_at_once_are_refused_and_undone(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    with pytest.raises(ValueError, match="one statement"):
        await _two_statements(store.transaction(claim.lease))
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(1)])
    assert await store.journal("run") == [entry(1)]


async def test_values_of_a_callers_statement_are_text_and_numbers(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        await transaction.execute("CREATE TABLE effects (name VARCHAR(50) CHARACTER SET latin1, amount DOUBLE)")
    async with store.transaction(claim.lease) as transaction:
        await transaction.execute("INSERT INTO effects VALUES (%s, %s)", ("Zoë's 100%", 1.5))
        assert await transaction.execute("SELECT name, amount FROM effects WHERE name LIKE 'zoë%'") == [("Zoë's 100%", 1.5)]


async def test_what_the_server_says_of_a_callers_statement_is_raised_as_it_is(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        await transaction.execute("CREATE TABLE effects (n INT PRIMARY KEY)")

    async def work() -> None:
        async with store.transaction(claim.lease) as transaction:
            await transaction.execute("INSERT INTO effects VALUES (1)")
            await transaction.record([entry(1)])
            await transaction.execute("INSERT INTO effects VALUES (1)")

    with pytest.raises(asyncmy.errors.IntegrityError):
        await work()
    assert await store.journal("run") == []


async def test_a_table_is_not_created_after_something_was_written(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(1)])
        with pytest.raises(ValueError, match="CREATE would commit"):
            await transaction.execute("CREATE TABLE effects (n INT)")
