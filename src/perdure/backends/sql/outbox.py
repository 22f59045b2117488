"""Runs and signals inside a transaction of the caller's own: they exist if and when the caller commits.

The verbs are those of every SQL store, over a session on the caller's connection. They run on the caller's event loop, or, with
a synchronous driver, in its thread. Nothing is committed or rolled back here, and errors of the database are raised as they are:
the transaction is the caller's. There is no lease, because a worker could not see the run before the commit.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from perdure.backends.base.new_runs import check_start, row_after_create
from perdure.backends.sql import inbox, runs
from perdure.backends.sql.rows import identity
from perdure.backends.sql.session import CallersConnection, Session
from perdure.model.records import Created, NewRun


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
