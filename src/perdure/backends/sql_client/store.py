"""sql_client: the contract through any object that runs SQL, such as the database client that a program has already.

What is needed of it is `async query(sql, params) -> (rows, rowcount)` and `transaction()`, an async context manager that gives
an object with such a `query`, commits on exit and rolls back on an exception. Values are text and integers, rows are sequences.
A client may have a `key`, text that says which database it leads to: clients with equal keys make stores that are the same.
Placeholders are `$1` for PostgreSQL, `%s` for MySQL and `?` for SQLite. What a client does otherwise is found out at set-up and
refused with the reason, before it could lose anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, NoReturn, Protocol, Self

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.failures import WriteFailure
from perdure.backends.sql.connections import SqlConnections
from perdure.backends.sql.dialect import Dialect
from perdure.backends.sql.schema import set_up
from perdure.backends.sql.session import Channel, Result
from perdure.backends.sql.store import SqlStore
from perdure.backends.sql.tables import Statement, Tables
from perdure.backends.sql.values import TEXT
from perdure.errors import PerdureError, PersistenceError
from perdure.store import Durability

_AFFECTED: Final = "UPDATE $meta SET value = value WHERE name = 'schema_version'"
_BE_ALONE: Final = "UPDATE $meta SET value = value WHERE name = ''"
_PROBE: Final = "INSERT INTO $meta (name, value) VALUES (?1, 0)"
_IS_THERE: Final = "SELECT count(*) FROM $meta WHERE name = ?1"
_UNDO: Final = "DELETE FROM $meta WHERE name = ?1"

_FULL: Final = 2  # what PRAGMA synchronous answers for FULL

# Found by number or state, whatever driver gives it: deadlocks, lock time-outs, and that somebody wrote the same at this moment
# and can be seen now.
_PASSING: Final[frozenset[str | int]] = frozenset({"40001", "40P01", "55P03", "23505", 1205, 1213, 1062})
# Found in the same way: that the connection broke, or could not be had, or that the server is going down or coming up.
_GONE: Final[frozenset[str | int]] = frozenset({
    "08000", "08001", "08003", "08004", "08006", "57P01", "57P02", "57P03", "53300",
    1040, 1053, 1927, 2002, 2003, 2006, 2013, 2055,
})  # fmt: skip


class Queries(Protocol):
    """What runs a statement."""

    async def query(self, sql: str, params: Sequence[Any], /) -> tuple[Sequence[Sequence[Any]], int]:
        """The rows, and how many rows were changed or matched."""
        ...


class Client(Queries, Protocol):
    """What a store can be made of."""

    def transaction(self) -> AbstractAsyncContextManager[Queries]:
        """A transaction."""
        ...


class ClientChannel:
    """Statements through a client, one by one."""

    def __init__(self, queries: Queries, label: str) -> None:
        self._queries = queries
        self._label = label

    async def send(self, statements: Sequence[Statement]) -> Sequence[Result]:
        """What each statement gave."""
        return [_checked(await self._queries.query(sql, list(values)), self._label) for sql, values in statements]


def _checked(answer: Any, label: str) -> Result:
    """The answer, if it is rows and a number. Raises `PersistenceError`."""
    is_pair = isinstance(answer, tuple | list) and len(answer) == 2
    if not is_pair:
        raise PersistenceError(label, f"its query() must give (rows, rowcount), and gave {_shown(answer)}")
    rows, count = answer
    if isinstance(count, bool) or not isinstance(count, int):
        raise PersistenceError(label, f"its query() must give the number of rows as an int, and gave {_shown(count)}")
    if isinstance(rows, Mapping | str) or not isinstance(rows, Sequence):
        raise PersistenceError(label, f"its query() must give a sequence of rows, and gave {_shown(rows)}")
    if rows and isinstance(rows[0], Mapping):
        raise PersistenceError(label, "its query() must give rows as sequences in the order of the columns, and gave mappings")
    return Result(rows, count)


def _shown(value: object) -> str:
    """What kind of answer it is. Not the answer itself, in which may be anything."""
    size = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"a {type(value).__name__}{size}"


class ClientConnections(SqlConnections):
    """A borrowed client, on the event loop on which it was first used."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-sql")  # never used: what is borrowed has a loop of its own

    def __init__(self, client: Client, tables: Tables, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(f"sql_client ({tables.dialect.label})", tables, is_borrowed=True, loop=loop)
        self.client = client

    def sibling(self) -> Self:
        """A connections with the same client, and on its loop."""
        connections = type(self)(self.client, self.tables, self._borrowed_loop)
        connections.is_ready, connections.durability = self.is_ready, self.durability
        return connections

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Channel]:
        async with _told_apart(self.client.transaction()) as queries:
            channel = ClientChannel(queries, self.label)
            if self.is_ready and self.tables.dialect.name == "sqlite":
                # So that it is the only one that writes, also when the client began it with a plain BEGIN.
                await channel.send([self.tables.statement(_BE_ALONE)])
            yield channel

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Channel]:
        yield ClientChannel(self.client, self.label)

    async def open(self, *, allowed: bool) -> None:
        """Leave the tables there, and be sure that the client does what the store stands on."""
        async with self.transaction() as channel:
            await set_up(channel, self.tables, self.label, allowed=allowed)
        async with self.transaction() as channel:
            await self._check_affected_rows(channel)
            self.durability = await _CHECKS[self.tables.dialect.name](channel, self.label)
        await self._check_rolling_back()

    async def _check_affected_rows(self, channel: Channel) -> None:
        (result,) = await channel.send([self.tables.statement(_AFFECTED)])
        if result.count == 1:
            return
        said = f"it gave {result.count} as the number of rows that an UPDATE matched, not 1"
        if self.tables.dialect.name == "mysql":
            said += ": connect with CLIENT.FOUND_ROWS, so that rows count which an UPDATE leaves as they are"
        raise PersistenceError(self.label, said)

    async def _check_rolling_back(self) -> None:
        name = f"probe {secrets.token_hex(8)}"
        with contextlib.suppress(_ProbeError):
            async with self.transaction() as channel:
                await channel.send([self.tables.statement(_PROBE, name)])
                raise _ProbeError
        async with self.transaction() as channel:
            (result,) = await channel.send([self.tables.statement(_IS_THERE, name)])
            if not int(result.rows[0][0]):
                return
            await channel.send([self.tables.statement(_UNDO, name)])
        raise PersistenceError(self.label, "its transaction() does not roll back when an exception leaves it")

    async def close(self) -> None:
        """Nothing: the client is somebody else's."""

    def classify_failure(self, error: BaseException) -> WriteFailure:
        """What passes is known by its number, its state or by what SQLite says. What failed before the commit was rolled back."""
        met = _cause(error)
        if _is_one_of(_PASSING, met) or "database is locked" in str(met):
            return WriteFailure.RETRY
        if isinstance(error, _CommitError):
            return WriteFailure.UNKNOWN
        return WriteFailure.RETRY if isinstance(met, ConnectionError) or _is_one_of(_GONE, met) else WriteFailure.PERMANENT

    def map_error(self, error: BaseException) -> BaseException:
        """What a client raises is wrapped, whatever it is: what it means is the client's affair."""
        met = _cause(error)
        if isinstance(met, PerdureError) or not isinstance(met, Exception):
            return met
        told = PersistenceError(self.label, f"{type(met).__name__}: {met}")
        told.__cause__ = met
        return told


