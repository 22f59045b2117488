"""Empty places on the servers that the tests of a session share. Each is a schema, database, table stem or directory."""

from __future__ import annotations

import asyncio
import atexit
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from tests.servers import libsql, mongo, mysql, postgres, redis, s3

BUCKET: Final = "perdure-places"


@contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="perdure-place-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def on_sqlite() -> Iterator[str]:
    with directory() as inside:
        yield f"sqlite:///{quote(str(inside))}/runs.db"


@contextmanager
def on_postgres() -> Iterator[str]:
    dsn, schema = postgres.shared_server().dsn, new_name()
    run_on_postgres(dsn, f"CREATE SCHEMA {schema}")
    try:
        yield postgres.with_search_path(dsn, schema)
    finally:
        run_on_postgres(dsn, f"DROP SCHEMA {schema} CASCADE")


def run_on_postgres(dsn: str, sql: str) -> None:
    import asyncpg  # type: ignore[import-untyped]  # it ships no types

    async def run() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    asyncio.run(run())


@contextmanager
def on_mysql() -> Iterator[str]:
    dsn, database = mysql.shared_server().dsn, new_name()
    run_on_mysql(dsn, f"CREATE DATABASE {database}")
    try:
        yield mysql.with_database(dsn, database)
    finally:
        run_on_mysql(dsn, f"DROP DATABASE {database}")


def run_on_mysql(dsn: str, sql: str) -> None:
    import asyncmy

    from perdure.backends.mysql.address import parse_address

    async def run() -> None:
        connection: Any = await asyncmy.connect(**parse_address(dsn).arguments())
        try:
            await connection.query(sql)
        finally:
            connection.close()

    asyncio.run(run())


@contextmanager
def on_mongo() -> Iterator[str]:
    import pymongo

    dsn, database = mongo.shared_server().dsn, new_name()
    try:
        yield mongo.with_database(dsn, database)
    finally:
        with pymongo.MongoClient[dict[str, Any]](dsn) as client:
            client.drop_database(database)


@contextmanager
def on_libsql() -> Iterator[str]:
    """Not removed: the server ends with the session; on a server that stays, the stem shows that the tables are a test's."""
    yield f"{libsql_dsn(libsql.shared_server())}&table={new_name()}"


def libsql_dsn(server: libsql.LibsqlServer) -> str:
    return f"{server.url.replace('http:', 'libsql:')}?tls=false"


@cache
def _redis_url() -> str:
    url = redis.configured_url()
    if url is not None:
        return url
    server = redis.RedisServer()
    server.start()
    atexit.register(server.remove)
    return server.url


@contextmanager
def on_redis() -> Iterator[str]:
    from redis import Redis

    url, stem = _redis_url(), new_name()
    try:
        yield f"{url}?table={stem}"
    finally:
        with Redis.from_url(url) as client:
            for key in client.scan_iter(f"{{{stem}:*", count=10_000):
                client.unlink(key)


@contextmanager
def through_a_client(place: Callable[[], AbstractContextManager[str]]) -> Iterator[str]:
    """The same place, for `sql_client`."""
    with place() as dsn:
        yield f"sql_client+{dsn}"


@contextmanager
def on_s3() -> Iterator[str]:
    """Not removed: the server ends with the session; on a server that stays, the name shows that the folder is a test's."""
    yield new_folder(s3_endpoint())


def new_folder(endpoint: str) -> str:
    return f"s3+{endpoint}/{BUCKET}/{new_name()}"


@cache
def s3_endpoint() -> str:
    server = s3.shared_server()
    server.make_bucket(BUCKET)
    return server.endpoint


def with_options(dsn: str, *options: str) -> str:
    """The DSN with these options, each `name=value` or several with `&` between them; empty ones are left out."""
    for option in filter(None, options):
        dsn += f"{'&' if '?' in dsn else '?'}{option}"
    return dsn


def new_name() -> str:
    return f"place_{secrets.token_hex(6)}"
