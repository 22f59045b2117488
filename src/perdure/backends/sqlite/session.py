"""The verbs of the SQL core, run at once in a thread that owns a connection.

The core's verbs are coroutines over "send these statements". Here they send through a `WriterConnection`, whose `send` executes
the statements at once and never suspends. So a verb is run by stepping its coroutine once: that step raises StopIteration, which
carries the result.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from perdure.backends.sql.dialect import SQLITE_FILE, Statement, Tables
from perdure.backends.sql.rows import EXACT
from perdure.backends.sql.schema import creation_statements, is_current, set_up
from perdure.backends.sql.session import Session
from perdure.backends.sqlite.writer_connection import WriterConnection

T = TypeVar("T")


class SqliteTables(Tables):
    """The tables of a store. `filled` has templates as SQL; the values of these must be in the order of the placeholders."""

    def __init__(self, stem: str) -> None:
        super().__init__(stem, SQLITE_FILE, EXACT)
        self.filled = _FilledTemplates(self)


class _FilledTemplates(dict[str, str]):
    """SQL by template, each filled with the names of the tables when it is first used."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self._tables = tables

    def __missing__(self, template: str) -> str:
        sql = self[template] = self._tables.sql(template)
        return sql


class SqliteSession(Session):
    """A connection as one store sees it, for the length of one verb."""

    __slots__ = ()
    channel: WriterConnection
    tables: SqliteTables

    def fetch(self, template: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows of a statement that takes the namespace and then these values, in the order of its placeholders."""
        return self.channel.execute(self.tables.filled[template], (self.namespace, *values)).fetchall()


def run_verb(verb: Coroutine[Any, Any, T]) -> T:
    """The result of a verb of the SQL core that sends through a `WriterConnection`."""
    try:
        verb.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    verb.close()
    raise RuntimeError("a verb waited for something else than its statements")


def run_at_one_moment(db: SqliteSession, verb: Callable[[SqliteSession], Coroutine[Any, Any, T]]) -> T:
    """The result of a verb that reads with several statements; no commit of another connection comes between them."""
    connection = db.channel.connection
    connection.execute("BEGIN")
    try:
        return run_verb(verb(db))
    finally:
        if connection.in_transaction:  # SQLite ends it by itself after some errors
            connection.execute("ROLLBACK")


def set_up_tables(connection: WriterConnection, tables: Tables, label: str, *, allowed: bool) -> None:
    """Create the tables unless they exist, and check their version. Takes the write lock only if there are none yet."""
    if run_verb(is_current(connection, tables, label)):
        return
    connection.begin()
    try:
        run_verb(set_up(connection, tables, label, allowed=allowed, load=_load_creation))
        connection.commit()
    except BaseException:
        if connection.connection.in_transaction:
            connection.connection.execute("ROLLBACK")
        raise


async def _load_creation(tables: Tables) -> list[Statement]:
    return creation_statements(tables)
