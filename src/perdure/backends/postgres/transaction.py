"""A transaction in which a step's own writes and its record are one.

It begins at the fence, whose lock it holds until it ends: nobody takes the run over meanwhile. It has a connection from a pool
of its own, so that open transactions never keep the store's verbs from theirs. PostgreSQL takes nothing more in a transaction in
which a statement failed, and would answer its COMMIT by rolling it back; so does this.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from perdure.backends.base.retries import WriteFailure
from perdure.backends.postgres import reading
from perdure.backends.postgres.connections import PostgresConnections
from perdure.backends.postgres.errors import classify_failure
from perdure.backends.postgres.recording import record, record_all
from perdure.backends.postgres.schema import Session
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Lease, Pulse

T = TypeVar("T")

_FIRST_WORD: Final = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*([A-Za-z]*)", re.DOTALL)
_REFUSED: Final = frozenset({
    "ABORT", "BEGIN", "COMMIT", "DEALLOCATE", "DISCARD", "END", "LISTEN", "PREPARE", "RELEASE", "RESET", "ROLLBACK", "SAVEPOINT",
    "SET", "START", "UNLISTEN",
})  # fmt: skip


class PostgresTransaction:
    """What `transaction(lease)` gives. Usable until the context is left."""

    def __init__(self, connections: PostgresConnections, namespace: str, lease: Lease) -> None:
        self._connections = connections
        self._namespace = namespace
        self._lease = lease
        self._connection: Any = None
        self._transaction: Any = None
        self._under_way: asyncio.Task[Any] | None = None
        self._is_committing = False
        # Why it takes no statements, or None.
        self._broken: str | None = "it has not begun"
        self._recorded: list[Entry] = []

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of the caller's and give its rows. PostgreSQL's complaints about it are raised as they are.

        Values are `$1`, `$2` and so on. Raises `ValueError` for a statement that would end the transaction or outlive it.
        """
        found = _FIRST_WORD.match(sql)
        if found is not None and found[1].upper() in _REFUSED:
            raise ValueError(
                f"{found[1].upper()} cannot be used inside a transaction(): it begins, commits and rolls back by itself"
            )
        values = tuple(parameters)
        return await self._run(lambda: self._execute(sql, values), is_callers=True)

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = ()) -> Pulse:
        """As `Store.record`, committed with everything else in this transaction."""
        write = record(self._lease, tuple(entries), tuple(consume))
        pulse = await self._run(lambda: self._write(write))
        self._recorded += write.entries
        return pulse

    async def begin(self) -> None:
        """Pass the fence."""
        await self._connections.run(self._begin())

    async def commit(self) -> None:
        """Make it last. A reply that was lost is found out by what was recorded."""
        await self._run(self._commit)

    async def end(self) -> None:
        """Take no more statements, roll back what was not committed, and give the connection back."""
        await self._connections.run(self._end())

    async def _begin(self) -> None:
        self._under_way = asyncio.current_task()
        with self._connections.map_errors():
            self._connection = await self._connections.borrow_for_transaction()
            self._transaction = self._connection.transaction(isolation="read_committed")
            await self._transaction.start()
            self._broken = None
            await self._write(record(self._lease, (), ()))

    async def _run(self, step: Callable[[], Coroutine[Any, Any, T]], *, is_callers: bool = False) -> T:
        async def guarded() -> T:
            if self._broken is not None:
                raise PersistenceError("PostgreSQL transaction", self._broken)
            self._under_way = asyncio.ensure_future(step())
            return await self._watched(self._under_way, is_callers=is_callers)

        return await self._connections.run(guarded())

    async def _watched(self, task: asyncio.Task[T], *, is_callers: bool) -> T:
        try:
            with self._connections.map_errors():
                return await task
        except PersistenceError as error:
            cause = error.__cause__
            if cause is not None:  # PostgreSQL's, and not a refusal of ours
                self._broken = "an earlier statement failed, so PostgreSQL rolls all of it back; nothing of it was written"
                if is_callers and classify_failure(cause) is WriteFailure.PERMANENT:
                    raise cause from None
            raise

    async def _execute(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows = await self._connection.fetch(sql, *values)
        return [tuple(row) for row in rows]

    async def _write(self, write: Any) -> Pulse:
        session = Session(self._connection, self._connections.tables, self._namespace, in_transaction=True)
        (answer,) = await record_all(session, [write])
        if isinstance(answer, BaseException):
            raise answer
        if not isinstance(answer, Pulse):
            raise TypeError(f"a record was answered with {answer!r}")
        return answer

    async def _commit(self) -> None:
        self._is_committing = True
        transaction, self._transaction = self._transaction, None
        self._broken = "it has ended; use it inside `async with store.transaction(...)`"
        try:
            await transaction.commit()
        except Exception as error:
            if classify_failure(error) is not WriteFailure.UNKNOWN or not await self._was_committed():
                raise

    async def _was_committed(self) -> bool:
        if not self._recorded:
            return False
        wanted = self._recorded[-1]

        async def look(db: Session, _: bool) -> list[Entry]:  # noqa: FBT001 - the shape of all work
            return await reading.journal(db, self._lease.run_id, wanted.seq - 1)

        return wanted in (await self._connections.perform(self._namespace, look))[:1]

    async def _end(self) -> None:
        self._broken = "it has ended; use it inside `async with store.transaction(...)`"
        await self._stop()
        connection, self._connection = self._connection, None
        transaction, self._transaction = self._transaction, None
        if connection is None:
            return
        try:
            if transaction is not None and not connection.is_closed():
                await transaction.rollback()
        except Exception:  # noqa: BLE001 - without its connection it is rolled back too
            connection.terminate()
        finally:
            await self._connections.give_back(connection)

    async def _stop(self) -> None:
        """Cancel what is under way for a caller who has left, unless it is the commit, and wait until it has ended."""
        task = self._under_way
        if task is not None and not task.done():
            if not self._is_committing:
                task.cancel()
            await asyncio.wait([task])
