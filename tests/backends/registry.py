"""The backends that the tests in this directory run on. One line in `BACKENDS` makes all of them run on another.

A backend provides empty places by DSN, on a server that the tests of a session share, and servers of its own that a test may
kill. For a store without a server (`own_server` is None) the tests kill all processes instead. The S3 server keeps everything in
memory and would lose it when killed, so the tests cut the network to it for a while.

A `ServerBackend` also has what the tests of lost replies, round trips, handles and restarts must know of its driver and server.
Those run on each of `SERVER_BACKENDS`, or on the ones that a test names with `on`.

`make chaos` runs every test here on every backend. By default, `by_default` leaves out what only repeats. A test marked
`same_everywhere` is about code that all stores share: it runs on `FEW` of them. A backend that `repeats` another one has only the
tests that name it. A backend whose server `is_slow` has its contract suite, the tests that name it, and those marked
`slow_stores_too`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import pytest

from perdure.store import FullStore
from tests.backends import operators, places
from tests.backends.operators import Operator
from tests.campaign import IS_FULL, times
from tests.servers.libsql import LibsqlServer
from tests.servers.mongo import MongoServer
from tests.servers.mysql import MysqlServer
from tests.servers.postgres import PostgresServer
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.wire import Wire


class Server(Protocol):
    """A server that can be killed and started again on the same data. Nothing runs before `start`."""

    @property
    def dsn(self) -> str: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
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


class ThroughAClient:
    """A server of its own for `sql_client`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.start, self.stop, self.kill, self.remove = server.start, server.stop, server.kill, server.remove

    @property
    def dsn(self) -> str:
        return f"sql_client+{self._server.dsn}"


