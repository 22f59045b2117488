"""The backends that the process suite runs on. One line in `BACKENDS` makes the whole of it run on another.

A backend gives empty places by DSN, on a server that the tests of a session share, and servers of its own that a test may kill. A
store without a server (`own_server` is None) is used by processes alone, so there it is all of these that are killed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from perdure.testing.servers.libsql import LibsqlServer
from perdure.testing.servers.mongo import MongoServer
from perdure.testing.servers.mysql import MysqlServer
from perdure.testing.servers.postgres import PostgresServer
from perdure.testing.servers.redis import RedisServer
from tests.backends import places


class Server(Protocol):
    """A server that can be killed and started again on the same data. Nothing runs before `start`."""

    @property
    def dsn(self) -> str: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...
    def remove(self) -> None: ...


class OwnRedis(RedisServer):
    @property
    def dsn(self) -> str:
        return self.url


class OwnLibsql(LibsqlServer):
    @property
    def dsn(self) -> str:
        return places.libsql_dsn(self)


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of store: where its contract suite is, how to get an empty place, and a server of its own."""

    name: str
    contract: str
    place: Callable[[], AbstractContextManager[str]]
    own_server: Callable[[], Server] | None = None
    # How many SIGKILLs its workers take under `make chaos`.
    kills: int = 100
    # How many times slower than others it is here, which leases and the moments of kills must allow for.
    pace: float = 1.0

    @property
    def lease_ttl(self) -> float:
        """What workers get: short, as what a killed one held is waited for, but longer than a renewal takes at worst."""
        return 0.8 * self.pace

    def __str__(self) -> str:
        return self.name


BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (
        Backend("sqlite", "test_sqlite.py", places.on_sqlite, kills=500),
        Backend("files", "test_files_store.py", places.on_files),
        Backend("postgres", "test_postgres.py", places.on_postgres, partial(PostgresServer, own=True)),
        Backend("mysql", "test_mysql.py", places.on_mysql, partial(MysqlServer, own=True)),
        Backend("mongo", "test_mongo.py", places.on_mongo, partial(MongoServer, own=True), pace=6),  # emulated
        Backend("redis", "test_redis.py", places.on_redis, OwnRedis),
        Backend("libsql", "test_libsql.py", places.on_libsql, partial(OwnLibsql, own=True)),
    )
}
