import os
import secrets
from typing import Any

import asyncmy
from asyncmy.constants import CLIENT

from perdure.store import Store
from perdure.stores.mysql_store import MysqlStore
from perdure.stores.mysql_store.place import place_of
from perdure.testing.contract import StoreFactory, contract_tests
from perdure.testing.servers.mysql import VARIABLE, shared_server, with_database
from tests.campaign import IS_FULL


class MysqlFactory(StoreFactory):
    capabilities = frozenset({"shared", "durable", "transaction"})

    def __init__(self) -> None:
        self.server = shared_server().dsn
        self.database = f"contract_{secrets.token_hex(6)}"
        self.made = False

    async def open(self, prefix: str = "") -> Store:
        return MysqlStore(await self._dsn(), prefix=prefix)

    async def _dsn(self) -> str:
        if not self.made:
            await self._run(f"CREATE DATABASE {self.database}")
            self.made = True
        return with_database(self.server, self.database)

    async def close(self) -> None:
        await self._run(f"DROP DATABASE IF EXISTS {self.database}")

    async def _run(self, sql: str) -> None:
        connection: Any = await asyncmy.connect(**place_of(self.server).arguments())
        try:
            await connection.query(sql)
        finally:
            connection.close()


class BorrowedFactory(MysqlFactory):
    """Through a pool as a program may have it: REPEATABLE READ, nothing is committed by itself, other escapes."""

    async def open(self, prefix: str = "") -> Store:
        if self.database not in _pools:
            _pools[self.database] = await asyncmy.create_pool(
                **place_of(await self._dsn()).arguments(),
                minsize=1,
                maxsize=10,
                client_flag=CLIENT.FOUND_ROWS,
                init_command="SET sql_mode = 'STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES,ANSI_QUOTES'",
            )
        return MysqlStore(pool=_pools[self.database], prefix=prefix)

    async def close(self) -> None:
        pool = _pools.pop(self.database, None)
        if pool is not None:
            pool.close()
            await pool.wait_closed()
        await super().close()


# Not in the factory, which is sent to other processes.
_pools: dict[str, Any] = {}

test_contract = contract_tests(MysqlFactory)
if IS_FULL:  # the same statements in another spelling: once in a campaign is enough
    test_contract_on_a_borrowed_pool = contract_tests(BorrowedFactory)


def test_the_server_is_ours_unless_the_environment_names_one() -> None:
    assert shared_server().is_ours == (VARIABLE not in os.environ)