class _ProbeError(Exception):
    """Leaves a transaction, to see whether it is rolled back."""


class _CommitError(Exception):
    """The end of a transaction failed: nobody knows whether it was committed. Its cause says why."""


def _cause(error: BaseException) -> BaseException:
    return error.__cause__ or error if isinstance(error, _CommitError) else error


def _is_one_of(known: frozenset[str | int], error: BaseException) -> bool:
    numbers = (getattr(error, "sqlstate", None), getattr(error, "errno", None), *error.args[:1])
    return any(isinstance(number, str | int) and number in known for number in numbers)


@contextlib.asynccontextmanager
async def _told_apart(transaction: AbstractAsyncContextManager[Queries]) -> AsyncIterator[Queries]:
    """The transaction; an error that its commit met is a `_CommitError`, and no error is kept back."""
    queries = await transaction.__aenter__()
    try:
        yield queries
    except BaseException as error:
        with contextlib.suppress(Exception):  # without a connection nothing can be rolled back, nor need be; why it broke is said
            await transaction.__aexit__(type(error), error, error.__traceback__)
        raise
    try:
        await transaction.__aexit__(None, None, None)
    except Exception as error:
        raise _CommitError from error


async def _check_postgres(channel: Channel, label: str) -> Durability:
    isolation, encoding, fsync, commit, standbys = await _one(
        channel,
        """
        SELECT current_setting('transaction_isolation'), current_setting('server_encoding'), current_setting('fsync'),
            current_setting('synchronous_commit'), current_setting('synchronous_standby_names')
        """,
    )
    _check_isolation(isolation, "read committed", label)
    if encoding != "UTF8":
        raise PersistenceError(label, f"the database's encoding is {encoding}, which cannot hold every id; use a UTF8 one")
    if fsync == "off" or commit == "off":
        return "process"
    return "replicated" if standbys and commit != "local" else "disk"


