"""Transactions that a caller and the store share: a step's own writes with its record, and runs and signals of an outbox.

That of a step begins at the fence, whose lock it holds until it ends, so no other worker takes the run over meanwhile. A task on
the loop of the connections holds it open and runs the caller's requests, one after the other. Where the connections were opened
for the caller's loop (`SqlConnections.copy_for_loop`) that is the same loop, and the caller may use the driver's connection
itself; borrowed ones may be on another. Once a statement of `execute` has failed every further one is refused and all of it is
rolled back, as PostgreSQL does by itself.

An outbox writes inside a transaction of the caller's own: what it wrote exists if and when the caller commits. Its verbs are
those of every SQL store, over a session on the caller's connection. They run on the caller's event loop, or, with a synchronous
driver, in its thread. Nothing is committed or rolled back here, and errors of the database are raised as they are. There is no
lease, because a worker could not see the run before the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, NoReturn, TypeVar

from perdure.backends.base.batching import Reply
from perdure.backends.base.new_runs import check_start, row_after_create
from perdure.backends.base.retries import WriteFailure
from perdure.backends.sql import inbox, reading, runs
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.recording import Write, record_all
from perdure.backends.sql.rows import identity
from perdure.backends.sql.session import CallersConnection, Session, SqlConnections
from perdure.errors import PerdureError, PersistenceError, TransactionFailed
from perdure.model.journal import Entry
from perdure.model.records import Created, Item, Lease, NewRun, Pulse

T = TypeVar("T")
Work = Callable[[Session], Awaitable[Any]]

_FIRST_WORD: Final = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*([A-Za-z]*)", re.DOTALL)
# What MySQL commits by itself, before and after it.
_COMMITS: Final = frozenset({"ALTER", "ANALYZE", "CREATE", "DROP", "GRANT", "OPTIMIZE", "RENAME", "REPAIR", "REVOKE", "TRUNCATE"})
_OVER: Final = "it has ended; use it inside `async with store.transaction(...)`"


class _RollBackError(Exception):
    """Makes the transaction roll back."""


class SqlTransaction:
    """What `transaction(lease)` gives. Usable until the context is left."""

    # Statements that would end the transaction or outlive it.
    REFUSED: ClassVar[frozenset[str]] = frozenset({
        "ABORT", "ATTACH", "BEGIN", "COMMIT", "DETACH", "DISCARD", "END", "LOCK", "PRAGMA", "PREPARE", "RELEASE", "RESET",
        "ROLLBACK", "SAVEPOINT", "SET", "START", "UNLOCK", "USE", "VACUUM", "XA",
    })  # fmt: skip

    def __init__(self, connections: SqlConnections, namespace: str, lease: Lease) -> None:
        self._connections = connections
        self._namespace = namespace
        self._lease = lease
        # Why it takes no statements, or None; and whether that is because one failed.
        self._broken: str | None = "it has not begun"
        self._has_failed = False
        self._is_committing = False
        self._is_over = False
        self._statements = 0
        self._recorded: list[Entry] = []
        self._db: Session | None = None
        # Both belong to the connections loop. None in the queue means commit.
        self._requests: asyncio.Queue[tuple[Work, asyncio.Future[Any]] | None] = asyncio.Queue()
        self._holding: asyncio.Task[None] | None = None

    @property
    def connection(self) -> Any:
        """The driver's own connection. Raises `RuntimeError` on another event loop than that of a borrowed pool or client."""
        if self._db is None or self._broken is not None:
            raise TransactionFailed(self._label, self._broken or _OVER)
        connection = self._connections.driver_connection(self._db.channel)
        if not self._connections.is_here:
            raise RuntimeError(
                f"the connections of {self._connections.label} were borrowed from another event loop, where alone they can be "
                "used: use `await transaction.execute(...)`, or run the workflow on that loop"
            )
        return connection

    @property
    def _label(self) -> str:
        return f"{self._connections.tables.dialect.label} transaction"

    async def call_plain(self, fn: Callable[[], T]) -> T:
        """Call it here: the driver is asynchronous, so a plain function must return an awaitable, as a lambda may."""
        result = fn()
        if not inspect.isawaitable(result):
            label = self._connections.tables.dialect.label
            raise TypeError(f"the function of a transaction on {label} must be `async def`: the connections are asynchronous")
        return result

    def is_transient(self, error: BaseException) -> bool:
        """Whether this error, or what it was raised from, is a conflict with another transaction; or the connection is lost."""
        if self._db is not None and self._connections.is_lost(self._db.channel):
            return True
        met: BaseException | None = error
        while met is not None and not self._connections.is_conflict(met):
            met = met.__cause__ or getattr(met, "orig", None)  # `orig` is SQLAlchemy's
        return met is not None

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of the caller's, with the database's own placeholders, and give its rows.

        The database's complaints about it are raised as they are. Raises `ValueError` for a statement that would end the
        transaction or outlive it.
        """
        found = _FIRST_WORD.match(sql)
        word = found[1].upper() if found is not None else ""
        self._refuse(word)
        values = tuple(parameters)
        rows: list[tuple[Any, ...]] = await self._request(lambda db: self._run(db, sql, values), is_callers=True)
        self._statements += 1
        if self._is_committed_by(word):
            self._broken = f"{word} has committed it already, as {self._connections.tables.dialect.label} does by itself"
        return rows

    async def _run(self, db: Session, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        (result,) = await db.send([Statement(sql, values)])
        return [tuple(row) for row in result.rows]

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = (), items: Sequence[Item] = ()) -> Pulse:
        """As `Store.record`, committed with everything else in this transaction."""
        write = Write.record(self._lease, tuple(entries), tuple(consume), tuple(items))
        pulse: Pulse = await self._request(lambda db: self._write(db, write))
        self._statements += 1
        self._recorded += write.entries
        return pulse

    async def _write(self, db: Session, write: Write) -> Pulse:
        if not self._connections.is_in_transaction(db.channel):
            raise TransactionFailed(self._label, "its function has ended it; what was done before that may stay")
        (answer,) = await self._record_all(db, [write])
        if isinstance(answer, Pulse):
            return answer
        raise answer if isinstance(answer, BaseException) else TypeError(f"a record was answered with {answer!r}")

    async def _record_all(self, db: Session, writes: Sequence[Write]) -> list[Reply[Pulse]]:
        return await record_all(db, writes)

    def _refuse(self, word: str) -> None:
        if word in self.REFUSED:
            raise ValueError(f"{word} cannot be used inside a transaction(): it begins, commits and rolls back by itself")
        if self._is_committed_by(word) and self._statements:
            raise ValueError(f"{word} would commit what was done before it in this transaction(); use it in one of its own")

    def _is_committed_by(self, word: str) -> bool:
        return word in _COMMITS and self._connections.tables.dialect.name == "mysql"

    async def begin(self) -> None:
        """Pass the fence."""
        await self._connections.run(self._begin())

    async def commit(self) -> None:
        """Commit it. After a lost reply, the recorded entries show whether it was committed."""
        await self._connections.run(self._commit())

    async def end(self) -> None:
        """Take no more statements, and roll back what was not committed."""
        await self._connections.run(self._end())

    async def _begin(self) -> None:
        await self._connections.retry_transient(self._try_to_begin)

    async def _try_to_begin(self, _: bool) -> None:  # noqa: FBT001 - as `retry_transient` calls it
        if self._is_over:
            raise TransactionFailed(self._label, _OVER)
        self._requests, self._has_failed = asyncio.Queue(), False
        self._holding = asyncio.ensure_future(self._hold())
        try:
            await self._run_in_task(self._pass_fence)
        except BaseException:
            await self._roll_back_or_wait()
            raise
        if not self._is_over:
            self._broken = None

    async def _pass_fence(self, db: Session) -> None:
        (answer,) = await self._record_all(db, [Write.record(self._lease, (), ())])
        if isinstance(answer, BaseException):
            raise answer

    async def _run_in_task(self, work: Work) -> Any:
        """The result of the work, done by the task that holds the transaction; raises the error of that task if it has ended."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((work, answer))
        holding = self._holding
        if holding is not None:
            await asyncio.wait([answer, holding], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await holding
        return await answer

    async def _hold(self) -> None:
        """The task in which the transaction is open."""
        with contextlib.suppress(_RollBackError):
            async with self._connections.callers_transaction() as channel:
                self._db = db = Session(channel, self._connections.tables, self._namespace)
                while (request := await self._requests.get()) is not None:
                    await self._serve(db, *request)

    async def _serve(self, db: Session, work: Work, answer: asyncio.Future[Any]) -> None:
        try:
            result = await work(db)
        except _RollBackError:
            raise
        except Exception as error:
            if not isinstance(error, PerdureError):  # after a refusal by perdure the transaction is still whole
                self._broken = self._broken or "an earlier statement failed, so all of it is rolled back; nothing was written"
                self._has_failed = True
            answer.set_exception(error)
            if self._connections.is_silence(error):
                raise  # the connection is of no use any more, and the server may keep the transaction's locks until it is ended
        else:
            answer.set_result(result)

    async def _request(self, work: Work, *, is_callers: bool = False) -> Any:
        """The result of the work. With `is_callers`, the database's errors about the statement are raised as they are."""

        async def send() -> Any:
            if self._broken is not None:
                raise TransactionFailed(self._label, self._broken)
            return await self._run_in_task(work)

        try:
            return await self._connections.run(send())
        except Exception as error:
            failure = self._connections.classify_failure(error)
            if is_callers and (failure is WriteFailure.PERMANENT or self._connections.is_duplicate(error)):
                raise
            self._raise_failure(error, failure)

    def _raise_failure(self, error: Exception, failure: WriteFailure) -> NoReturn:
        """Raise the error as one of perdure: `TransactionFailed` if the database has said no, so that nothing was written."""
        mapped = self._connections.map_error(error)
        if mapped is error:
            raise error
        if type(mapped) is PersistenceError and failure is not WriteFailure.UNKNOWN:
            raise TransactionFailed(self._label, mapped.args[1]) from mapped.__cause__
        raise mapped from mapped.__cause__

    async def _commit(self) -> None:
        if self._has_failed:
            raise TransactionFailed(self._label, self._broken or "a statement failed")
        self._broken, self._is_committing = _OVER, True
        if self._holding is None:
            return
        self._requests.put_nowait(None)
        try:
            await self._holding
        except Exception as error:  # noqa: BLE001 - raised again, as what it means
            failure = self._connections.classify_failure(error)
            if failure is WriteFailure.UNKNOWN and await self._was_committed():
                return
            self._raise_failure(error, failure)

    async def _was_committed(self) -> bool:
        if not self._recorded:
            return False
        last = self._recorded[-1]
        found = await self._connections.read(self._namespace, lambda db: reading.journal(db, self._lease.run_id, last.seq - 1))
        return last in found[:1]

    async def _end(self) -> None:
        self._is_over = True
        await self._roll_back_or_wait()

    async def _roll_back_or_wait(self) -> None:
        self._broken = _OVER
        holding, self._holding, self._db = self._holding, None, None
        if holding is None:
            return
        if not self._is_committing:
            self._requests.put_nowait((_roll_back, asyncio.get_running_loop().create_future()))
            self._interrupt(holding)
        await asyncio.wait([holding])
        if not holding.cancelled():
            holding.exception()  # retrieved, or asyncio would log it: what could not be rolled back was never committed either

    def _interrupt(self, holding: asyncio.Task[None]) -> None:
        """Stop the statement that is in flight for a caller that has left, where that is possible."""


async def _roll_back(_: Session) -> None:
    raise _RollBackError


@contextlib.asynccontextmanager
async def open_fenced(transaction: SqlTransaction) -> AsyncIterator[SqlTransaction]:
    """The transaction once it has passed the fence: commits on exit, rolls back on an exception."""
    try:
        await transaction.begin()
        yield transaction
        await transaction.commit()
    finally:
        await transaction.end()


async def unwrap(connection: Any) -> CallersConnection:
    """The driver's connection itself, or the one behind a connection or a session of SQLAlchemy.

    SQLAlchemy begins a transaction on the driver's connection with the first statement, so one is sent.
    """
    if "sqlalchemy" not in sys.modules:
        return CallersConnection(connection, is_managed=False)
    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session as OrmSession
    from sqlalchemy.orm import scoped_session

    if isinstance(connection, AsyncSession | async_scoped_session):
        connection = await connection.connection()
    if isinstance(connection, AsyncConnection):
        await connection.exec_driver_sql("SELECT 1")
        return CallersConnection((await connection.get_raw_connection()).driver_connection, is_managed=True)
    if isinstance(connection, OrmSession | scoped_session):
        connection = connection.connection()
    if isinstance(connection, Connection):
        connection.exec_driver_sql("SELECT 1")
        return CallersConnection(connection.connection.driver_connection, is_managed=True)
    return CallersConnection(connection, is_managed=False)


def refuse_kind(connection: object, label: str, wanted: str) -> TypeError:
    """The error for a connection that is not one of the store's driver."""
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return TypeError(f"connection= must be {wanted} for a {label} store, or SQLAlchemy's over such a one, not a {kind}")


def refuse_autocommit(how: str) -> ValueError:
    """The error for a connection on which no transaction is open."""
    return ValueError(f"no transaction is open on connection=, so the run could not share its commit; begin one first: {how}")


def refuse_database(found: object, wanted: object) -> ValueError:
    """The error for a connection to another database."""
    return ValueError(f"connection= leads to {found}, and the store is in {wanted}; use a connection to the store's own database")


class SqlOutbox:
    """The verbs for one transaction of a caller."""

    def __init__(
        self,
        db: Session,
        *,
        notify: Callable[[], Awaitable[object]] | None = None,
        clock: Callable[[int | None], int | None] = lambda now: now,
    ) -> None:
        self._db = db
        # Wakes the workers at the commit, where the database can.
        self._notify = notify
        self._clock = clock

    async def create(self, run: NewRun, *, now: int | None = None) -> Created:
        """Insert the run, or find it."""
        creation = runs.RunCreation(check_start(run), now=self._clock(now))
        (created,) = await runs.create_all(self._db, [creation])
        if created is None:
            created = await runs.find(self._db, creation) or await self._find_newer(creation)
        await self._tell()
        return created

    async def _find_newer(self, creation: runs.RunCreation) -> Created:
        """The run that was committed since this transaction began, whose reads may be of that moment: a lock reads anew."""
        found, at = await runs.lock_run(self._db, creation.run.id, creation.now)
        if found is None:
            raise RuntimeError(f"run {creation.run.id!r} was deleted while it was being created; try again")
        return Created(run=row_after_create(found, creation.run, at), is_new=False)

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox."""
        seq = await inbox.signal(self._db, run_id, name, payload, dedupe, identity(name, dedupe), self._clock(now))
        await self._tell()
        return seq

    async def _tell(self) -> None:
        if self._notify is not None:
            await self._notify()
