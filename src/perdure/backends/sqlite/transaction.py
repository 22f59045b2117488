"""A transaction in which a step's own writes and its record are one.

It has a connection and a thread of its own and holds the database's write lock from its beginning, so every other writer of
the file waits until it ends: it should be short, and must not await other verbs of the same store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from perdure.backends.base.lifecycle import Watcher
from perdure.backends.sqlite.connection import is_fault
from perdure.backends.sqlite.connection_thread import ConnectionThread
from perdure.backends.sqlite.database import Database
from perdure.backends.sqlite.pending_call import PendingCall
from perdure.backends.sqlite.recording import fence, record
from perdure.backends.sqlite.session import SqliteSession
from perdure.backends.sqlite.writer_connection import WriterConnection
from perdure.errors import PerdureError, PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Lease, Pulse

T = TypeVar("T")

_REFUSED: Final = {
    sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT, END and ROLLBACK",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT, RELEASE and ROLLBACK TO",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
}


class _StatementError(Exception):
    """Carries an error of the caller's own statement past the mapping of the store's errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _TransactionThread(ConnectionThread):
    """A thread whose connection outlives refusals and the errors of the caller's own statements, and no other error.

    A record that failed half way would otherwise be committed with what came before.
    """

    def _run_alone(self, call: PendingCall[Any]) -> None:
        try:
            call.value = call.verb(self._open())
        except (_StatementError, PerdureError) as error:
            call.error = error
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it and the thread lives on
            call.fail(error, self.file.path)
            self._close()


class SQLiteTransaction:
    """What `transaction(lease)` gives. Usable until the context is left."""

    def __init__(self, thread: ConnectionThread, session: Callable[[WriterConnection], SqliteSession], lease: Lease) -> None:
        self._thread = thread
        self._session = session
        self._lease = lease
        self._is_open = True

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of the caller's and give its rows. An error of SQLite about it is raised as it is.

        Raises `ValueError` for a statement that would end the transaction or reach beyond it.
        """
        try:
            return await self._call(lambda connection: _execute(connection, sql, parameters))
        except _StatementError as carrier:
            raise carrier.error from None

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = ()) -> Pulse:
        """As `Store.record`, committed with everything else in this transaction."""
        verb = partial(record, lease=self._lease, entries=tuple(entries), consume=tuple(consume))
        return await self._call(lambda connection: verb(self._session(connection)).pulse)

    async def begin(self) -> None:
        """Take the write lock and pass the fence."""
        await submit(self._thread, lambda connection: _begin(self._session(connection), self._lease))

    async def commit(self) -> None:
        """Commit it."""
        await self._call(WriterConnection.commit)

    def end(self, done: Watcher) -> None:
        """Take no more statements, and wake `done` once the thread has ended and what was not committed was rolled back."""
        self._is_open = False
        self._thread.stop(done)

    async def _call(self, verb: Callable[[WriterConnection], T]) -> T:
        if not self._is_open:
            raise PersistenceError("SQLite transaction", "it has ended; use it inside `async with store.transaction(...)`")
        return await submit(self._thread, lambda connection: verb(_check_open(connection)))


@asynccontextmanager
async def transaction(
    database: Database, session: Callable[[WriterConnection], SqliteSession], lease: Lease
) -> AsyncIterator[SQLiteTransaction]:
    """A fenced transaction on the database: commits on exit, rolls back on an exception or cancellation."""
    thread = _TransactionThread(database.file, "transaction")
    opened = SQLiteTransaction(thread, session, lease)
    database.add_transaction(thread)
    ended = Watcher()
    try:
        await opened.begin()
    except BaseException:
        opened.end(ended)  # not awaited: the thread may wait long for the write lock, and then releases it
        raise
    try:
        yield opened
        await opened.commit()
    finally:
        opened.end(ended)
        await ended.future


async def submit(thread: ConnectionThread, verb: Callable[[WriterConnection], T]) -> T:
    """Run the verb on the thread."""
    call = PendingCall(verb)
    thread.put(call)
    return await call


def _begin(db: SqliteSession, lease: Lease) -> None:
    db.channel.begin()
    fence(db, lease)


def _check_open(connection: WriterConnection) -> WriterConnection:
    """The connection, if its transaction is still the one that was begun: SQLite ends it by itself after some errors."""
    if not connection.connection.in_transaction:
        raise PersistenceError("SQLite transaction", "SQLite rolled it back after an earlier error; nothing of it was written")
    return connection


def _execute(writer: WriterConnection, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    connection, refused = writer.connection, list[str]()
    writer.fences.clear()  # the statement may change anything

    def authorize(action: int, *_: object) -> int:
        if action in _REFUSED:
            refused.append(_REFUSED[action])
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    connection.set_authorizer(authorize)
    try:
        return connection.execute(sql, parameters).fetchall()
    except Exception as error:
        if refused:
            reason = f"{refused[0]} cannot be used inside a transaction(): it begins, commits and rolls back by itself"
            raise _StatementError(ValueError(reason)) from None
        if is_fault(error):
            raise
        raise _StatementError(error) from error
    finally:
        connection.set_authorizer(None)
