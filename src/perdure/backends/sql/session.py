"""A transaction as the verbs see it: statements in, rows and numbers of rows out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from perdure.backends.sql.tables import Statement, Tables

__all__ = ["Channel", "Given", "Result", "Row", "Session", "Statement"]

Row: TypeAlias = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement gave: its rows, and how many rows it changed (matched, also where nothing was different)."""

    rows: Sequence[Row]
    count: int


class Channel(Protocol):
    """What statements are sent through: an open transaction, or a connection for a single statement."""

    async def send(self, statements: Sequence[Statement]) -> Sequence[Result]:
        """Run these statements, one after the other, and give what each gave. They do not depend on each other's answers."""
        ...


class Given:
    """The values of a statement that is being put together; each gives the place it has there. `?1` is the namespace."""

    def __init__(self, *, takes_lists: bool = False) -> None:
        self._takes_lists = takes_lists
        self.values: list[Any] = []

    def one(self, value: Any, kind: str = "") -> str:
        """The place of this value; `kind` is `int` or `text` where PostgreSQL could not know."""
        self.values.append(value)
        return f"?{len(self.values) + 1}{kind and ':' + kind}"

    def many(self, values: Iterable[Any]) -> str:
        """The places of these values, separated by commas."""
        return ", ".join(self.one(value) for value in values)

    def among(self, column: str, values: Iterable[Any]) -> str:
        """The condition that the column has one of these values.

        Where the database takes a list as one value the SQL is the same for any number of them, so it is prepared once.
        """
        if self._takes_lists:
            return f"{column} = ANY ({self.one(list(values))})"
        return f"{column} IN ({self.many(values)})"

    def table(self) -> str:
        """What was given so far, which is text, as rows with a column `column1`."""
        if self._takes_lists:
            return "SELECT unnest(?2:texts) AS column1"
        return "VALUES " + ", ".join(f"(?{place}:text)" for place in range(2, len(self.values) + 2))


class Session:
    """A channel as one store sees it, for the length of one verb. `?1` in every template is the namespace."""

    __slots__ = ("channel", "namespace", "tables")

    def __init__(self, channel: Channel, tables: Tables, namespace: str) -> None:
        self.channel = channel
        self.tables = tables
        self.namespace = namespace

    def given(self) -> Given:
        """For the values of a statement that is put together for this database."""
        return Given(takes_lists=self.tables.dialect.takes_lists)

    def statement(self, template: str, *values: Any) -> Statement:
        """The template with these values."""
        return self.tables.statement(template, self.namespace, *values)

    async def send(self, statements: Sequence[Statement]) -> Sequence[Result]:
        """What each of these statements gave; they do not depend on each other's answers."""
        return await self.channel.send(statements) if statements else ()

    async def all(self, template: str, *values: Any) -> Sequence[Row]:
        """All rows."""
        (result,) = await self.channel.send([self.statement(template, *values)])
        return result.rows

    async def one(self, template: str, *values: Any) -> Row | None:
        """The first row, or None."""
        rows = await self.all(template, *values)
        return rows[0] if rows else None

    async def run(self, template: str, *values: Any) -> int:
        """How many rows the statement changed."""
        (result,) = await self.channel.send([self.statement(template, *values)])
        return result.count
