"""The tables: their names, their set-up, and the one place where a name becomes part of SQL.

SQL in this package is written as constant templates in which `$runs` stands for the quoted name of a table. Everything
else is a bound value, `?1` the first of them and so on, and `?1` is the namespace in every template. SQLite is given plain
question marks: early Pythons 3.12 take a numbered one for a name and warn.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from operator import itemgetter
from string import Template
from typing import Any, Final, NamedTuple

from perdure.backends.sqlite.link import Link
from perdure.errors import PersistenceError

VERSION: Final = 1
TABLES: Final = ("runs", "steps", "signals", "queues", "schedules", "items", "meta")
_INDEXES: Final = ("runs_wake", "runs_leased", "runs_changed", "signals_waiting", "signals_dedupe")
_NUMBERED: Final = re.compile(r"\?(\d+)")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")

_HAS_META: Final = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ? COLLATE NOCASE"
_READ_VERSION: Final = "SELECT value FROM $meta WHERE name = 'schema_version'"
_WRITE_VERSION: Final = "INSERT INTO $meta (name, value) VALUES ('schema_version', ?)"


def quoted(name: str) -> str:
    """`name` as an SQL identifier. Raises `ValueError` for everything but a plain word of at most 63 characters."""
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or name.lower().startswith("sqlite_"):
        raise ValueError(f"table {name!r} must be letters, digits and '_', at most 63, not begin with a digit or 'sqlite_'")
    return f'"{name}"'


class Statement(NamedTuple):
    """A template filled in. `arrange` puts the values into the order of its question marks; None: they are in it."""

    sql: str
    arrange: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None


class Statements(dict[str, Statement]):
    """Statements by their templates, each filled with the names of the tables when it is first asked for."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def __missing__(self, template: str) -> Statement:
        sql = Template(template).substitute(self._names)
        order = [int(number) - 1 for number in _NUMBERED.findall(sql)]
        in_order = order == list(range(len(order)))
        filled = self[template] = Statement(_NUMBERED.sub("?", sql), None if in_order else itemgetter(*order))
        return filled


class Tables:
    """The tables under one stem, and the statements on them."""

    def __init__(self, stem: str) -> None:
        quoted(stem)  # the stem itself is held to the rule, not only the names made of it
        self.stem = stem
        self.statements = Statements({part: f'"{stem}_{part}"' for part in (*TABLES, *_INDEXES)})


class Session:
    """A connection as one store sees it, for the length of one verb. `?1` in every template is the namespace."""

    __slots__ = ("link", "namespace", "tables")

    def __init__(self, link: Link, tables: Tables, namespace: str) -> None:
        self.link = link
        self.tables = tables
        self.namespace = namespace

    def run(self, template: str, *values: Any) -> int:
        """Run one statement and give how many rows it changed."""
        return self._execute(template, values).rowcount

    def run_with(self, template: str, row: tuple[Any, ...]) -> None:
        """Run one statement, without numbered values, for this row."""
        self.link.execute(self.tables.statements[template].sql, row)

    def run_each(self, template: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Run one statement, without numbered values, for each row."""
        self.link.execute_each(self.tables.statements[template].sql, rows)

    def run_later(self, template: str, *values: Any) -> None:
        """Run one statement, whose outcome nobody asks for, now or together with others like it."""
        sql, arrange = self.tables.statements[template]
        values = (self.namespace, *values)
        self.link.execute_later(sql, values if arrange is None else arrange(values))

    def run_later_with(self, template: str, row: tuple[Any, ...]) -> None:
        """As `run_later`, without numbered values."""
        self.link.execute_later(self.tables.statements[template].sql, row)

    def all(self, template: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows; the statement is finished when this returns, so a commit cannot be held open by it."""
        return self._execute(template, values).fetchall()

    def one(self, template: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row, or None."""
        rows = self._execute(template, values).fetchall()
        return rows[0] if rows else None

    def each(self, template: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Rows as they are asked for. Nothing may be written before the caller has let go of it."""
        return iter(self._execute(template, values))

    def _execute(self, template: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        sql, arrange = self.tables.statements[template]
        values = (self.namespace, *values)
        return self.link.execute(sql, values if arrange is None else arrange(values))


def set_up(link: Link, tables: Tables, path: str, *, allowed: bool) -> None:
    """Leave the schema there and current. Many processes may do this at once; a killed one leaves nothing half done."""
    connection = link.connection
    if _version(connection, tables, path) is not None:
        return
    if not allowed:
        raise missing(tables, path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _version(connection, tables, path) is None:
            _create(connection, tables)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def missing(tables: Tables, path: str) -> PersistenceError:
    """What a store that must not create anything says when there is nothing."""
    return PersistenceError(
        f"SQLite store {path!r}",
        f"there are no {tables.stem!r} tables and auto_migrate is off; run `await store.setup()` once, or leave auto_migrate on",
    )


def _version(connection: sqlite3.Connection, tables: Tables, path: str) -> int | None:
    (has_meta,) = connection.execute(_HAS_META, (f"{tables.stem}_meta",)).fetchall()[0]
    if not has_meta:
        return None
    rows = connection.execute(tables.statements[_READ_VERSION].sql).fetchall()
    version = int(rows[0][0]) if rows else 0
    if version != VERSION:
        what = "a newer perdure; upgrade this one" if version > VERSION else "something else; choose another table="
        raise PersistenceError(
            f"SQLite store {path!r}",
            f"the {tables.stem!r} tables have schema version {version} and this perdure knows {VERSION}: they belong to {what}",
        )
    return version


def _create(connection: sqlite3.Connection, tables: Tables) -> None:
    script = resources.files(__package__).joinpath("schema.sql").read_text("utf-8")
    for statement in script.split(";\n"):
        if statement.strip():
            connection.execute(tables.statements[statement].sql)
    connection.execute(tables.statements[_WRITE_VERSION].sql, (VERSION,))
