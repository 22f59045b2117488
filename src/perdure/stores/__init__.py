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
    from perdure.stores.memory_store import MemoryStore
    from perdure.stores.postgres_store import PostgresStore
    from perdure.stores.redis_store import RedisStore
    from perdure.stores.sqlite_store import SQLiteStore

__all__ = ["files", "memory", "open_store", "postgres", "redis", "sqlite"]

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
    "redis": _dsn.Scheme(redis),
    "rediss": _dsn.Scheme(redis),
    "unix": _dsn.Scheme(redis),
}
