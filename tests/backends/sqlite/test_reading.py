"""What a read sees is one moment, however many statements it takes and whatever others commit meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.backends.base.new_runs import new_row
from perdure.backends.base.process_owner import Owners
from perdure.backends.sqlite import reading, runs
from perdure.backends.sqlite.link import Link
from perdure.backends.sqlite.schema import Session, Tables, set_up
from perdure.model.records import NewRun

NOW = 2_000_000_000_000_000
TABLES = Tables("perdure")


class Interrupted(Session):
    """A session that somebody else gets in after a certain statement."""

    __slots__ = ("after", "interrupt")

    def __init__(self, connection: sqlite3.Connection, after: int, interrupt: Callable[[], object]) -> None:
        super().__init__(Link(connection), TABLES, "")
        self.after = after
        self.interrupt = interrupt

    def _execute(self, template: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        cursor = super()._execute(template, values)
        self.after -= 1
        if self.after == 0:
            self.interrupt()
        return cursor


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


READS: dict[str, Callable[[Session], Any]] = {
    "list": lambda db: [line.id for line in reading.at_one_moment(db, reading.list_runs, "", None, None, None, 100)],
    "count": lambda db: reading.at_one_moment(db, reading.count, "", None, None),
    "due": lambda db: reading.at_one_moment(db, reading.due, 10, Owners(), NOW),
}
SEEN = {"list": ["run"], "count": 1, "due": ["run"]}


@pytest.mark.parametrize("statement", range(1, 10))
@pytest.mark.parametrize("read", READS)
def test_a_run_that_changes_while_it_is_read_is_there_once(
    connect: Callable[[], sqlite3.Connection], read: str, statement: int
) -> None:
    other = connect()
    set_up(Link(other), TABLES, "", allowed=True)
    new = NewRun(id="run", workflow="flow", input=b"", input_hash=b"h", seed=b"")
    runs.insert(Session(Link(other), TABLES, ""), new_row(new, NOW), None)
    assert READS[read](Interrupted(connect(), statement, lambda: _changed(other, "cancelled", "a/-/c/1/1"))) == SEEN[read]
