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

from perdure.backends.sqlite.calls import Call, Watcher
from perdure.backends.sqlite.connection import is_fault
from perdure.backends.sqlite.database import Database
from perdure.backends.sqlite.link import Link
from perdure.backends.sqlite.recording import fence, record
from perdure.backends.sqlite.schema import Session
from perdure.backends.sqlite.worker import Worker
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


class _TransactionWorker(Worker):
    """A thread whose connection outlives refusals and the errors of the caller's own statements, and no other error.

    A record that failed half way would otherwise be committed with what came before.
    """

    def _run_alone(self, call: Call[Any]) -> None:
        try:
            call.value = call.verb(self._open())
        except (_StatementError, PerdureError) as error:
            call.error = error
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller hears of it and the thread lives on
            call.fail(error, self.file.path)
            self._let_go()


class SQLiteTransaction:
    """What `transaction(lease)` gives. Usable until the context is left."""

    def __init__(self, worker: Worker, session: Callable[[Link], Session], lease: Lease) -> None:
        self._worker = worker
        self._session = session
        self._lease = lease
        self._is_open = True

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of the caller's and give its rows. SQLite's complaints about it are raised as they are.

        Raises `ValueError` for a statement that would end the transaction or reach beyond it.
        """
        try:
            return await self._call(lambda link: _execute(link, sql, parameters))
        except _StatementError as carrier:
            raise carrier.error from None

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = ()) -> Pulse:
        """As `Store.record`, committed with everything else in this transaction."""
        verb = partial(record, lease=self._lease, entries=tuple(entries), consume=tuple(consume))
        return await self._call(lambda link: verb(self._session(link)).pulse)

    async def begin(self) -> None:
        """Take the write lock and pass the fence."""
        await submit(self._worker, lambda link: _begin(self._session(link), self._lease))

    async def commit(self) -> None:
        """Make it last."""
        await self._call(Link.commit)

    def end(self, done: Watcher) -> None:
        """Take no more statements; once the thread has ended, and what was not committed was rolled back, `done` is told."""
        self._is_open = False
        self._worker.stop(done)

    async def _call(self, verb: Callable[[Link], T]) -> T:
        if not self._is_open:
            raise PersistenceError("SQLite transaction", "it has ended; use it inside `async with store.transaction(...)`")
        return await submit(self._worker, lambda link: verb(_under_way(link)))


@asynccontextmanager
async def transaction(database: Database, session: Callable[[Link], Session], lease: Lease) -> AsyncIterator[SQLiteTransaction]:
    """A fenced transaction on the database: commits on exit, rolls back on an exception or cancellation."""
    worker = _TransactionWorker(database.file, "transaction")
    under_way = SQLiteTransaction(worker, session, lease)
    database.add_transaction(worker)
    ended = Watcher()
    try:
        await under_way.begin()
    except BaseException:
        under_way.end(ended)  # not awaited: it may wait for the write lock for long, and then lets go of it
        raise
    try:
        yield under_way
        await under_way.commit()
    finally:
        under_way.end(ended)
        await ended.future


async def submit(worker: Worker, verb: Callable[[Link], T]) -> T:
    """Run the verb on the worker's thread."""
    call = Call(verb)
    worker.put(call)
    return await call


def _begin(db: Session, lease: Lease) -> None:
    db.link.begin()
    fence(db, lease)


def _under_way(link: Link) -> Link:
    """The connection, if its transaction is still the one that was begun: SQLite ends it by itself after some errors."""
    if not link.connection.in_transaction:
        raise PersistenceError("SQLite transaction", "SQLite rolled it back after an earlier error; nothing of it was written")
    return link


def _execute(link: Link, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    connection, refused = link.connection, list[str]()
    link.fences.clear()  # whatever it does

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
