"""Where runs are kept. `stores.sqlite("app.db")`, `stores.postgres("postgresql://...")`, or a DSN through `open_store`.

Nothing is connected before the first use. What a store opens it closes with `close()`; a pool or client that was passed in stays
its owner's. Every store has leases, always: there is nothing to lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar

from perdure.store import Store
from perdure.stores import dsn as _dsn

if TYPE_CHECKING:
    from perdure.stores.files_store import FilesStore
    from perdure.stores.key_value_store import KeyValueRunStore
    from perdure.stores.libsql_store import LibsqlStore
    from perdure.stores.memory_store import MemoryStore
    from perdure.stores.mongo_store import MongoStore
    from perdure.stores.mysql_store import MysqlStore
    from perdure.stores.postgres_store import PostgresStore
    from perdure.stores.redis_store import RedisStore
    from perdure.stores.sql_store.client import SqlClientStore
    from perdure.stores.sql_store.snapshots import SqlWorkflowStore
    from perdure.stores.sqlite_store import SQLiteStore

__all__ = [
    "files",
    "key_value",
    "libsql",
    "memory",
    "mongo",
    "mysql",
    "open_store",
    "postgres",
    "redis",
    "sql_client",
    "sqlite",
]

P = ParamSpec("P")
S = TypeVar("S")


def _leases_are_on(make: Callable[P, S]) -> Callable[P, S]:
    """The function, saying of `lock=` why it is not there."""

    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> S:
        if "lock" in kwargs:
            raise TypeError(f"{make.__name__}() takes no lock=: leases are always on, so two workers never drive one run")
        return make(*args, **kwargs)

    return checked


@_leases_are_on
def memory(*, prefix: str = "") -> MemoryStore:
    """A store in this process's memory: for tests, and for runs that may die with the process."""
    from perdure.stores.memory_store import MemoryStore

    return MemoryStore(prefix=prefix)


@_leases_are_on
def sqlite(
    path: str | Path,
    *,
    table: str = "perdure",
    prefix: str = "",
    synchronous: Literal["full", "normal"] = "full",
    auto_migrate: bool = True,
) -> SQLiteStore:
    """A store in an SQLite file, for any number of processes on one machine."""
    from perdure.stores.sqlite_store import SQLiteStore

    return SQLiteStore(path, table=table, prefix=prefix, synchronous=synchronous, auto_migrate=auto_migrate)


@_leases_are_on
def files(directory: str | Path, *, prefix: str = "") -> FilesStore:
    """A store in a directory of a local disk, for any number of processes on one machine."""
    from perdure.stores.files_store import FilesStore

    return FilesStore(directory, prefix=prefix)


@_leases_are_on
def postgres(
    url: str | None = None,
    *,
    pool: Any | None = None,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
    pool_size: int = 10,
) -> PostgresStore:
    """A store in a PostgreSQL database, by its URL or through an asyncpg `pool`. Needs `perdure[postgres]`."""
    from perdure.stores.postgres_store import PostgresStore

    return PostgresStore(url, pool=pool, table=table, prefix=prefix, auto_migrate=auto_migrate, pool_size=pool_size)


@_leases_are_on
def mysql(
    url: str | None = None,
    *,
    pool: Any | None = None,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
    pool_size: int = 10,
) -> MysqlStore:
    """A store in a MySQL or MariaDB database, by its URL or through an asyncmy `pool`. Needs `perdure[mysql]`."""
    from perdure.stores.mysql_store import MysqlStore

    return MysqlStore(url, pool=pool, table=table, prefix=prefix, auto_migrate=auto_migrate, pool_size=pool_size)


@_leases_are_on
def mongo(
    url: str | None = None,
    *,
    client: Any | None = None,
    database: str | None = None,
    collection: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
) -> MongoStore:
    """A store in a MongoDB replica set, by its URL or through an `AsyncMongoClient`. Needs `perdure[mongo]`."""
    from perdure.stores.mongo_store import MongoStore

    return MongoStore(url, client=client, database=database, collection=collection, prefix=prefix, auto_migrate=auto_migrate)


@_leases_are_on
def libsql(
    url: str,
    *,
    auth_token: str | None = None,
    tls: bool | None = None,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
) -> LibsqlStore | SQLiteStore:
    """A store on a libSQL server (`libsql://...`, Turso too), or in a local file (`file:app.db`), which SQLite serves."""
    from perdure.stores.libsql_store import opened

    return opened(url, auth_token=auth_token, tls=tls, table=table, prefix=prefix, auto_migrate=auto_migrate)


@_leases_are_on
def key_value(kv: Any, *, prefix: str = "") -> KeyValueRunStore:
    """A store over any `KeyValueStore`, any store of py-key-value, or an obstore bucket (S3, GCS, Azure, a directory).

    Only what can compare and swap, which is obstore's, serves more than one process. Any other serves this one alone.
    """
    from perdure.stores.key_value_store import KeyValueRunStore

    return KeyValueRunStore(kv, prefix=prefix)


@_leases_are_on
def sql_client(
    client: Any,
    dialect: Literal["postgres", "mysql", "sqlite"],
    *,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
) -> SqlClientStore | SqlWorkflowStore:
    """A store through your own client: an object with `async query(sql, params) -> (rows, rowcount)` and `transaction()`.

    Without `transaction()` it is unfenced and for one process, and a `PerdureWarning` says so.
    """
    from perdure.stores.sql_store.factory import sql_client as made

    return made(client, dialect, table=table, prefix=prefix, auto_migrate=auto_migrate)


@_leases_are_on
def redis(
    url: str | None = None, *, client: Any | None = None, table: str = "perdure", prefix: str = "", cluster: bool = False
) -> RedisStore:
    """A store on a Redis or Valkey server, by its URL or through a `redis.asyncio` client. Needs `perdure[redis]`."""
    from perdure.stores.redis_store import RedisStore

    return RedisStore(url, client=client, table=table, prefix=prefix, cluster=cluster)


def open_store(dsn: str) -> Store:
    """The store that a DSN names; keywords of its function can follow as `?table=...&prefix=...`."""
    return _dsn.opened(dsn, _SCHEMES)


_SCHEMES: Final = {
    "memory": _dsn.Scheme(memory, _dsn.nowhere),
    "sqlite": _dsn.Scheme(sqlite, _dsn.path_after_slashes),
    "files": _dsn.Scheme(files, _dsn.path),
    "postgresql": _dsn.Scheme(postgres),
    "postgres": _dsn.Scheme(postgres),
    "mysql": _dsn.Scheme(mysql),
    "mariadb": _dsn.Scheme(mysql),
    "mongodb": _dsn.Scheme(mongo),
    "mongodb+srv": _dsn.Scheme(mongo),
    "libsql": _dsn.Scheme(libsql),
    "file": _dsn.Scheme(libsql),
    "redis": _dsn.Scheme(redis),
    "rediss": _dsn.Scheme(redis),
    "unix": _dsn.Scheme(redis),
}
