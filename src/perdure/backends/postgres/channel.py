"""Statements over an asyncpg connection.

The verbs of `backends.sql` send theirs through a `PostgresChannel`. The hot verbs have templates with asyncpg's own placeholders,
in which `$1` is the namespace, and send them by `fetch` and `fetch_each`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from perdure.backends.postgres.errors import is_stale
from perdure.backends.sql.dialect import POSTGRES, Dialect, Statement
from perdure.backends.sql.session import Result, Session

# A payload is bytes, and a list is bound as one array.
DIALECT: Final[Dialect] = replace(POSTGRES, takes_lists=True, words={**POSTGRES.words, "payload": "bytea"})

_WITH_ROWS: Final = ("SELECT", "WITH")


class Connection(Protocol):
    """What is used of an asyncpg connection."""

    def fetch(self, query: str, *args: Any, timeout: float | None = None) -> Awaitable[list[Any]]: ...
    def fetchmany(self, query: str, args: Sequence[Sequence[Any]]) -> Awaitable[list[Any]]: ...
    async def execute(self, query: str, *args: Any) -> str: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...


class PatientConnection:
    """A connection whose statements may take so many seconds, whatever its own time limit is."""

    __slots__ = ("_seconds", "connection")

    def __init__(self, connection: Any, seconds: float) -> None:
        self.connection = connection
        self._seconds = seconds

    def fetch(self, query: str, *args: Any, timeout: float | None = None) -> Awaitable[list[Any]]:
        rows: Awaitable[list[Any]] = self.connection.fetch(query, *args, timeout=timeout or self._seconds)
        return rows

    def fetchmany(self, query: str, args: Sequence[Sequence[Any]]) -> Awaitable[list[Any]]:
        rows: Awaitable[list[Any]] = self.connection.fetchmany(query, args, timeout=self._seconds)
        return rows

    async def execute(self, query: str, *args: Any) -> str:
        done: str = await self.connection.execute(query, *args, timeout=self._seconds)
        return done

    def is_closed(self) -> bool:
        closed: bool = self.connection.is_closed()
        return closed

    def terminate(self) -> None:
        self.connection.terminate()

    def get_server_pid(self) -> int:
        """The number of the server's process, as the server or a pooler gave it."""
        pid: int = self.connection.get_server_pid()
        return pid


class PostgresChannel:
    """A connection as the verbs of `backends.sql` use it. Each statement is a round trip."""

    __slots__ = ("connection",)

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def send(self, statements: Sequence[Statement]) -> Sequence[Result]:
        """What each statement gave. Rows come from a SELECT only: no statement of `backends.sql` has a RETURNING."""
        return [await self._run(sql, values) for sql, values in statements]

    async def _run(self, sql: str, values: Sequence[Any]) -> Result:
        if sql.lstrip().startswith(_WITH_ROWS):
            rows = await self.connection.fetch(sql, *values)
            return Result(rows, len(rows))
        count = (await self.connection.execute(sql, *values)).rpartition(" ")[2]  # of "INSERT 0 1", "UPDATE 1", "CREATE TABLE"
        return Result((), int(count) if count.isdigit() else 0)


@contextlib.asynccontextmanager
async def begin(connection: Connection, commit: str = "COMMIT") -> AsyncIterator[PostgresChannel]:
    """A transaction in which each statement sees what was committed before it: `commit` ends it, an exception rolls it back.

    It is not asyncpg's own because `commit` may send something along with COMMIT in the same round trip.
    """
    await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
    try:
        yield PostgresChannel(connection)
    except BaseException as error:
        await _roll_back(connection, error)
        raise
    await connection.execute(commit)


async def _roll_back(connection: Connection, error: BaseException) -> None:
    if connection.is_closed() or is_stale(error):  # a stale one is closed, with its transaction
        return
    try:
        await connection.execute("ROLLBACK")
    except Exception:  # noqa: BLE001 - the server rolls back a transaction that has lost its connection
        connection.terminate()


def fetch(db: Session, template: str, *values: Any) -> Awaitable[list[Any]]:
    """The rows of a hot statement."""
    return connection_of(db).fetch(db.tables.sql(template), db.namespace, *values)


def fetch_each(db: Session, template: str, parameters: Sequence[Sequence[Any]]) -> Awaitable[list[Any]]:
    """The rows of a hot statement that is executed with each of these in turn, in one round trip and one transaction."""
    if len(parameters) == 1:
        return fetch(db, template, *parameters[0])
    namespace = db.namespace
    return connection_of(db).fetchmany(db.tables.sql(template), [(namespace, *values) for values in parameters])


def connection_of(db: Session) -> Connection:
    """The connection of a session on PostgreSQL."""
    channel = db.channel
    if not isinstance(channel, PostgresChannel):
        raise TypeError(f"{channel!r} is no connection to PostgreSQL")
    return channel.connection


def columns(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """The rows turned into one list for each column, as `unnest` takes them."""
    turned = [list(column) for column in zip(*rows, strict=True)]
    return turned or [[] for _ in range(width)]
