"""What a caller may do inside `transaction(lease)`, and what is left of a transaction that failed or was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import pytest

from perdure.errors import LeaseLost, PersistenceError
from perdure.model.records import Lease
from perdure.store import FullStore, Transaction
from perdure.testing.contract.world import NOW, TTL, entry, new_run
from tests.backends.opening import store_at
from tests.backends.registry import BACKENDS, MYSQL, POSTGRES, SQLITE, Backend, on

PATIENCE: Final = 30.0  # less than the slow statements take
SQL_CLIENTS: Final = tuple(BACKENDS[f"sql_client-{dialect}"] for dialect in ("sqlite", "postgres", "mysql"))

# Statements that would end the transaction, or change the session beyond it.
OF_EVERY_STORE: Final = ("COMMIT", " /* now */ rollback")
OF_ONE_STORE: Final = {
    POSTGRES: ("-- x\nSET search_path = public", "LISTEN x"),
    MYSQL: (
        "-- x\nSET autocommit = 1",
        "# x\nLOCK TABLES perdure_runs READ",
        "/*! COMMIT */",
        "/*M! COMMIT */",
        "CALL anything()",
    ),
    **dict.fromkeys(SQL_CLIENTS, ("-- x\nSAVEPOINT a", "SET x = 1", "BEGIN")),
}
ENDING_STATEMENTS: Final = [
    pytest.param(backend, statement, id=f"{backend}-{statement}")
    for backend, statements in OF_ONE_STORE.items()
    for statement in (*OF_EVERY_STORE, *statements)
]
SLOW_STATEMENTS: Final = {"postgres": "SELECT pg_sleep(300)", "mysql": "SELECT SLEEP(300)"}


@pytest.fixture
async def store(backend: Backend, shared_dsn: str) -> AsyncIterator[FullStore]:
    async with store_at(shared_dsn) as store:
        yield store


@pytest.fixture
async def lease(store: FullStore) -> Lease:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    return claim.lease


@on(POSTGRES, MYSQL, *SQL_CLIENTS)
async def test_a_transaction_in_which_a_statement_failed_is_not_taken_for_committed(store: FullStore, lease: Lease) -> None:
    async def work() -> None:
        async with store.transaction(lease) as transaction:
            await transaction.record([entry(1)])
            with pytest.raises(Exception, match="no_such_table") as failure:
                await transaction.execute("SELECT * FROM no_such_table")
            assert type(failure.value).__module__.startswith(("asyncpg.", "asyncmy.", "sqlite3"))

    with pytest.raises(PersistenceError, match="an earlier statement failed"):
        await work()
    assert await store.journal("run") == []


@pytest.mark.parametrize(("backend", "statement"), ENDING_STATEMENTS, scope="session")
async def test_a_transaction_cannot_be_ended_from_inside(store: FullStore, lease: Lease, statement: str) -> None:
    async with store.transaction(lease) as transaction:
        await transaction.record([entry(1)])
        with pytest.raises(ValueError, match="cannot be used inside a transaction"):
            await transaction.execute(statement)
        await transaction.record([entry(2)])
    assert await store.journal("run") == [entry(1), entry(2)]


@on(SQLITE, POSTGRES, MYSQL)
async def test_a_statement_that_takes_the_run_away_ends_the_right_to_record(store: FullStore, lease: Lease) -> None:
    """The caller may change anything in the database, the row of the run included."""

    async def work() -> None:
        async with store.transaction(lease) as transaction:
            await transaction.record([entry(1)])
            await transaction.execute("UPDATE perdure_runs SET epoch = epoch + 1 WHERE id = 'run'")
            await transaction.record([entry(2)])

    with pytest.raises(LeaseLost):
        await work()
    assert await store.journal("run") == []


@on(SQLITE, POSTGRES, MYSQL)
async def test_a_transaction_cancelled_between_statements_leaves_nothing(store: FullStore, lease: Lease) -> None:
    await check_cancelled(store, lease, lambda _: asyncio.Event().wait())


@on(POSTGRES, MYSQL)
async def test_a_transaction_cancelled_during_a_slow_statement_leaves_nothing(
    backend: Backend, store: FullStore, lease: Lease
) -> None:
    await check_cancelled(store, lease, lambda transaction: transaction.execute(SLOW_STATEMENTS[backend.name]))


async def check_cancelled(store: FullStore, lease: Lease, wait: Callable[[Transaction], Awaitable[object]]) -> None:
    """Cancel a transaction while it waits: nothing of it stays, and the run can be written at once."""
    has_recorded = asyncio.Event()

    async def work() -> None:
        async with store.transaction(lease) as transaction:
            await transaction.record([entry(1)])
            has_recorded.set()
            await wait(transaction)

    task = asyncio.create_task(work())
    await has_recorded.wait()
    await asyncio.sleep(0.05)  # until the statement runs; if it does not yet the test shows less, but does not fail
    task.cancel()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait([task])
        assert task.cancelled()
        assert await store.journal("run") == []
        async with store.transaction(lease) as transaction:
            await transaction.record([entry(1)])
    assert await store.journal("run") == [entry(1)]
