import asyncio
import atexit
import secrets
from functools import cache
from typing import Any

import asyncmy
from asyncmy.constants import CLIENT

from perdure.backends.mysql import MysqlStore
from perdure.backends.mysql.address import parse_address
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory
from tests.campaign import IS_FULL
from tests.contract.sampling import sampled_contract_tests
from tests.servers.mysql import shared_server, with_database


@cache
def shared_database() -> str:
    """One database for all cases of this process: making the tables takes longer than most cases."""
    server, database = shared_server().dsn, f"contract_{secrets.token_hex(6)}"
    asyncio.run(_run(server, f"CREATE DATABASE {database}"))
    atexit.register(lambda: asyncio.run(_run(server, f"DROP DATABASE {database}")))
    return with_database(server, database)


async def _run(dsn: str, sql: str) -> None:
    connection: Any = await asyncmy.connect(**parse_address(dsn).arguments())
    try:
        await connection.query(sql)
    finally:
        connection.close()


class MysqlFactory(StoreFactory):
    """A case has the tables to itself by a prefix that nobody else has."""

    capabilities = STANDARD_PARTS | {"shared", "durable", "transaction", "outbox"}
    longest_value = 16 << 20  # the server's max_allowed_packet

    def __init__(self) -> None:
        self.dsn = shared_database()
        self.prefix = secrets.token_hex(6)

    async def open(self, prefix: str = "") -> FullStore:
        return MysqlStore(self.dsn, prefix=f"{self.prefix}/{prefix}")


class BorrowedFactory(MysqlFactory):
    """Through a pool as a program may have it: REPEATABLE READ, nothing is committed by itself, other escapes."""

    async def open(self, prefix: str = "") -> FullStore:
        if self.prefix not in _pools:
            _pools[self.prefix] = await asyncmy.create_pool(
                **parse_address(self.dsn).arguments(),
                minsize=1,
                maxsize=10,
                client_flag=CLIENT.FOUND_ROWS,
                init_command="SET sql_mode = 'STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES,ANSI_QUOTES'",
            )
        return MysqlStore(pool=_pools[self.prefix], prefix=f"{self.prefix}/{prefix}")

    async def close(self) -> None:
        pool = _pools.pop(self.prefix, None)
        if pool is not None:
            pool.close()
            await pool.wait_closed()


# Not in the factory, which is sent to other processes.
_pools: dict[str, Any] = {}

# The verbs are those of the SQL stores, whose suites on SQLite and PostgreSQL are whole.
test_contract = sampled_contract_tests(MysqlFactory)
if IS_FULL:  # the same statements in another spelling: once in a campaign is enough
    test_contract_on_a_borrowed_pool = sampled_contract_tests(BorrowedFactory)
