"""A connection, the leases that are known to be in force, and the statements that it runs later.

A lease has to be checked before anything is written under it. The check need not be repeated as long as no other connection has
written to the file, which `PRAGMA data_version` shows. Rows that nothing else in the transaction reads are deferred and written
together: starting a statement costs Python more than running it costs SQLite.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.session import Result
from perdure.model.records import Pulse

# How Python's sqlite3 begins to say that a TEXT value is not UTF-8. SQLite itself does not check it.
_NOT_TEXT: Final = "Could not decode to UTF-8"


def _text_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _is_damaged_text(error: BaseException, sql: str) -> bool:
    """Whether a statement that only reads failed because a TEXT value is not UTF-8."""
    return isinstance(error, sqlite3.OperationalError) and _NOT_TEXT in str(error) and sql.lstrip().startswith(("SELECT", "WITH"))


class Fence(msgspec.Struct, frozen=True, gc=False):
    """A lease in force: of which run and epoch (tables, namespace, run, epoch), its holder's pulse, and the run's parent."""

    of: tuple[str, str, str, int]
    pulse: Pulse
    parent_id: str | None = None
    parent_key: str | None = None


class WriterConnection:
    """A connection of the writer, a transaction or the reader; only a writing one has fences and deferred statements.

    `fences` are the leases known to be in force, by token. While it `defers`, statements may run later than they are given. A
    deferred failure cannot be attributed to one call, so the batch must be re-runnable without deferral.
    """

    __slots__ = ("_deferred", "_version", "connection", "defers", "fences")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.fences: dict[str, Fence] = {}
        self.defers = False
        self._version = 0
        self._deferred: dict[str, list[tuple[Any, ...]]] = {}

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        """Run these statements at once: a `Channel` for the verbs of the SQL core that never suspends (see `session`)."""
        results: list[Result] = []
        for sql, values in statements:
            cursor = None
            try:
                cursor = self.execute(sql, values)
                # All rows are fetched, so that no unfinished statement holds a commit open.
                results.append(Result(cursor.fetchall(), cursor.rowcount))
            except BaseException as error:
                if cursor is not None:
                    cursor.close()  # the traceback keeps the cursor, and with it the statement and its view of the database
                if not _is_damaged_text(error, sql):
                    raise
                results.append(self._fetch_damaged(sql, values))
        return results

    def _fetch_damaged(self, sql: str, values: tuple[Any, ...]) -> Result:
        """The rows of a statement that reads, where text that is none is bytes: the rows beside a damaged one can be read."""
        self.connection.text_factory = _text_or_bytes
        try:
            return Result(self.connection.execute(sql, values).fetchall(), 0)
        finally:
            self.connection.text_factory = str

    def begin(self, *, defers: bool = False) -> None:
        """Begin to write, and forget the fences if another connection has written since."""
        self.connection.execute("BEGIN IMMEDIATE")
        self.defers = defers
        version = self.data_version()
        if version != self._version:
            self._version = version
            self.fences.clear()

    def commit(self) -> None:
        """Commit the transaction."""
        self.connection.execute("COMMIT")

    def close(self) -> None:
        """Close the connection, and roll back what is open.

        Not left to SQLite: while a cursor is alive somewhere, `sqlite3_close_v2` only marks the connection, and its write lock
        stays.
        """
        try:
            self.roll_back()
        finally:
            self.connection.close()

    def roll_back(self) -> None:
        """Undo what is open, and forget what was deferred and which leases are in force."""
        self._deferred.clear()
        self.fences.clear()
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def execute(self, sql: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        """Run the statement now, after the deferred ones."""
        if self._deferred:
            self.run_deferred()
        return self.connection.execute(sql, values)

    def execute_later(self, sql: str, values: tuple[Any, ...]) -> None:
        """Run a statement whose result is not used: now, or with others like it before the next one that runs at once."""
        if not self.defers:
            self.execute(sql, values)
        elif (rows := self._deferred.get(sql)) is not None:
            rows.append(values)
        else:
            self._deferred[sql] = [values]

    def run_deferred(self) -> None:
        """Run the deferred statements: at the end of the transaction, and before a statement that must come after them."""
        deferred, self._deferred = self._deferred, {}
        for sql, rows in deferred.items():
            self.connection.executemany(sql, rows)

    def data_version(self) -> int:
        """A number that changes whenever another connection has written."""
        version: int = self.connection.execute("PRAGMA data_version").fetchall()[0][0]
        return version