class WayToS3:
    """A proxy before the session's S3 server. Once closed, it lets no request through, and replies in flight are lost."""

    def __init__(self) -> None:
        self._port = free_port()
        self.dsn = places.new_folder(f"http://127.0.0.1:{self._port}")

    def start(self) -> None:
        self._wire = Wire(places.s3_endpoint(), port=self._port)

    def kill(self) -> None:
        self._wire.close()

    stop = remove = kill


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of store: its contract suite, as a test in `tests/contract`, how to get an empty place, and a server of its own."""

    name: str
    contract: str
    place: Callable[[], AbstractContextManager[str]]
    own_server: Callable[[], Server] | None = None
    # What goes down under load, in the name of that test.
    goes_down: str = "server"
    # How many SIGKILLs its workers take under `make chaos`.
    kills: int = 100
    # How many times slower than others it is here, which leases, the moments of kills and short campaigns must allow for.
    pace: float = 1.0
    # Whether its contract suite takes minutes, and is run by `make chaos` only.
    leaves_contract_to_chaos: bool = False
    # Whether `make test` runs only every fifth case of its contract suite.
    samples_contract: bool = False
    # Whether all that it does is done by the code of another backend in the list.
    repeats: bool = False
    # Whether its server is emulated, or does one thing at a time.
    is_slow: bool = False

    @property
    def lease_ttl(self) -> float:
        """The lease of workers: short, because tests wait for the leases of killed ones, but longer than the slowest renewal."""
        return 0.8 * self.pace

    def times(self, full: int) -> int:
        """As `tests.campaign.times`, where a shortened campaign is shorter still on a slow backend."""
        return full if IS_FULL else max(1, int(times(full) / self.pace))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBackend(Backend):
    """A store that talks to a server over the network."""

    # The module of its driver, which `perdure[name]` installs; none where the store speaks the protocol itself.
    driver: str | None = None
    # Options that a DSN must carry through a proxy, where round trips are counted.
    proxy_options: str = ""
    # Options for a DSN whose server is down: they shorten the driver's own time-outs.
    away_options: str = ""
    # Sets of driver options: each test of lost replies runs once with each.
    driver_options: tuple[str, ...] = ("",)
    # Round trips that the driver may add by itself during a test, to monitor the server.
    monitoring_round_trips: int = 0
    # Looks at its tables and changes their version; none where a store has no tables.
    operator: Operator | None = None
    # How many connections the server has from the stores of a DSN that carries `client_name`.
    count_connections: Callable[[str], int] | None = None
    client_name: str = ""
    # Lets a server of its own lose every connection and refuse writes, until the context is left.
    failover: Callable[[str], AbstractAsyncContextManager[None]] | None = None
    # The DSN of the same place with a password in it.
    login: Callable[[str], AbstractContextManager[str]] | None = None
    # What an error calls a DSN, and DSNs with a password in them that are refused.
    dsn_name: str = ""
    refused_dsns: tuple[str, ...] = ()
    # Makes stores on a pool or client of a program.
    lender: Callable[[str], AbstractAsyncContextManager[Callable[[], FullStore]]] | None = None
    # What wakes the watchers of a store, where the server notifies of changes.
    listener: Callable[[Any], Any] | None = None
    # How many batches of records a store has sent.
    record_batches: Callable[[Any], int] = lambda store: store._batchers.records.statements

    def through(self, wire: Wire, *options: str) -> str:
        """The DSN of the place that this proxy leads to."""
        return places.with_options(wire.url, self.proxy_options, *options)


def on(*backends: Backend) -> pytest.MarkDecorator:
    """Runs a test on these backends only."""
    return pytest.mark.parametrize("backend", backends, ids=str, scope="session")


def through_a_client(backend: Backend) -> Backend:
    """The same databases, for `sql_client`: slower, as statements go one by one and leases are renewed on the work's own loop.

    PostgreSQL stands for all of them by default: the client is the same code, and the dialects are those of the databases' own
    stores.
    """
    own = backend.own_server
    return Backend(
        f"sql_client-{backend}",
        f"test_sql_client.py::test_contract_on_{backend}",
        partial(places.through_a_client, backend.place),
        None if own is None else lambda: ThroughAClient(own()),
        backend.goes_down,
        pace=2,
        leaves_contract_to_chaos=backend is not POSTGRES,
        samples_contract=backend is POSTGRES,
        repeats=backend is not POSTGRES,
    )


SQLITE: Final = Backend("sqlite", "test_sqlite.py::test_contract", places.on_sqlite, goes_down="every process", kills=500)
POSTGRES: Final = ServerBackend(
    "postgres",
    "test_postgres.py::test_contract",
    places.on_postgres,
    partial(PostgresServer, own=True),
    samples_contract=True,
    driver="asyncpg",
    operator=operators.PostgresOperator(),
    count_connections=operators.PostgresOperator().count_connections,
    client_name="application_name=perdure-test",
    failover=operators.PostgresOperator().failover,
    login=operators.same_login,
    dsn_name="PostgreSQL DSN",
    refused_dsns=("mysql://u:secret@h/d", "postgresql://u:secret@[h/d"),
    lender=operators.postgres_lender,
    listener=lambda store: store._listener,
)
MYSQL: Final = ServerBackend(
    "mysql",
    "test_mysql.py::test_contract",
    places.on_mysql,
    partial(MysqlServer, own=True),
    driver="asyncmy",
    operator=operators.MysqlOperator(),
    count_connections=operators.MysqlOperator().count_connections,
    failover=operators.MysqlOperator().failover,
    login=operators.same_login,
    dsn_name="MySQL DSN",
    refused_dsns=(
        "postgresql://u:secret@h/d",
        "mysql://u:secret@[h/d",
        "mysql://u:secret@h:port/d",
        "mysql://u:secret@h/",
    ),
    lender=operators.mysql_lender,
    samples_contract=True,
)
MONGO: Final = ServerBackend(
    "mongo",
    "test_mongo.py::test_contract",
    places.on_mongo,
    partial(MongoServer, own=True),
    pace=6,  # its server is emulated
    is_slow=True,
    samples_contract=True,
    driver="pymongo",
    proxy_options="serverMonitoringMode=poll&heartbeatFrequencyMS=600000",
    away_options="serverSelectionTimeoutMS=500",
    # The driver repeats a write once by itself. Without that, the store has to.
    driver_options=("retryWrites=false", "retryWrites=true"),
    monitoring_round_trips=2,
    operator=operators.MongoOperator(),
    count_connections=operators.MongoOperator().count_connections,
    client_name="appName=perdure-test",
    login=operators.mongo_login,
    dsn_name="MongoDB URL",
    refused_dsns=("mysql://u:secret@h/d", "mongodb://", "mongodb:u:secret@h"),
    lender=operators.mongo_lender,
    listener=lambda store: store._change_stream,
    record_batches=lambda store: store._records.statements,
)
REDIS: Final = ServerBackend(
    "redis",
    "test_redis.py::test_contract",
    places.on_redis,
    OwnRedis,
    samples_contract=True,
    driver="redis",
    listener=lambda store: store._subscription,
    record_batches=lambda store: store._scripts.statements,
)
LIBSQL: Final = ServerBackend(
    "libsql",
    "test_libsql.py::test_contract",
    places.on_libsql,
    partial(OwnLibsql, own=True),
    samples_contract=True,
    operator=operators.LibsqlOperator(),
)
S3: Final = Backend(
    "key_value-s3",
    "test_key_value_s3.py::test_contract",
    places.on_s3,
    WayToS3,
    goes_down="way to the server",
    pace=4,  # its server does one thing at a time
    is_slow=True,
    leaves_contract_to_chaos=True,
)

SERVER_BACKENDS: Final = (POSTGRES, MYSQL, MONGO, REDIS, LIBSQL)
BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend for backend in (SQLITE, *SERVER_BACKENDS, *map(through_a_client, (SQLITE, POSTGRES, MYSQL)), S3)
}
FEW: Final = (SQLITE, POSTGRES)


def by_default(backends: Iterable[Backend], marks: Collection[str] = ()) -> list[Backend]:
    """Return which of these backends a test with these marks runs on; all of them under `make chaos`."""
    if IS_FULL:
        return list(backends)
    if "same_everywhere" in marks:
        return [backend for backend in backends if backend in FEW]
    return [each for each in backends if not each.repeats and (not each.is_slow or "slow_stores_too" in marks)]
