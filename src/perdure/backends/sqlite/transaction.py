"""A transaction in which a step's own writes and its record are one.

It has a connection and a thread of its own and holds the database's write lock from its beginning, so every other writer of
the file waits until it ends: it should be short, and must not await other verbs of the same store. The transactions of a process
wait for each other in the order in which they came; SQLite itself would let them poll for the lock.

A plain function is called in that thread, where it may use the `sqlite3.Connection`. A thread cannot be stopped. When the caller
leaves while the function runs, another thread interrupts its statement, forbids every further one and rolls back: the write lock
is free at once, and what the function still does writes nothing.
"""

from __future__ import annotations

import contextvars
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from perdure.aio.named_locks import NamedLocks
from perdure.aio.threads import run_in_thread
from perdure.backends.base.lifecycle import Watcher
from perdure.backends.sqlite.connection import DatabaseFile, is_fault
from perdure.backends.sqlite.connection_thread import ConnectionThread
from perdure.backends.sqlite.database import Database
from perdure.backends.sqlite.pending_call import PendingCall
from perdure.backends.sqlite.recording import fence, record
from perdure.backends.sqlite.session import SqliteSession
from perdure.backends.sqlite.writer_connection import WriterConnection
from perdure.errors import PerdureError, TransactionFailed
from perdure.model.journal import Entry
from perdure.model.records import Item, Lease, Pulse

T = TypeVar("T")

# Of the transactions of this process, by path.
_locks: Final = NamedLocks()
_MOST_INTERRUPTS: Final = 100
_REFUSED: Final = {
    sqlite3.SQLITE_TRANSACTION: "BEGIN, COMMIT, END and ROLLBACK",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT, RELEASE and ROLLBACK TO",
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_PRAGMA: "PRAGMA",
}


