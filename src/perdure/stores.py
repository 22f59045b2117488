"""Where runs are kept. `stores.sqlite("app.db")`, `stores.postgres("postgresql://...")`, or a DSN through `open_store`.

Nothing is connected before the first use. `close()` closes what the store has opened, not a pool or client that was passed in.
Every store has leases, so there is no option for locking. These options mean the same everywhere:

- `table`: how the names of tables or keys begin.
- `prefix`: a namespace. Stores with different prefixes never see each other's runs.
- `auto_migrate`: whether tables are made at the first use. Otherwise only `await store.setup()` makes them.
- `pool_size`: how many connections are open at most for the verbs of the store.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from perdure.backends.base import dsn as _dsn
from perdure.backends.base.address import path_text
from perdure.store import FullStore, Store

if TYPE_CHECKING:
    from perdure.backends.key_value import KeyValueRunStore
    from perdure.backends.libsql import LibsqlStore
    from perdure.backends.memory.store import MemoryStore
    from perdure.backends.mongo import MongoStore
    from perdure.backends.mysql import MysqlStore
    from perdure.backends.postgres import PostgresStore
    from perdure.backends.redis import RedisStore
    from perdure.backends.sql_client.store import SqlClientStore
    from perdure.backends.sql_client.unfenced import SqlWorkflowStore
    from perdure.backends.sqlite import SQLiteStore
    from perdure.simple_stores import StateKeeper


__all__ = [
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


def _refuse_lock(make: Callable[P, S]) -> Callable[P, S]:
    """The function, with an error that says why there is no `lock=`."""

    @functools.wraps(make)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> S:
        if "lock" in kwargs:
            raise TypeError(f"{make.__name__}() takes no lock=: leases are always on, so two workers never drive one run")
        return make(*args, **kwargs)

    return refusing


@_refuse_lock
def memory(*, prefix: str = "") -> MemoryStore:
    """A store in this process's memory: for tests, and for runs that may die with the process."""
    from perdure.backends.memory.store import MemoryStore

    return MemoryStore(prefix=prefix)


@_refuse_lock
def sqlite(
    path: str | Path,
    *,
    table: str = "perdure",
    prefix: str = "",
    synchronous: Literal["full", "normal"] = "full",
    auto_migrate: bool = True,
) -> SQLiteStore:
    """A store in an SQLite file, for any number of processes on one machine.

    - `path`: the file. It is made at the first use, its directory is not.
    - `synchronous`: `full` makes an acknowledged record survive a power loss; with `normal` it survives the death of the process.
    """
    from perdure.backends.sqlite import SQLiteStore

    return SQLiteStore(path, table=table, prefix=prefix, synchronous=synchronous, auto_migrate=auto_migrate)


@_refuse_lock
def postgres(
    url: str | None = None,
    *,
    pool: Any | None = None,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
    pool_size: int = 10,
) -> PostgresStore:
    """A store in a PostgreSQL database, by its URL or through an asyncpg `pool`. Needs `perdure[postgres]`.

    - `url`: `postgresql://user:password@host:port/database`.
    - `pool`: an `asyncpg.Pool` of yours, used on its event loop and left open.
    """
    from perdure.backends.postgres import PostgresStore

    return PostgresStore(url, pool=pool, table=table, prefix=prefix, auto_migrate=auto_migrate, pool_size=pool_size)


@_refuse_lock
def mysql(
    url: str | None = None,
    *,
    pool: Any | None = None,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
    pool_size: int = 10,
) -> MysqlStore:
    """A store in a MySQL or MariaDB database, by its URL or through an asyncmy `pool`. Needs `perdure[mysql]`.

    - `url`: `mysql://user:password@host:port/database`.
    - `pool`: a pool of asyncmy that you made with `CLIENT.FOUND_ROWS`, used on its event loop and left open.
    """
    from perdure.backends.mysql import MysqlStore

    return MysqlStore(url, pool=pool, table=table, prefix=prefix, auto_migrate=auto_migrate, pool_size=pool_size)


@_refuse_lock
def mongo(
    url: str | None = None,
    *,
    client: Any | None = None,
    database: str | None = None,
    collection: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
) -> MongoStore:
    """A store in a MongoDB replica set, by its URL or through an `AsyncMongoClient`. Needs `perdure[mongo]`.

    - `url`: `mongodb://user:password@host:port/database`.
    - `client`: a `pymongo.AsyncMongoClient` of yours, used on its event loop and left open.
    - `database`: the name of the database. By default the one in the URL, or `perdure`.
    - `collection`: how the names of collections begin.
    """
    from perdure.backends.mongo import MongoStore

    return MongoStore(url, client=client, database=database, collection=collection, prefix=prefix, auto_migrate=auto_migrate)


@_refuse_lock
def libsql(
    url: str | os.PathLike[str],
    *,
    auth_token: str | None = None,
    tls: bool | None = None,
    table: str = "perdure",
    prefix: str = "",
    auto_migrate: bool = True,
) -> LibsqlStore | SQLiteStore:
    """A store on a libSQL server (`libsql://...`, Turso too), or in a local file (`file:app.db`), which SQLite serves.

    - `url`: `libsql://host`, or the path of a file as `file:app.db`.
    - `auth_token`: the token for the server.
    - `tls`: whether the connection is encrypted. By default it is, except with `http://`.
    """
    from perdure.backends.libsql import LibsqlStore, is_remote

    place = path_text(url, 'a libSQL store takes "libsql://host", or the path of a file as "file:app.db"')
    if is_remote(place):
        return LibsqlStore(place, auth_token=auth_token, tls=tls, table=table, prefix=prefix, auto_migrate=auto_migrate)
    if auth_token or tls is not None:
        raise ValueError("auth_token and tls are for a server, and this is the path of a file; leave them out")
    return sqlite(_path_of_file_url(place), table=table, prefix=prefix, auto_migrate=auto_migrate)


