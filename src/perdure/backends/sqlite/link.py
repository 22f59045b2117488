"""A connection, and what is known through it.

Before anything is written under a lease somebody has to see that it is in force. That need not be read again as long as no other
connection has written to the file, which `PRAGMA data_version` tells. Rows that nothing else in the transaction reads are kept
back and written together: to start a statement costs Python more than SQLite takes to run it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

import msgspec

from perdure.model.records import Pulse


class Fence(msgspec.Struct, frozen=True, gc=False):
    """A lease in force: what it is for (tables, namespace, run, epoch), what its holder is told, and who waits for the run."""

    of: tuple[str, str, str, int]
    pulse: Pulse
    parent_id: str | None = None
    parent_key: str | None = None


class Link:
    """A connection. `fences` are the leases that are known to be in force, by their tokens.

    Where it `defers`, statements may be kept back. Nobody knows then whose an error is that comes in the end: whoever begins so
    must be able to begin again without.
    """

    __slots__ = ("_kept_back", "_version", "connection", "defers", "fences")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.fences: dict[str, Fence] = {}
        self.defers = False
        self._version = 0
        self._kept_back: dict[str, list[tuple[Any, ...]]] = {}

    def begin(self, *, defers: bool = False) -> None:
        """Begin to write, and forget what others may have changed meanwhile."""
        self.connection.execute("BEGIN IMMEDIATE")
        self.defers = defers
        version = self.data_version()
        if version != self._version:
            self._version = version
            self.fences.clear()

    def commit(self) -> None:
        """Make it last."""
        self.connection.execute("COMMIT")

    def execute(self, sql: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        """Run the statement, after those before it."""
        if self._kept_back:
            self.write_kept_back()
        return self.connection.execute(sql, values)

    def execute_each(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run the statement for each row, after those before it."""
        if self._kept_back:
            self.write_kept_back()
        self.connection.executemany(sql, rows)

    def execute_later(self, sql: str, values: tuple[Any, ...]) -> None:
        """Run the statement, whose outcome nobody asks for: now, or with others of its kind, before any that is run at once."""
        if not self.defers:
            self.execute(sql, values)
        elif (rows := self._kept_back.get(sql)) is not None:
            rows.append(values)
        else:
            self._kept_back[sql] = [values]

    def write_kept_back(self) -> None:
        """Run what was kept back: at the end of the transaction, and before a statement that must come after it."""
        kept_back, self._kept_back = self._kept_back, {}
        for sql, rows in kept_back.items():
            self.connection.executemany(sql, rows)

    def data_version(self) -> int:
        """A number that changes whenever another connection has written."""
        version: int = self.connection.execute("PRAGMA data_version").fetchall()[0][0]
        return version
