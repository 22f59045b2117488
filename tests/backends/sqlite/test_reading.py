"""What a read sees is one moment, however many statements it takes and whatever others commit meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure.backends.sql import listing
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.session import Result
from perdure.backends.sqlite import creating, process_leases
from perdure.backends.sqlite.session import SqliteSession, SqliteTables, run_at_one_moment, set_up_tables
from perdure.backends.sqlite.writer_connection import WriterConnection
from perdure.model.process_owner import Owners
from perdure.model.records import NewRun
from perdure.model.run_filter import EVERY_RUN, RunFilter

NOW = 2_000_000_000_000_000
TABLES = SqliteTables("perdure")


class Interrupted(WriterConnection):
    """A connection that somebody else gets in after a certain statement."""

    __slots__ = ("after", "interrupt")

    def __init__(self, connection: sqlite3.Connection, after: int, interrupt: Callable[[], object]) -> None:
        super().__init__(connection)
        self.after = after
        self.interrupt = interrupt

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        results = await super().send(statements)
        self.after -= 1
        if self.after == 0:
            self.interrupt()
        return results


@pytest.fixture
def connect(path: Path) -> Iterator[Callable[[], sqlite3.Connection]]:
    made: list[sqlite3.Connection] = []

    def connect() -> sqlite3.Connection:
        made.append(sqlite3.connect(path, isolation_level=None))
        made[-1].execute("PRAGMA journal_mode = WAL")
        return made[-1]

    yield connect
    for connection in made:
        connection.close()


def _changed(connection: sqlite3.Connection, status: str, owner: str | None = None) -> None:
    connection.execute("UPDATE perdure_runs SET status = ?, lease_owner = ?, wake_at = ?", (status, owner, NOW + 1))


async def _listed(db: SqliteSession) -> list[str]:
    return [line.id for line in await listing.list_runs(db, EVERY_RUN, None, 100)]


READS: dict[str, Callable[[SqliteSession], Any]] = {
    "list": _listed,
    "count": lambda db: listing.count(db, EVERY_RUN),
    "count by status": lambda db: listing.count(db, RunFilter(status=("pending",))),
    "due": lambda db: process_leases.due(db, 10, Owners(), NOW),
}
SEEN = {"list": ["run"], "count": 1, "count by status": 1, "due": ["run"]}


@pytest.mark.parametrize("statement", range(1, 6))
@pytest.mark.parametrize("read", READS)
def test_a_run_that_changes_while_it_is_read_is_there_once(
    connect: Callable[[], sqlite3.Connection], read: str, statement: int
) -> None:
    other = connect()
    set_up_tables(WriterConnection(other), TABLES, "", allowed=True)
    new = NewRun(id="run", workflow="flow", input=b"", input_hash=b"h", seed=b"")
    creating.create(SqliteSession(WriterConnection(other), TABLES, ""), new, None, Owners(), NOW)
    interrupted = Interrupted(connect(), statement, lambda: _changed(other, "cancelled", "a/-/c/1/1"))
    assert run_at_one_moment(SqliteSession(interrupted, TABLES, ""), READS[read]) == SEEN[read]
