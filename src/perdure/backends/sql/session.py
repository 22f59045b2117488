"""A transaction as the verbs see it (statements in, rows and numbers of rows out), and the connections that open it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.retries import WriteFailure
from perdure.backends.sql.dialect import Statement, Tables
from perdure.backends.sql.rows import Row
from perdure.errors import StoreCapabilityError
from perdure.store import MISSING_PART

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of a statement, and how many rows it changed (matched, also where nothing was different)."""

    rows: Sequence[Row]
    count: int


class Channel(Protocol):
    """What statements are sent through: an open transaction, or a connection for a single statement."""

    async def send(self, statements: Sequence[Statement]) -> Sequence[Result]:
        """Run these statements, one after the other, and return the result of each. None depends on the results of the others."""
        ...


class CallersConnection(NamedTuple):
    """The driver's own connection. `is_managed` if SQLAlchemy begins its transactions, which it may not have done yet."""

    driver_connection: Any
    is_managed: bool


class Parameters:
    """The bound values of a statement that is being composed; each method gives placeholders. `?1` is the namespace."""

    def __init__(self, *, takes_lists: bool = False) -> None:
        self._takes_lists = takes_lists
        self.values: list[Any] = []

    def one(self, value: Any, kind: str = "") -> str:
        """The placeholder of this value; `kind` is `int`, `text` or `texts` where PostgreSQL could not infer it."""
        self.values.append(value)
        return f"?{len(self.values) + 1}{kind and ':' + kind}"

    def many(self, values: Iterable[Any]) -> str:
        """The placeholders of these values, separated by commas."""
        return ", ".join(self.one(value) for value in values)

    def among(self, column: str, values: Iterable[Any]) -> str:
        """The condition that the column has one of these values.

        Where the database takes a list as one value the SQL is the same for any number of them, so it is prepared once.
        """
        if self._takes_lists:
            return f"{column} = ANY ({self.one(list(values))})"
        return f"{column} IN ({self.many(values)})"

    def by_id(self, column: str, payloads: Mapping[str, bytes | None]) -> str:
        """The payload for the id of the row, as the new value of this column; NULL for the others."""
        given = [(run_id, payload) for run_id, payload in payloads.items() if payload is not None]
        if not given:
            return "NULL"
        if self._takes_lists:
            ids, values = self.one([run_id for run_id, _ in given], "texts"), self.one([payload for _, payload in given])
            return f"(CAST({values} AS $payload[]))[array_position({ids}, id)]"
        # The first branch is never taken. It gives the expression the type of the column, which PostgreSQL could not infer.
        branches = " ".join(f"WHEN id = {self.one(run_id)} THEN {self.one(payload)}" for run_id, payload in given)
        return f"CASE WHEN id IS NULL THEN {column} {branches} END"

    def table(self) -> str:
        """A query of the values so far, which are text, as rows with a column `column1`."""
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

    def parameters(self) -> Parameters:
        """Empty parameters, for a statement that is composed for this database."""
        return Parameters(takes_lists=self.tables.dialect.takes_lists)

    def statement(self, template: str, *values: Any) -> Statement:
        """The template with these values."""
        return self.tables.statement(template, self.namespace, *values)

    async def send(self, statements: Sequence[Statement]) -> Sequence[Result]:
        """The result of each of these statements; none depends on the results of the others."""
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


class SqlConnections(ServerConnections):
    """The connections of one store. `open` has to call `schema.set_up` in a transaction of its own."""

    def __init__(self, label: str, tables: Tables, *, is_borrowed: bool, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(label, is_borrowed=is_borrowed, loop=loop)
        self.tables = tables

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Channel]:
        """A transaction in which each statement sees what was committed before it: commits on exit, rolls back on an exception.

        On SQLite it is the only one that writes from its beginning on.
        """

    def reading(self) -> AbstractAsyncContextManager[Channel]:
        """For single statements that only read."""
        return self.transaction()

    def notifying_transaction(self) -> AbstractAsyncContextManager[Channel]:
        """As `transaction`, for what may make a run due or end it. A database that can notify other processes does it here."""
        return self.transaction()

    def callers_transaction(self) -> AbstractAsyncContextManager[Channel]:
        """As `transaction`, for one that a caller keeps open and sends statements of its own in."""
        return self.transaction()

    # Whether `copy_for_loop` gives connections of another loop. Otherwise a caller on any loop works through these.
    has_loop_copies: ClassVar[bool] = False

    async def copy_for_loop(self) -> Self:
        """Connections to the same database on the loop that runs now, for transactions of the code that runs there."""
        raise NotImplementedError

    def driver_connection(self, channel: Channel) -> Any:
        """The driver's own connection behind a channel. Raises `StoreCapabilityError` if there is none."""
        del channel
        raise StoreCapabilityError(self.tables.dialect.label, "connections of a driver: use `await transaction.execute(...)`")

    async def callers_channel(self, caller: CallersConnection) -> Channel:
        """The channel on a connection of a caller to the same database, on which a transaction is open.

        Raises `TypeError` and `ValueError`; `StoreCapabilityError` if the store has no such connections.
        """
        del caller
        raise StoreCapabilityError(self.tables.dialect.label, MISSING_PART["outbox"])

    def is_duplicate(self, error: BaseException) -> bool:
        """Whether a statement met a row with the same key. In a verb that is transient, in a caller's own statement it is not."""
        del error
        return False

    def is_conflict(self, error: BaseException) -> bool:
        """Whether the database undid a transaction for the sake of another one, or for now."""
        return self.classify_failure(error) is WriteFailure.RETRY and not self.is_duplicate(error)

    def is_lost(self, channel: Channel) -> bool:
        """Whether the connection of this channel is known to be closed."""
        del channel
        return False

    def is_in_transaction(self, channel: Channel) -> bool:
        """Whether the transaction that was begun on this channel is open, as far as that can be told."""
        del channel
        return True

    async def perform(self, namespace: str, work: Callable[[Session, bool], Awaitable[T]], *, notify: bool = False) -> T:
        """The result of the work in one transaction, retried after transient errors.

        The second argument of `work` says whether an earlier attempt may have been committed. With `notify` the work may make a
        run due or end it.
        """
        transaction = self.notifying_transaction if notify else self.transaction

        async def attempt(is_repeated: bool) -> T:  # noqa: FBT001 - as `retry_transient` calls it
            async with transaction() as channel:
                return await work(Session(channel, self.tables, namespace), is_repeated)

        return await self.retry_transient(attempt)

    async def read(self, namespace: str, work: Callable[[Session], Awaitable[T]]) -> T:
        """The result of the work, which only reads, retried after transient errors."""

        async def attempt(_: bool) -> T:  # noqa: FBT001 - as above
            async with self.reading() as channel:
                return await work(Session(channel, self.tables, namespace))

        return await self.retry_transient(attempt)
