"""What tests do on a server without the store, and pools and clients of a program that a store borrows."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from perdure import stores
from perdure.backends.base.dsn import split_options
from perdure.store import FullStore
from tests.backends.places import with_options

# A password that a driver has to unescape.
PASSWORD: Final = "s3cr:t/w@rd"


class Operator(Protocol):
    """An administrator of a server. Each method takes the DSN of a store's place."""

    def count_tables(self, dsn: str) -> int: ...
    def set_schema_version(self, dsn: str, version: int) -> None: ...


class SqlOperator(ABC):
    @abstractmethod
    async def query(self, dsn: str, sql: str) -> Sequence[Sequence[Any]]:
        """The rows of one statement."""

    def ask(self, dsn: str, sql: str) -> Sequence[Sequence[Any]]:
        return asyncio.run(self.query(dsn, sql))

    @abstractmethod
    def count_tables(self, dsn: str) -> int: ...

    def set_schema_version(self, dsn: str, version: int) -> None:
        self.ask(dsn, f"UPDATE perdure_meta SET value = {version} WHERE name = 'schema_version'")


class PostgresOperator(SqlOperator):
    async def query(self, dsn: str, sql: str) -> Sequence[Sequence[Any]]:
        import asyncpg  # type: ignore[import-untyped]  # it ships no types

        connection = await asyncpg.connect(dsn)
        try:
            rows: Sequence[Sequence[Any]] = await connection.fetch(sql)
            return rows
        finally:
            await connection.close()

    def count_tables(self, dsn: str) -> int:
        return len(self.ask(dsn, "SELECT FROM pg_tables WHERE schemaname = current_schema()"))

    def count_connections(self, dsn: str) -> int:
        """How many connections have the `application_name` of this DSN."""
        others = "SELECT FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        return len(self.ask(dsn, f"{others} AND application_name = current_setting('application_name')"))

    @asynccontextmanager
    async def failover(self, dsn: str) -> AsyncIterator[None]:
        """Every connection is lost and the server refuses writes, as a standby does, until the context is left."""
        await self.query(dsn, "ALTER DATABASE postgres SET default_transaction_read_only = on")
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datid <> 0"
        await self.query(dsn, others)
        yield
        writable = with_options(dsn, "default_transaction_read_only=off")
        await self.query(writable, "ALTER DATABASE postgres RESET default_transaction_read_only")


_OTHER_CONNECTIONS: Final = "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = DATABASE()"


class MysqlOperator(SqlOperator):
    async def query(self, dsn: str, sql: str) -> Sequence[Sequence[Any]]:
        import asyncmy

        from perdure.backends.mysql.address import parse_address

        connection: Any = await asyncmy.connect(**parse_address(dsn).arguments(), autocommit=True)
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(sql)
                rows: Sequence[Sequence[Any]] = await cursor.fetchall()
                return rows
        finally:
            connection.close()

    def count_tables(self, dsn: str) -> int:
        return len(self.ask(dsn, "SHOW TABLES"))

    def count_connections(self, dsn: str) -> int:
        """How many connections use the database of this DSN."""
        return len(self.ask(dsn, _OTHER_CONNECTIONS))

    @asynccontextmanager
    async def failover(self, dsn: str) -> AsyncIterator[None]:
        """Every connection is lost and the server refuses writes, as a replica does, until the context is left."""
        parts = urlsplit(dsn)
        root = urlunsplit(parts._replace(netloc=f"root:@{parts.hostname}:{parts.port}"))
        # A user with these rights may write all the same. Rights are read when a connection is opened.
        await self.query(dsn, f"REVOKE READ_ONLY ADMIN, SUPER ON *.* FROM {parts.username}@'127.0.0.1'")
        await self.query(root, "SET GLOBAL read_only = 1")
        for (number,) in await self.query(dsn, _OTHER_CONNECTIONS):
            await self.query(dsn, f"KILL {number}")
        yield
        await self.query(root, "SET GLOBAL read_only = 0")


