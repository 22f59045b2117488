"""Everything that a store's place holds, read past the store: the rows, documents, keys, objects or files, as bytes."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import unquote, urlsplit

from perdure.backends.base.dsn import split_options
from tests.backends.operators import LibsqlOperator, MongoOperator, MysqlOperator, PostgresOperator, SqlOperator
from tests.servers import s3

# The statement that names the tables of a place.
_TABLES = {
    "postgresql": "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()",
    "mysql": "SHOW TABLES",
    "libsql": "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'perdure_%'",
}
_OPERATORS: dict[str, SqlOperator] = {"postgresql": PostgresOperator(), "mysql": MysqlOperator(), "libsql": LibsqlOperator()}


async def read_raw(dsn: str) -> bytes:
    """All bytes in the place of this DSN, one after the other."""
    return await asyncio.to_thread(lambda: b"\n".join(map(_as_bytes, _parts(dsn.removeprefix("sql_client+")))))


async def ask(dsn: str, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a statement in the SQL database of this DSN, where tables begin with `perdure_`."""
    place = dsn.removeprefix("sql_client+")
    kind = place.partition(":")[0]
    if kind in _OPERATORS:
        return [tuple(row) for row in await _OPERATORS[kind].query(place, sql)]
    return await asyncio.to_thread(_ask_sqlite, sqlite_path(place), sql)


def _ask_sqlite(path: str, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(sql).fetchall()


def is_in(text: str, raw: bytes) -> bool:
    """Whether the raw data hold this text, as it is or in base64."""
    # Where a text begins in base64 depends on what stands before it: its first and last characters are mixed with others.
    encoded = (base64.b64encode(b"-" * shift + text.encode())[4 if shift else 0 : -4] for shift in range(3))
    return text.encode() in raw or any(part in raw for part in encoded)


def _as_bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode(errors="backslashreplace")


def _parts(dsn: str) -> Iterator[Any]:
    kind = dsn.partition(":")[0]
    if kind in _OPERATORS:
        yield from _rows(dsn, kind)
    elif kind == "sqlite":
        with closing(sqlite3.connect(sqlite_path(dsn))) as database:
            yield from database.iterdump()
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                yield from _cells(database.execute(f'SELECT * FROM "{table}"').fetchall())
    elif kind == "mongodb":
        with MongoOperator()._client(dsn) as client:
            database = client.get_default_database()
            for name in database.list_collection_names():
                yield from (value for document in database[name].find() for value in _leaves(document))
    elif kind == "redis":
        yield from _redis_values(dsn)
    else:
        yield from _objects(dsn)


def sqlite_path(dsn: str) -> str:
    """The file of this DSN."""
    return unquote(dsn.removeprefix("sqlite:///"))


def _rows(dsn: str, kind: str) -> Iterator[Any]:
    operator = _OPERATORS[kind]
    tables = [table for (table,) in operator.ask(dsn, _TABLES[kind])]
    for table in tables:
        yield from _cells(operator.ask(dsn, f"SELECT * FROM {table}"))


def _cells(rows: Any) -> Iterator[Any]:
    return (value for row in rows for value in row)


def _leaves(document: Any) -> Iterator[Any]:
    if isinstance(document, dict | list):
        for value in document.values() if isinstance(document, dict) else document:
            yield from _leaves(value)
    else:
        yield document


def _redis_values(dsn: str) -> Iterator[Any]:
    from redis import Redis

    url, options = split_options(dsn, {"table"})
    with Redis.from_url(url) as client:
        for key in client.scan_iter(f"{{{options['table']}:*", count=10_000):
            yield key
            match client.type(key):
                case b"string":
                    yield client.get(key)
                case b"hash":
                    yield from (part for pair in client.hgetall(key).items() for part in pair)
                case b"zset":
                    yield from client.zrange(key, 0, -1)
                case b"set":
                    yield from client.smembers(key)


def _objects(dsn: str) -> Iterator[Any]:
    from obstore.store import S3Store

    bucket, _, folder = urlsplit(dsn.removeprefix("s3+")).path.lstrip("/").partition("/")
    store = S3Store(bucket, **s3.shared_server().options())
    for page in store.list(prefix=f"{folder}/"):
        for found in page:
            yield found["path"]
            yield bytes(store.get(found["path"]).bytes())