def _path_of_file_url(url: str) -> str:
    """The path in `file:./x.db`; a plain path is one already."""
    if not url.startswith("file:"):
        return url
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment or not parts.path:
        raise ValueError(f"{url!r} must be file:relative.db, file:./relative.db or file:///absolute.db, without options")
    return unquote(parts.path)


@_refuse_lock
def key_value(kv: Any, *, prefix: str = "") -> KeyValueRunStore:
    """A store over any `KeyValueStore`, any store of py-key-value, or an obstore bucket (S3, GCS, Azure, a directory).

    Only what can compare and swap, which is obstore's, serves more than one process. Any other serves this one alone.

    - `kv`: the key-value store, the client or the bucket.
    """
    from perdure.backends.key_value import KeyValueRunStore

    return KeyValueRunStore(kv, prefix=prefix)


@_refuse_lock
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

    - `client`: that object.
    - `dialect`: which SQL it speaks: `postgres`, `mysql` (also for MariaDB) or `sqlite`.
    """
    from perdure.backends.sql_client import sql_client as make

    return make(client, dialect, table=table, prefix=prefix, auto_migrate=auto_migrate)


@_refuse_lock
def redis(
    url: str | None = None, *, client: Any | None = None, table: str = "perdure", prefix: str = "", cluster: bool = False
) -> RedisStore:
    """A store on a Redis or Valkey server, by its URL or through a `redis.asyncio` client. Needs `perdure[redis]`.

    - `url`: `redis://user:password@host:port/number`, `rediss://` with TLS, or `unix:///path`.
    - `client`: a client of `redis.asyncio` of yours, used on its event loop and left open.
    - `cluster`: whether the URL is that of a cluster's node.
    """
    from perdure.backends.redis import RedisStore

    return RedisStore(url, client=client, table=table, prefix=prefix, cluster=cluster)


def open_store(dsn: str) -> FullStore:
    """The store that a DSN names; keywords of its function can follow as `?table=...&prefix=...`."""
    return _SCHEMES[_dsn.scheme_of(dsn, _SCHEMES)].make_store(dsn)


def _refuse_files(location: str, **_options: object) -> NoReturn:
    directory = location.rstrip("/") or "runs"
    raise ValueError(
        f"files: names a key-value store, which holds texts and not runs; to store runs write sqlite:///{directory}.db, "
        f"or, for one process, stores.key_value(FilesKeyValueStore({unquote(directory)!r}))"
    )


_SCHEMES: Final[dict[str, _dsn.DsnScheme[FullStore]]] = {
    "memory": _dsn.DsnScheme(memory, _dsn.no_location),
    "sqlite": _dsn.DsnScheme(sqlite, _dsn.path_after_slashes),
    "files": _dsn.DsnScheme(_refuse_files, lambda location: (location,)),
    "postgresql": _dsn.DsnScheme(postgres),
    "postgres": _dsn.DsnScheme(postgres),
    "mysql": _dsn.DsnScheme(mysql),
    "mariadb": _dsn.DsnScheme(mysql),
    "mongodb": _dsn.DsnScheme(mongo),
    "mongodb+srv": _dsn.DsnScheme(mongo),
    "libsql": _dsn.DsnScheme(libsql),
    "file": _dsn.DsnScheme(libsql),
    "redis": _dsn.DsnScheme(redis),
    "rediss": _dsn.DsnScheme(redis),
    "unix": _dsn.DsnScheme(redis),
}


class Choice(NamedTuple):
    """A store, whether the caller has to close it, and whether it is in memory because none was asked for."""

    store: Store
    is_owned: bool
    is_implicit: bool


@lru_cache(maxsize=1)
def _process_memory() -> Store:
    return memory()


def choose_store(store: Store | StateKeeper | str | None, *, is_anonymous: bool = False, is_for_workers: bool = False) -> Choice:
    """The store to work on.

    `is_anonymous`: the run has no id to find it by, so it gets a store in memory for itself. `is_for_workers`: the store must
    know which runs are due.
    """
    if isinstance(store, str):
        return Choice(open_store(store), is_owned=True, is_implicit=False)
    if store is not None:
        return Choice(_as_store(store, is_for_workers=is_for_workers), is_owned=False, is_implicit=False)
    if is_anonymous:
        return Choice(memory(), is_owned=True, is_implicit=True)
    dsn = os.environ.get("PERDURE_STORE")
    if dsn:
        return Choice(open_store(dsn), is_owned=True, is_implicit=False)
    return Choice(_process_memory(), is_owned=False, is_implicit=True)


def _as_store(store: Any, *, is_for_workers: bool) -> Store:
    if not isinstance(store, type) and hasattr(store, "record"):
        usable: Store = store
        return usable
    from perdure.backends.user_defined.state_store import is_state_keeper, state_store

    if is_state_keeper(store):
        if callable(getattr(store, "due", None)):
            from perdure.backends.user_defined.workflow_adapter import workflow_store

            return workflow_store(store)
        if is_for_workers:
            raise TypeError(f"a Runtime needs a store that knows what is due, not {store!r}, which can be the store= of wf.run")
        return state_store(store)
    raise TypeError(
        f"store= takes a store or a DSN such as 'sqlite:///app.db', or one of your own with save(run), load(id), delete(id) and "
        f"due(now, limit), or for wf.run what has save(id, snapshot), load(id) and delete(id), such as StatePersistence(kv), "
        f"not {store!r}"
    )