class _StatementError(Exception):
    """Carries an error of the caller's own statement or function past the mapping of the store's errors."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _TransactionThread(ConnectionThread):
    """A thread whose connection outlives refusals and the errors of the caller's own statements, and no other error.

    A record that failed half way would otherwise be committed with what came before.
    """

    def __init__(self, file: DatabaseFile, role: str) -> None:
        super().__init__(file, role)
        # Held while the connection is closed, or used by another thread.
        self._closing = threading.Lock()

    def _close(self) -> None:
        with self._closing:
            super()._close()

    def _open(self) -> WriterConnection:
        if self._connection is None:
            # Of any thread, so that `abort` can roll back. SQLite itself makes calls of several threads wait for each other.
            self._connection = WriterConnection(self.file.connect(self, of_any_thread=True))
        return super()._open()

    def abort(self) -> None:
        """Undo the transaction while a call runs in it, and let that call write nothing any more. In any other thread.

        Only calls that release the GIL are made, and no authorizer is set: a thread that waits for the mutex with the GIL, and
        one that has the mutex and needs the GIL for a callback, would wait for each other. `query_only` is looked at when a
        statement runs, also one that was prepared before.
        """
        with self._closing:
            self._abort()

    def _abort(self) -> None:
        opened = self._connection
        if opened is None:
            return
        for statement in ("PRAGMA query_only = ON", "ROLLBACK"):
            for _ in range(_MOST_INTERRUPTS):
                try:
                    opened.connection.interrupt()
                    opened.connection.execute(statement)
                except sqlite3.OperationalError as error:
                    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
                        continue
                except sqlite3.Error:
                    pass  # it is closed, or SQLite has rolled back by itself
                break

    def is_current(self) -> bool:
        """Whether it is this thread that asks."""
        return self._thread is threading.current_thread()

    def _run_alone(self, call: PendingCall[Any]) -> None:
        try:
            call.value = call.verb(self._open())
        except (_StatementError, PerdureError) as error:
            call.error = error
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it and the thread lives on
            call.fail(error, self.file.path)
            self._distrust()


class SQLiteTransaction:
    """What `transaction(lease)` gives. Usable until the context is left."""

    def __init__(self, thread: _TransactionThread, session: Callable[[WriterConnection], SqliteSession], lease: Lease) -> None:
        self._thread = thread
        self._session = session
        self._lease = lease
        self._is_open = True
        # Those of plain functions that have not ended.
        self._plain_calls = 0
        self._raw: sqlite3.Connection | None = None

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, in a plain function."""
        if self._raw is None or not self._thread.is_current():
            raise RuntimeError(
                "an sqlite3 connection belongs to one thread, here that of its transaction: write the function as a plain `def`, "
                "which is called there, or use `await transaction.execute(...)`"
            )
        return self._raw

    async def call_plain(self, fn: Callable[[], T]) -> T:
        """What the function gives, called in the thread of the transaction."""
        context = contextvars.copy_context()
        self._plain_calls += 1  # until the thread has ended it, whatever becomes of the caller
        try:
            return await self._call(lambda writer: self._call_here(writer, context, fn))
        except _StatementError as carrier:
            raise carrier.error from None

    def _call_here(self, writer: WriterConnection, context: contextvars.Context, fn: Callable[[], T]) -> T:
        self._raw = connection = writer.connection
        writer.fences.clear()  # the function may change anything
        try:
            result = context.run(fn)
        except BaseException as error:
            raise _StatementError(error) from error
        finally:
            self._raw = None
            self._plain_calls -= 1
        if not connection.in_transaction:
            raise TransactionFailed("SQLite transaction", "its function has ended it; what was done before that may stay")
        return result

    def is_transient(self, error: BaseException) -> bool:
        """Never: the write lock is held from the beginning, so no other transaction is in the way."""
        del error
        return False

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of the caller's and give its rows. An error of SQLite about it is raised as it is.

        Raises `ValueError` for a statement that would end the transaction or reach beyond it.
        """
        try:
            return await self._call(lambda writer: _execute(writer, sql, parameters))
        except _StatementError as carrier:
            raise carrier.error from None

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = (), items: Sequence[Item] = ()) -> Pulse:
        """As `Store.record`, committed with everything else in this transaction."""
        verb = partial(record, lease=self._lease, entries=tuple(entries), consume=tuple(consume), items=tuple(items))
        return await self._call(lambda connection: verb(self._session(connection)).pulse)

    async def begin(self) -> None:
        """Take the write lock and pass the fence."""
        await submit(self._thread, lambda connection: _begin(self._session(connection), self._lease))

    async def commit(self) -> None:
        """Commit it."""
        await self._call(_commit)

    def end(self, done: Watcher) -> None:
        """Take no more statements, and wake `done` once the thread has ended and what was not committed was rolled back."""
        self._is_open = False
        self._thread.stop(done)

    async def wait_until_over(self, done: Watcher) -> None:
        """Return when nothing of it can be written any more. A plain function that still runs is not waited for."""
        if self._plain_calls:
            await run_in_thread(self._thread.abort)
        else:
            await done.future

    async def _call(self, verb: Callable[[WriterConnection], T]) -> T:
        if not self._is_open:
            raise TransactionFailed("SQLite transaction", "it has ended; use it inside `async with store.transaction(...)`")
        return await submit(self._thread, lambda connection: verb(_check_open(connection)))


@asynccontextmanager
async def transaction(
    database: Database, session: Callable[[WriterConnection], SqliteSession], lease: Lease
) -> AsyncIterator[SQLiteTransaction]:
    """A fenced transaction on the database: commits on exit, rolls back on an exception or cancellation."""
    async with _locks.hold(database.file.path):
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
            await opened.wait_until_over(ended)


async def submit(thread: ConnectionThread, verb: Callable[[WriterConnection], T]) -> T:
    """Run the verb on the thread."""
    call = PendingCall(verb)
    thread.put(call)
    return await call


def _begin(db: SqliteSession, lease: Lease) -> None:
    db.channel.begin()
    fence(db, lease)


def _commit(writer: WriterConnection) -> None:
    try:
        writer.commit()
    except sqlite3.IntegrityError as refusal:  # a deferred constraint of the caller's tables
        raise TransactionFailed("SQLite transaction", str(refusal)) from refusal


def _check_open(connection: WriterConnection) -> WriterConnection:
    """The connection, if its transaction is still the one that was begun: SQLite ends it by itself after some errors."""
    if not connection.connection.in_transaction:
        raise TransactionFailed("SQLite transaction", "SQLite rolled it back after an earlier error; nothing of it was written")
    return connection


def _execute(writer: WriterConnection, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    with _guard(writer):
        return writer.connection.execute(sql, parameters).fetchall()


@contextmanager
def _guard(writer: WriterConnection) -> Iterator[None]:
    """Refuse statements of the caller that would end the transaction or reach beyond it, and carry errors of the others."""
    connection, refused = writer.connection, list[str]()
    writer.fences.clear()  # the caller's statements may change anything

    def authorize(action: int, *_: object) -> int:
        if action in _REFUSED:
            refused.append(_REFUSED[action])
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    connection.set_authorizer(authorize)
    try:
        yield
    except BaseException as error:
        if refused and isinstance(error, sqlite3.Error):
            reason = f"{refused[0]} cannot be used inside a transaction(): it begins, commits and rolls back by itself"
            raise _StatementError(ValueError(reason)) from None
        if is_fault(error):
            raise
        raise _StatementError(error) from error
    finally:
        connection.set_authorizer(None)
