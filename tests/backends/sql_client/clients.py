"""Clients like those of a program: small objects over a driver, with `query` and `transaction`."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncmy
import asyncpg  # type: ignore[import-untyped]  # it ships no types
from asyncmy.constants import CLIENT

T = TypeVar("T")
PendingWrite = tuple[list[Any], int]


class SqliteQueries:
    """One connection of the standard library, in a thread of its own."""

    def __init__(self, path: str, synchronous: str) -> None:
        self._path = path
        self._synchronous = synchronous
        self.steps = 0  # of SQLite's machine, in hundreds
        self._thread = ThreadPoolExecutor(1)
        self._connection: sqlite3.Connection | None = None

    async def query(self, sql: str, params: Sequence[Any]) -> PendingWrite:
        return await self._run(lambda connection: _query(connection, sql, params))

    async def close(self) -> None:
        if self._connection is not None:
            await self._run(lambda connection: connection.close())
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._open()))

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path, isolation_level=None, timeout=60, check_same_thread=False)
            _set_wal(connection)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.set_progress_handler(self._step, 100)
            self._connection = connection
        return self._connection

    def _step(self) -> None:
        self.steps += 1


def _set_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL. SQLite's own timeout does not hold for the locks of a switch or a recovery in another process."""
    for _ in range(600):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as failure:
            if "locked" not in str(failure):
                raise
            time.sleep(0.1)
        else:
            return
    raise TimeoutError("the database stays locked")


def _query(connection: sqlite3.Connection, sql: str, params: Sequence[Any]) -> PendingWrite:
    cursor = connection.execute(sql, params)
    return cursor.fetchall(), cursor.rowcount


class SqliteClient:
    """Two connections to one file: transactions take turns at one, the other is for single statements."""

    def __init__(self, path: str, *, begin: str = "BEGIN IMMEDIATE", synchronous: str = "FULL") -> None:
        self.key = path
        self._begin = begin
        self._reading = SqliteQueries(path, synchronous)
        self._writing = SqliteQueries(path, synchronous)
        self._turn = asyncio.Lock()

    @property
    def steps(self) -> int:
        """How much SQLite did so far."""
        return self._reading.steps + self._writing.steps

    async def query(self, sql: str, params: Sequence[Any]) -> PendingWrite:
        return await self._reading.query(sql, params)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[SqliteQueries]:
        async with self._turn:
            await self._writing.query(self._begin, ())
            try:
                yield self._writing
            except BaseException:
                await self._writing.query("ROLLBACK", ())
                raise
            await self._writing.query("COMMIT", ())

    async def close(self) -> None:
        await self._reading.close()
        await self._writing.close()


class PostgresQueries:
    """One connection of asyncpg."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def query(self, sql: str, params: Sequence[Any]) -> PendingWrite:
        statement = await self._connection.prepare(sql)
        rows = await statement.fetch(*params)
        number = statement.get_statusmsg().rpartition(" ")[2]
        return rows, int(number) if number.isdigit() else 0


class PostgresClient:
    """A pool of asyncpg."""

    def __init__(self, dsn: str) -> None:
        self.key = dsn
        self._pool = asyncpg.create_pool(dsn, min_size=0, max_size=5)
        self._opening = asyncio.Lock()

    async def _get_pool(self) -> Any:
        async with self._opening:
            return await self._pool  # which opens it, once

    async def query(self, sql: str, params: Sequence[Any]) -> PendingWrite:
        async with (await self._get_pool()).acquire() as connection:
            return await PostgresQueries(connection).query(sql, params)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresQueries]:
        async with (await self._get_pool()).acquire() as connection, connection.transaction():
            yield PostgresQueries(connection)

    async def close(self) -> None:
        await (await self._get_pool()).close()


class MysqlQueries:
    """One connection of asyncmy."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def query(self, sql: str, params: Sequence[Any]) -> PendingWrite:
        async with self._connection.cursor() as cursor:
            await cursor.execute(sql, tuple(params) or None)
            rows = await cursor.fetchall() if cursor.description else []
            return list(rows), cursor.rowcount


class MysqlClient:
    """A pool of asyncmy."""

    def __init__(
        self,
        dsn: str,
        *,
        flags: int = CLIENT.FOUND_ROWS,
        isolation: str = "READ-COMMITTED",
        charset: str = "utf8mb4",
        sql_mode: str = "STRICT_TRANS_TABLES",
    ) -> None:
        place = urlsplit(dsn)
        self.key = dsn
        self._options: dict[str, Any] = {
            "host": place.hostname, "port": place.port, "user": place.username, "password": place.password,
            "db": place.path.strip("/"), "client_flag": flags, "charset": charset, "autocommit": True,
            "init_command": f"SET SESSION tx_isolation = '{isolation}', sql_mode = '{sql_mode}'",
        }  # fmt: skip
        self._pool: Any = None
        self._opening = asyncio.Lock()

    async def _get_pool(self) -> Any:
        async with self._opening:
            if self._pool is None:
                self._pool = await asyncmy.create_pool(minsize=0, maxsize=5, **self._options)
            return self._pool

    async def query(self, sql: str, params: Sequence[Any]) -> PendingWrite:
        async with (await self._get_pool()).acquire() as connection:
            return await MysqlQueries(connection).query(sql, params)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MysqlQueries]:
        async with (await self._get_pool()).acquire() as connection:
            await connection.begin()
            try:
                yield MysqlQueries(connection)
            except BaseException:
                await connection.rollback()
                raise
            await connection.commit()

    async def close(self) -> None:
        pool = await self._get_pool()
        pool.close()
        await pool.wait_closed()
