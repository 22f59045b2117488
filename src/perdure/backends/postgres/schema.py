"""The tables: their names, their set-up, and the one place where a name becomes part of SQL.

SQL in this package is written as constant templates in which `$runs` stands for the quoted name of a table. Everything else is
a bound value, `$1` the first of them and so on, and `$1` is the namespace in every template.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from importlib import resources
from typing import Any, Final, Protocol

from perdure.errors import PersistenceError

VERSION: Final = 1
TABLES: Final = ("runs", "steps", "signals", "queues", "schedules", "items", "meta")
_INDEXES: Final = (
    "runs_wake",
    "runs_due",
    "runs_leased",
    "runs_changed",
    "runs_of_workflow",
    "signals_identity",
    "signals_waiting",
)
_NAME: Final = re.compile(r"\$([a-z_]+)")
# PostgreSQL cuts identifiers at 63 bytes, and the longest part is added to the stem.
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,44}")

# The server's clock. clock_timestamp() goes on within a transaction; now() would stand still while a statement waits for a lock.
# As a subquery it is asked once for a statement, and can be compared with an index.
CLOCK: Final = "(SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"

# Not to_regclass(): inside a transaction that remembers what it did not find before it waited for the lock.
_LOOK: Final = """
    SELECT EXISTS (SELECT FROM pg_class WHERE relname = $1 AND pg_table_is_visible(oid)), current_setting('server_encoding')
"""
_READ_VERSION: Final = "SELECT value FROM $meta WHERE name = 'schema_version'"
_WRITE_VERSION: Final = "INSERT INTO $meta (name, value) VALUES ('schema_version', $1)"
_LOCK: Final = "SELECT pg_advisory_xact_lock($1)"


class Connection(Protocol):
    """What is used of an asyncpg connection."""

    def fetch(self, query: str, *args: Any) -> Awaitable[list[Any]]: ...
    def fetchmany(self, query: str, args: Sequence[Sequence[Any]]) -> Awaitable[list[Any]]: ...
    async def execute(self, query: str, *args: Any) -> str: ...
    def transaction(self, *, isolation: str | None = None) -> Any: ...


class Tables:
    """The tables under one stem. `statement` fills a template, once."""

    def __init__(self, stem: str) -> None:
        if not isinstance(stem, str) or not _IDENTIFIER.fullmatch(stem):
            raise ValueError(f"table {stem!r} must be letters, digits and '_', at most 45, and not begin with a digit")
        self.stem = stem
        self._names = {part: f'"{stem}_{part}"' for part in (*TABLES, *_INDEXES)}
        self._filled: dict[str, str] = {}

    @property
    def channel(self) -> str:
        """On which it is told that something may be due."""
        return f"{self.stem}_due"

    def statement(self, template: str) -> str:
        """The statement for this stem."""
        filled = self._filled.get(template)
        if filled is None:
            filled = self._filled[template] = _NAME.sub(lambda found: self._names[found[1]], template)
        return filled


class Session:
    """A connection as one store sees it, for the length of one verb. `$1` in every template is the namespace."""

    __slots__ = ("connection", "in_transaction", "jit_is_off", "namespace", "tables")

    def __init__(
        self, connection: Connection, tables: Tables, namespace: str, *, in_transaction: bool = False, jit_is_off: bool = False
    ) -> None:
        self.connection = connection
        self.tables = tables
        self.namespace = namespace
        self.in_transaction = in_transaction
        self.jit_is_off = jit_is_off

    def all(self, template: str, *values: Any) -> Awaitable[Sequence[Any]]:
        """All rows."""
        return self.connection.fetch(self.tables.statement(template), self.namespace, *values)

    def each(self, template: str, given: Sequence[Sequence[Any]]) -> Awaitable[Sequence[Any]]:
        """All rows of the statement, executed with one of these after the other, in one round trip and one transaction."""
        if len(given) == 1:
            return self.all(template, *given[0])
        namespace = self.namespace
        return self.connection.fetchmany(self.tables.statement(template), [(namespace, *values) for values in given])

    async def one(self, template: str, *values: Any) -> Any | None:
        """The first row, or None."""
        rows = await self.all(template, *values)
        return rows[0] if rows else None

    def transaction(self) -> Any:
        """A transaction in which each statement sees what was committed before it; the one under way, if there is one."""
        if self.in_transaction:
            return contextlib.nullcontext()
        return self.connection.transaction(isolation="read_committed")

    @contextlib.asynccontextmanager
    async def without_jit(self) -> AsyncIterator[None]:
        """For statements that PostgreSQL takes for long and would compile first, which takes a hundred times as long."""
        if self.jit_is_off:
            yield
            return
        async with self.transaction():
            await self.connection.execute("SET LOCAL jit = off")
            yield


async def set_up(connection: Connection, tables: Tables, label: str, *, allowed: bool) -> None:
    """Leave the schema there and current. Many processes may do this at once; a killed one leaves nothing half done."""
    async with connection.transaction(isolation="read_committed"):
        if await _version(connection, tables, label) is not None:
            return
        if not allowed:
            raise PersistenceError(
                label,
                f"there are no {tables.stem!r} tables and auto_migrate is off; run `await store.setup()` once, or leave it on",
            )
        await connection.fetch(_LOCK, _lock_key(tables))  # let go of when the transaction ends
        if await _version(connection, tables, label) is None:
            await connection.execute(tables.statement(await asyncio.to_thread(_script)))
            await connection.fetch(tables.statement(_WRITE_VERSION), VERSION)


def _script() -> str:
    return resources.files(__package__).joinpath("schema.sql").read_text("utf-8")


def _lock_key(tables: Tables) -> int:
    digest = hashlib.sha256(f"perdure {tables.stem}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


async def _version(connection: Connection, tables: Tables, label: str) -> int | None:
    has_meta, encoding = (await connection.fetch(_LOOK, f"{tables.stem}_meta"))[0]
    if encoding != "UTF8":
        raise PersistenceError(label, f"the database's encoding is {encoding}, which cannot hold every id; use a UTF8 one")
    if not has_meta:
        return None
    rows = await connection.fetch(tables.statement(_READ_VERSION))
    version = int(rows[0][0]) if rows else 0
    if version != VERSION:
        what = "a newer perdure; upgrade this one" if version > VERSION else "something else; choose another table="
        raise PersistenceError(
            label,
            f"the {tables.stem!r} tables have schema version {version} and this perdure knows {VERSION}: they belong to {what}",
        )
    return version
