from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Literal

import pytest

from perdure.backends.sqlite import SQLiteStore
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from tests.backends.disk_child import create_leased
from tests.patience import PATIENCE

STEP = Entry(seq=1, key="step")
FORBIDDEN = (
    "COMMIT",
    "commit;",
    "END",
    "END TRANSACTION",
    "ROLLBACK",
    "BEGIN",
    "BEGIN IMMEDIATE",
    "/* a */ COMMIT -- b",
    "-- x\nROLLBACK",
    "SAVEPOINT a",
    "ATTACH DATABASE ':memory:' AS other",
    "DETACH DATABASE main",
    "PRAGMA synchronous = OFF",
)


async def _table(store: SQLiteStore) -> None:
    lease = await create_leased(store, "prepare")
    async with store.transaction(lease) as transaction:
        await transaction.execute("CREATE TABLE effects (n INTEGER PRIMARY KEY)")


@pytest.mark.parametrize(("synchronous", "level"), [("full", 2), ("normal", 1)])
async def test_a_transaction_is_committed_to_the_disk_like_every_other_write(
    path: Path, synchronous: Literal["full", "normal"], level: int
) -> None:
    store = await asyncio.to_thread(SQLiteStore, path, synchronous=synchronous)
    lease = await create_leased(store, "run")
    async with store.transaction(lease) as transaction:
        look = lambda: transaction.connection.execute("PRAGMA synchronous").fetchall()  # noqa: E731 - no `def` in a `with`
        assert await transaction.call_plain(look) == [(level,)]
    await store.close()


@pytest.mark.parametrize("statement", FORBIDDEN)
async def test_a_statement_that_ends_or_leaves_the_transaction_is_refused(store: SQLiteStore, statement: str) -> None:
    await _table(store)
    lease = await create_leased(store, "run")
    async with store.transaction(lease) as transaction:
        await transaction.execute("INSERT INTO effects VALUES (1)")
        with pytest.raises(ValueError, match="transaction"):
            await transaction.execute(statement)
        await transaction.record([STEP])
    async with store.transaction(lease) as transaction:
        assert await transaction.execute("SELECT n FROM effects") == [(1,)]
    assert len(await store.journal("run")) == 1


async def test_the_callers_own_errors_come_as_they_are_and_the_transaction_goes_on(store: SQLiteStore) -> None:
    await _table(store)
    lease = await create_leased(store, "run")
    async with store.transaction(lease) as transaction:
        await transaction.execute("INSERT INTO effects VALUES (?)", (1,))
        with pytest.raises(sqlite3.IntegrityError):
            await transaction.execute("INSERT INTO effects VALUES (1)")
        with pytest.raises(sqlite3.OperationalError):
            await transaction.execute("SELEKT 1")
        await transaction.execute("INSERT INTO effects VALUES (2)")
    async with store.transaction(lease) as transaction:
        assert await transaction.execute("SELECT n FROM effects") == [(1,), (2,)]


async def test_after_sqlite_rolled_back_nothing_is_written_alone(store: SQLiteStore) -> None:
    await _table(store)
    lease = await create_leased(store, "run")
    with pytest.raises(PersistenceError, match="rolled it back"):  # noqa: PT012 - the last statement is the exit itself
        async with store.transaction(lease) as transaction:
            await transaction.execute("INSERT INTO effects VALUES (1)")
            with pytest.raises(sqlite3.IntegrityError):
                await transaction.execute("INSERT OR ROLLBACK INTO effects VALUES (1)")
            with pytest.raises(PersistenceError, match="rolled it back"):
                await transaction.execute("INSERT INTO effects VALUES (2)")
            with pytest.raises(PersistenceError, match="rolled it back"):
                await transaction.record([STEP])
    async with store.transaction(lease) as transaction:
        assert await transaction.execute("SELECT n FROM effects") == []


async def test_a_record_that_failed_half_way_takes_its_transaction_along(store: SQLiteStore) -> None:
    await _table(store)
    lease = await create_leased(store, "run")
    unstorable = Entry(seq=2, key="\ud800")  # no key that was checked looks like this, but a store must not rely on it
    with pytest.raises(PersistenceError, match="rolled"):  # noqa: PT012 - the last statement is the exit itself
        async with store.transaction(lease) as transaction:
            await transaction.execute("INSERT INTO effects VALUES (1)")
            with pytest.raises(UnicodeEncodeError):
                await transaction.record([STEP, unstorable])
    assert await store.journal("run") == []
    async with store.transaction(lease) as transaction:
        assert await transaction.execute("SELECT n FROM effects") == []


async def test_a_transaction_that_waits_for_the_lock_can_be_cancelled(store: SQLiteStore) -> None:
    first, second = await create_leased(store, "first"), await create_leased(store, "second")

    async def wait() -> None:
        async with store.transaction(second):
            pass

    async with store.transaction(first) as transaction:
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await transaction.execute("SELECT 1")
        waiting.cancel()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait([waiting])
    await store.record(second, [STEP])


async def test_a_transaction_that_has_ended_takes_nothing_more(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    async with store.transaction(lease) as transaction:
        pass
    with pytest.raises(PersistenceError, match="ended"):
        await transaction.execute("SELECT 1")


async def test_records_and_transactions_of_many_runs_take_turns(store: SQLiteStore) -> None:
    await _table(store)
    leases = [await create_leased(store, f"run-{n}") for n in range(10)]

    async def transact(n: int) -> None:
        async with store.transaction(leases[n]) as transaction:
            await transaction.execute("INSERT INTO effects VALUES (?)", (n,))
            await transaction.record([STEP])

    await asyncio.gather(*(transact(n) if n % 2 else store.record(leases[n], [STEP]) for n in range(10)))
    assert [len(await store.journal(f"run-{n}")) for n in range(10)] == [1] * 10


async def test_a_closed_store_gives_no_transactions(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    await store.close()
    with pytest.raises(PersistenceError, match="closed"):
        async with store.transaction(lease):
            pass