class LibsqlOperator(SqlOperator):
    async def query(self, dsn: str, sql: str) -> Sequence[Sequence[Any]]:
        from perdure.backends.libsql.address import parse_url
        from perdure.backends.libsql.hrana import HranaClient, committed_results, in_transaction
        from perdure.backends.sql.dialect import Statement

        url, options = split_options(dsn, {"table", "tls"})
        target = parse_url(url.replace("libsql:", "http:"))
        client = HranaClient(target.address, target.token, size=1)
        try:
            statement = Statement(sql.replace("perdure_", f"{options['table']}_"))
            (result,) = committed_results(await client.batch(in_transaction([statement])))
            return result.rows
        finally:
            await client.close()

    def count_tables(self, dsn: str) -> int:
        return len(self.ask(dsn, "SELECT name FROM sqlite_master WHERE name LIKE 'perdure_%'"))


class MongoOperator:
    def count_tables(self, dsn: str) -> int:
        with self._client(dsn) as client:
            return len(client.get_default_database().list_collection_names())

    def set_schema_version(self, dsn: str, version: int) -> None:
        with self._client(dsn) as client:
            client.get_default_database()["perdure_meta"].update_one({}, {"$set": {"version": version}})

    def count_connections(self, dsn: str) -> int:
        """How many connections have the `appName` of this DSN."""
        (name,) = parse_qs(urlsplit(dsn).query)["appName"]
        every = {"$currentOp": {"allUsers": True, "idleConnections": True}}
        with self._client(dsn.replace(name, "operator")) as client:
            return len(list(client.admin.aggregate([every, {"$match": {"appName": name}}])))

    def _client(self, dsn: str) -> Any:
        import pymongo

        return pymongo.MongoClient[dict[str, Any]](dsn)


@contextmanager
def same_login(dsn: str) -> Iterator[str]:
    """The DSN, which has a password already."""
    yield dsn


@contextmanager
def mongo_login(dsn: str) -> Iterator[str]:
    """The DSN of the same database with a user of its own, and a password that has to be escaped."""
    import pymongo

    parts = urlsplit(dsn)
    with pymongo.MongoClient[dict[str, Any]](dsn) as client:
        database, user = client.get_default_database(), f"user_{secrets.token_hex(4)}"
        database.command("createUser", user, pwd=PASSWORD, roles=[{"role": "readWrite", "db": database.name}])
        try:
            login = urlunsplit(parts._replace(netloc=f"{user}:{quote(PASSWORD, safe='')}@{parts.netloc}"))
            yield with_options(login, f"authSource={database.name}", "serverSelectionTimeoutMS=500")
        finally:
            database.command("dropUser", user)


@asynccontextmanager
async def postgres_lender(dsn: str) -> AsyncIterator[Callable[[], FullStore]]:
    """A function that makes stores on a program's own pool."""
    import asyncpg

    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=3)
    yield lambda: stores.postgres(pool=pool)
    await pool.close()


@asynccontextmanager
async def mysql_lender(dsn: str) -> AsyncIterator[Callable[[], FullStore]]:
    """A function that makes stores on a program's own pool."""
    pool = await mysql_pool(dsn)
    yield lambda: stores.mysql(pool=pool)
    await close_mysql_pool(pool)


async def mysql_pool(dsn: str, **options: Any) -> Any:
    """A pool as a program has it: REPEATABLE READ, and no autocommit."""
    import asyncmy
    from asyncmy.constants import CLIENT

    from perdure.backends.mysql.address import parse_address

    settings = {
        "minsize": 1,
        "maxsize": 3,
        "client_flag": CLIENT.FOUND_ROWS,
        "init_command": "SET sql_mode = 'STRICT_ALL_TABLES'",
    }
    return await asyncmy.create_pool(**parse_address(dsn).arguments(), **{**settings, **options})


async def close_mysql_pool(pool: Any) -> None:
    pool.close()
    await pool.wait_closed()


@asynccontextmanager
async def mongo_lender(dsn: str) -> AsyncIterator[Callable[[], FullStore]]:
    """A function that makes stores on a program's own client."""
    from pymongo import AsyncMongoClient

    client: AsyncMongoClient[dict[str, Any]] = await asyncio.to_thread(AsyncMongoClient, dsn, tz_aware=True)
    yield lambda: stores.mongo(client=client, database=urlsplit(dsn).path[1:])
    await client.close()
