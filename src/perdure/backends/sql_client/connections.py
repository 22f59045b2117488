"""The client of a program as the connections of a store.

A client has `async query(sql, params) -> (rows, rowcount)` and `transaction()`, an async context manager that gives an object
with such a `query`, commits on exit and rolls back on an exception. Values are text and integers, rows are sequences.
Placeholders are `$1` for PostgreSQL, `%s` for MySQL and `?` for SQLite. At set-up the client is tried out, and one that does
something else is refused with the reason, before it could lose anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, Protocol, Self

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.damaged_runs import UnreadableText
from perdure.backends.base.retries import WriteFailure, wrap_error
from perdure.backends.sql.dialect import Statement, Tables
from perdure.backends.sql.schema import set_up
from perdure.backends.sql.session import CallersConnection, Channel, Result, SqlConnections
from perdure.backends.sql.transaction import refuse_autocommit, refuse_kind
from perdure.backends.sql_client.settings import check_settings
from perdure.errors import PerdureError, PersistenceError, ValueNotStorable

_UPDATE_UNCHANGED: Final = "UPDATE $meta SET value = value WHERE name = 'schema_version'"
_LOCK_WRITES: Final = "UPDATE $meta SET value = value WHERE name = ''"
_INSERT_PROBE: Final = "INSERT INTO $meta (name, value) VALUES (?1, 0)"
_COUNT_PROBE: Final = "SELECT count(*) FROM $meta WHERE name = ?1"
_DELETE_PROBE: Final = "DELETE FROM $meta WHERE name = ?1"

# Error numbers and SQLSTATEs, whichever driver raises them: deadlocks, lock time-outs, and duplicate keys of another transaction
# that is visible now.
_DUPLICATE: Final[frozenset[str | int]] = frozenset({"23505", 1062})
_TRANSIENT: Final[frozenset[str | int]] = frozenset({"40001", "40P01", "55P03", 1205, 1213, *_DUPLICATE})
# The same for: a value is too long for the server.
_TOO_LONG: Final[frozenset[str | int]] = frozenset({"54000", 1153})
# The same for: the connection broke, or was refused, or the server is shutting down or starting.
_CONNECTION_LOST: Final[frozenset[str | int]] = frozenset({
    "08000", "08001", "08003", "08004", "08006", "57P01", "57P02", "57P03", "53300",
    1040, 1053, 1927, 2002, 2003, 2006, 2013, 2055,
})  # fmt: skip


class Queries(Protocol):
    """An object that runs statements."""

    async def query(self, sql: str, params: Sequence[Any], /) -> tuple[Sequence[Sequence[Any]], int]:
        """The rows, and how many rows were changed or matched."""
        ...


class SqlClient(Queries, Protocol):
    """A client of which a store can be made."""

    def transaction(self) -> AbstractAsyncContextManager[Queries]:
        """A transaction."""
        ...


# How Python's sqlite3 begins to say that a TEXT value is not UTF-8.
_NOT_TEXT: Final = "Could not decode to UTF-8"


class ClientChannel:
    """A channel that sends statements through a client, one by one."""

    def __init__(self, queries: Queries, label: str) -> None:
        self.queries = queries
        self._label = label

    async def send(self, statements: Sequence[Statement]) -> Sequence[Result]:
        """The result of each statement. Raises `UnreadableText`: a run is damaged, the client is not."""
        try:
            return [_to_result(await self.queries.query(sql, list(values)), self._label) for sql, values in statements]
        except Exception as error:
            if _NOT_TEXT in str(error):
                raise UnreadableText(str(error)) from error
            raise


def _to_result(answer: Any, label: str) -> Result:
    """The answer, if it is rows and a number. Raises `PersistenceError`."""
    is_pair = isinstance(answer, tuple | list) and len(answer) == 2
    if not is_pair:
        raise PersistenceError(label, f"its query() must give (rows, rowcount), and gave {_kind_of(answer)}")
    rows, count = answer
    if isinstance(count, bool) or not isinstance(count, int):
        raise PersistenceError(label, f"its query() must give the number of rows as an int, and gave {_kind_of(count)}")
    if isinstance(rows, Mapping | str) or not isinstance(rows, Sequence):
        raise PersistenceError(label, f"its query() must give a sequence of rows, and gave {_kind_of(rows)}")
    if rows and isinstance(rows[0], Mapping):
        raise PersistenceError(label, "its query() must give rows as sequences in the order of the columns, and gave mappings")
    return Result(rows, count)


def _kind_of(value: object) -> str:
    """The kind of an answer. Not the answer itself, which may hold anything."""
    size = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"a {type(value).__name__}{size}"


class ClientConnections(SqlConnections):
    """A borrowed client, on the event loop on which it was first used."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-sql")  # never used: borrowed connections have a loop of their own

    def __init__(self, client: SqlClient, tables: Tables, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(f"sql_client ({tables.dialect.label})", tables, is_borrowed=True, loop=loop)
        self.client = client

    def sibling(self) -> Self:
        """Connections with the same client, on its loop."""
        connections = type(self)(self.client, self.tables, self._pinned_loop)
        connections.is_ready, connections.durability = self.is_ready, self.durability
        return connections

    def driver_connection(self, channel: Channel) -> Any:
        """What the client's `transaction()` gave."""
        return channel.queries if isinstance(channel, ClientChannel) else None

    async def callers_channel(self, caller: CallersConnection) -> ClientChannel:
        """The channel on what the client's `transaction()` gave the caller. Whether it is open cannot be told."""
        queries = caller.driver_connection
        if queries is self.client:
            raise refuse_autocommit("async with client.transaction() as connection:")
        if not callable(getattr(queries, "query", None)):
            raise refuse_kind(queries, "sql_client", "what transaction() of the client gives")
        return ClientChannel(queries, self.label)

    def is_duplicate(self, error: BaseException) -> bool:
        return _is_one_of(_DUPLICATE, _cause(error))

    def is_conflict(self, error: BaseException) -> bool:
        met = _cause(error)
        if self.is_duplicate(met):
            return False
        return _is_one_of(_TRANSIENT, met) or _is_one_of(_CONNECTION_LOST, met) or "database is locked" in str(met)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Channel]:
        async with _mark_commit_errors(self.client.transaction()) as queries:
            channel = ClientChannel(queries, self.label)
            if self.is_ready and self.tables.dialect.name == "sqlite":
                # Takes the write lock, also when the client began the transaction with a plain BEGIN.
                await channel.send([self.tables.statement(_LOCK_WRITES)])
            yield channel

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Channel]:
        yield ClientChannel(self.client, self.label)

    async def open(self, *, allowed: bool) -> None:
        """Create the tables if need be, and check that the client does what the store relies on."""
        async with self.transaction() as channel:
            await set_up(channel, self.tables, self.label, allowed=allowed)
        async with self.transaction() as channel:
            await self._check_affected_rows(channel)
            self.durability = await check_settings(self.tables.dialect.name, channel, self.label)
        await self._check_rollback()

    async def _check_affected_rows(self, channel: Channel) -> None:
        (result,) = await channel.send([self.tables.statement(_UPDATE_UNCHANGED)])
        if result.count == 1:
            return
        reason = f"it gave {result.count} as the number of rows that an UPDATE matched, not 1"
        if self.tables.dialect.name == "mysql":
            reason += ": connect with CLIENT.FOUND_ROWS, so that rows count which an UPDATE leaves as they are"
        raise PersistenceError(self.label, reason)

    async def _check_rollback(self) -> None:
        name = f"probe {secrets.token_hex(8)}"
        with contextlib.suppress(_ProbeError):
            async with self.transaction() as channel:
                await channel.send([self.tables.statement(_INSERT_PROBE, name)])
                raise _ProbeError
        async with self.transaction() as channel:
            (result,) = await channel.send([self.tables.statement(_COUNT_PROBE, name)])
            if not int(result.rows[0][0]):
                return
            await channel.send([self.tables.statement(_DELETE_PROBE, name)])
        raise PersistenceError(self.label, "its transaction() does not roll back when an exception leaves it")

    async def close(self) -> None:
        """Nothing: the client is the caller's."""

    def classify_failure(self, error: BaseException) -> WriteFailure:
        """By number, SQLSTATE or SQLite's message. A transaction that failed before its commit was rolled back."""
        met = _cause(error)
        if _is_one_of(_TRANSIENT, met) or "database is locked" in str(met):
            return WriteFailure.RETRY
        if isinstance(error, _CommitError):
            return WriteFailure.UNKNOWN
        return (
            WriteFailure.RETRY
            if isinstance(met, ConnectionError) or _is_one_of(_CONNECTION_LOST, met)
            else WriteFailure.PERMANENT
        )

    def map_error(self, error: BaseException) -> BaseException:
        """Every error of a client is wrapped, since only the client knows what it means.

        `ValueNotStorable` where the database says that a value is too long.
        """
        met = _cause(error)
        if isinstance(met, PerdureError) or not isinstance(met, Exception):
            return met
        text = f"{type(met).__name__}: {met}"
        if _is_one_of(_TOO_LONG, met) or getattr(met, "sqlite_errorcode", None) == sqlite3.SQLITE_TOOBIG:
            refusal = ValueNotStorable("value", text)
            refusal.__cause__ = met
            return refusal
        return wrap_error(met, self.label, text)


class _ProbeError(Exception):
    """Leaves a transaction, to see whether it is rolled back."""


class _CommitError(Exception):
    """The end of a transaction failed, so it is unknown whether it was committed. Its cause says why."""


def _cause(error: BaseException) -> BaseException:
    return error.__cause__ or error if isinstance(error, _CommitError) else error


def _is_one_of(known: frozenset[str | int], error: BaseException) -> bool:
    numbers = (getattr(error, "sqlstate", None), getattr(error, "errno", None), *error.args[:1])
    return any(isinstance(number, str | int) and number in known for number in numbers)


@contextlib.asynccontextmanager
async def _mark_commit_errors(transaction: AbstractAsyncContextManager[Queries]) -> AsyncIterator[Queries]:
    """The transaction; an error of its commit becomes a `_CommitError`, and no error is suppressed."""
    queries = await transaction.__aenter__()
    try:
        yield queries
    except BaseException as error:
        with contextlib.suppress(
            Exception
        ):  # a rollback without a connection fails, and is not needed; the first error is raised
            await transaction.__aexit__(type(error), error, error.__traceback__)
        raise
    try:
        await transaction.__aexit__(None, None, None)
    except Exception as error:
        raise _CommitError from error
