"""The contract through PgBouncer in transaction mode, where two statements in a row may reach two sessions."""

import asyncio
import atexit
import functools
import secrets

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.postgres import PostgresStore
from perdure.backends.sql.dialect import TABLES
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory, all_cases
from tests.contract.sampling import sampled_contract_tests
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import shared_server


@functools.cache
def pooler() -> PgBouncer:
    pooler = PgBouncer(shared_server().dsn)
    pooler.start()
    atexit.register(pooler.remove)
    return pooler


@functools.cache
def shared_tables() -> str:
    """The stem of one set of tables for all cases of this process: making them takes longer than most cases."""
    stem = f"t_{secrets.token_hex(6)}"
    atexit.register(lambda: asyncio.run(_drop(shared_server().dsn, stem)))
    return stem


async def _drop(dsn: str, stem: str) -> None:
    connection = await asyncpg.connect(dsn)
    for table in ("contract_effects", *(f"{stem}_{part}" for part in TABLES)):
        await connection.execute(f"DROP TABLE IF EXISTS {table}")
    await connection.close()


@pytest.fixture(autouse=True)
def _frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens through a pooler: a watch ends after a second, here sooner, as cases wait for it."""
    monkeypatch.setattr("perdure.backends.base.server_store.POLL_EVERY", 0.1)


class PgBouncerFactory(StoreFactory):
    """A case has the tables to itself by a prefix that nobody else has."""

    capabilities = STANDARD_PARTS | {"shared", "durable", "transaction", "outbox"}

    def __init__(self) -> None:
        self.pooler = pooler().dsn
        self.table = shared_tables()
        self.prefix = secrets.token_hex(6)

    async def open(self, prefix: str = "") -> FullStore:
        return PostgresStore(self.pooler, table=self.table, prefix=f"{self.prefix}/{prefix}")


class NewTablesFactory(PgBouncerFactory):
    def __init__(self) -> None:
        super().__init__()
        self.table = f"t_{secrets.token_hex(6)}"

    async def close(self) -> None:
        await _drop(shared_server().dsn, self.table)


# What needs a session of its own shows in any case that has two statements.
test_contract = sampled_contract_tests(PgBouncerFactory)


def test_processes_may_make_the_tables_at_once() -> None:
    case = next(case for case in all_cases() if case.name == "processes_may_start_on_a_new_database_at_once")
    asyncio.run(case.run(NewTablesFactory()))


async def test_it_is_noticed() -> None:
    factory = PgBouncerFactory()
    through, direct = await factory.open(), PostgresStore(shared_server().dsn, table=factory.table)
    assert isinstance(through, PostgresStore)
    await through.setup()
    await direct.setup()
    assert (through._connections.behind_pooler, direct._connections.behind_pooler) == (True, False)
    await through.close()
    await direct.close()