async def _check_mysql(channel: Channel, label: str) -> Durability:
    rows = await _all(
        channel,
        """
        SHOW VARIABLES WHERE Variable_name IN
            ('tx_isolation', 'transaction_isolation', 'innodb_flush_log_at_trx_commit', 'character_set_connection', 'sql_mode')
        """,
    )
    told = {TEXT.name_from(name): TEXT.name_from(value) for name, value in rows}
    _check_isolation(told.get("transaction_isolation", told.get("tx_isolation", "")), "READ-COMMITTED", label)
    charset = told.get("character_set_connection", "")
    if charset != "utf8mb4":
        raise PersistenceError(label, f"its connections speak {charset}, which cannot hold every id; connect with utf8mb4")
    if "STRICT_" not in told.get("sql_mode", ""):
        raise PersistenceError(label, "its sql_mode lets values be cut that do not fit; add STRICT_ALL_TABLES to it")
    return "disk" if told.get("innodb_flush_log_at_trx_commit") == "1" else "process"


async def _check_sqlite(channel: Channel, _: str) -> Durability:
    try:
        (synchronous,) = await _one(channel, "PRAGMA synchronous")
        files = [row[2] for row in await _all(channel, "PRAGMA database_list")]
    except Exception:  # noqa: BLE001 - a service that takes no PRAGMA does not tell, so nothing is promised in its name
        return "process"
    return "disk" if int(synchronous) >= _FULL and any(files) else "process"


def _check_isolation(found: str, wanted: str, label: str) -> None:
    if found.lower() != wanted.lower():
        raise PersistenceError(
            label, f"its transactions are {found}, in which a statement may not see what was committed before it; use {wanted}"
        )


async def _all(channel: Channel, sql: str) -> Sequence[Sequence[Any]]:
    (result,) = await channel.send([Statement(sql, ())])
    return result.rows


async def _one(channel: Channel, sql: str) -> Sequence[Any]:
    return (await _all(channel, sql))[0]


_CHECKS: Final[Mapping[str, Callable[[Channel, str], Coroutine[Any, Any, Durability]]]] = {
    "postgres": _check_postgres,
    "mysql": _check_mysql,
    "sqlite": _check_sqlite,
}


class SqlClientStore(SqlStore[ClientConnections]):
    """A store through somebody's database client. The client is not closed with it."""

    def __init__(
        self, client: Client, dialect: Dialect, *, table: str = "perdure", prefix: str = "", auto_migrate: bool = True
    ) -> None:
        connections = ClientConnections(client, Tables(table, dialect, TEXT))
        super().__init__(connections, prefix=prefix, auto_migrate=auto_migrate)

    def __repr__(self) -> str:
        tables = self._connections.tables
        return f"SqlClientStore({tables.dialect.name!r}, table={tables.stem!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store through a client cannot be pickled: make a client in the other process, and a store of that")

    @property
    def key(self) -> tuple[str, ...]:
        """The client's own `key`, or the client itself, as nobody else knows where it leads; table stem and prefix."""
        connections, tables = self._connections, self._connections.tables
        place = str(getattr(connections.client, "key", id(connections.client)))
        return ("sql_client", tables.dialect.name, place, tables.stem, self._namespace)
