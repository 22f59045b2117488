"""Text by key in a table of a PostgreSQL database, for any number of processes and machines.

Every method is one statement and one round trip, by the server's clock; a `set` that sees expired rows removes some of them with
a second one. Keys sort and compare by their bytes (COLLATE "C"); texts are bytea, because PostgreSQL's text cannot hold NUL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from string import Template
from typing import Any, Final

from perdure.backends.postgres.address import FORM, PostgresAddress, parse_address
from perdure.backends.postgres.channel import Connection, PostgresChannel
from perdure.backends.postgres.connections import PostgresConnections
from perdure.backends.postgres.errors import driver
from perdure.kv.limits import check_namespace
from perdure.kv.patterns import key_range
from perdure.kv.server_store import ServerKeyValueStore

# How many expired rows a write removes: more than it adds, so that they become fewer.
SWEPT_PER_WRITE: Final = 100

_LOOK: Final = "SELECT FROM pg_class WHERE relname = $$1 AND pg_table_is_visible(oid)"
_LOCK: Final = "SELECT pg_advisory_xact_lock($$1)"  # released when the transaction ends
_CREATE: Final = """
    CREATE TABLE IF NOT EXISTS $table (
        namespace  text COLLATE "C" NOT NULL,
        key        text COLLATE "C" NOT NULL,
        value      bytea NOT NULL,
        expires_at bigint,
        PRIMARY KEY (namespace, key)
    );
    CREATE INDEX IF NOT EXISTS $index ON $table (expires_at) WHERE expires_at IS NOT NULL;
"""
_GET: Final = "SELECT value FROM $table WHERE namespace = $$1 AND key = $$2 AND $is_live"
_EXISTS: Final = "SELECT FROM $table WHERE namespace = $$1 AND key = $$2 AND $is_live"
_KEYS: Final = "SELECT key FROM $table WHERE namespace = $$1 AND key >= $$2 AND ($$3::text IS NULL OR key < $$3) AND $is_live"
_DELETE: Final = "DELETE FROM $table WHERE namespace = $$1 AND key = $$2 RETURNING $is_live"
_SET: Final = """
    INSERT INTO $table (namespace, key, value, expires_at) VALUES ($$1, $$2, $$3, $clock + $$4::bigint)
    ON CONFLICT (namespace, key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at
    RETURNING EXISTS (SELECT FROM $table WHERE expires_at <= $clock)
"""
# A statement of its own that skips locked rows: as a part of `set`, two of them could deadlock.
_SWEEP: Final = """
    DELETE FROM $table AS gone USING (
        SELECT namespace, key FROM $table WHERE expires_at <= $clock ORDER BY expires_at LIMIT $$1 FOR UPDATE SKIP LOCKED
    ) AS old
    WHERE gone.namespace = old.namespace AND gone.key = old.key AND gone.expires_at <= $clock
"""
# The server's clock as a subquery, so that it is read once for each statement and an index can be used.
_CLOCK: Final = "(SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"


class _Statements:
    """The statements for one table. A name becomes part of SQL here and nowhere else."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._names = {
            "table": f'"{table}"',
            "index": f'"{table}_expiring"',
            "clock": _CLOCK,
            "is_live": f"(expires_at IS NULL OR expires_at > {_CLOCK})",
        }
        self.look, self.lock, self.create = map(self._fill, (_LOOK, _LOCK, _CREATE))
        self.get, self.exists, self.keys = map(self._fill, (_GET, _EXISTS, _KEYS))
        self.set, self.sweep, self.delete = map(self._fill, (_SET, _SWEEP, _DELETE))

    @property
    def lock_key(self) -> int:
        """The advisory lock for creating the table."""
        return int.from_bytes(hashlib.sha256(f"perdure {self.table}".encode()).digest()[:8], "big", signed=True)

    def _fill(self, template: str) -> str:
        return Template(template).substitute(self._names)


_statements: Final = cache(_Statements)


class PostgresKvConnections(PostgresConnections):
    """The pool of a key-value store, and its table."""

    @property
    def statements(self) -> _Statements:
        return _statements(f"{self.tables.stem}_values")

    async def _create_tables(self, channel: PostgresChannel, *, allowed: bool) -> None:  # noqa: ARG002 - it may always create its table
        statements, connection = self.statements, channel.connection
        if not await connection.fetch(statements.look, statements.table):
            await connection.fetch(statements.lock, statements.lock_key)
            await connection.execute(statements.create)

    async def rows(self, statement: str, *values: Any) -> Sequence[Any]:
        """The rows that a statement returns."""
        return await self.use_connection(lambda connection: _fetch(connection, statement, values))


async def _fetch(connection: Connection, statement: str, values: tuple[Any, ...]) -> Sequence[Any]:
    return await connection.fetch(statement, *values)


class PostgresKeyValueStore(ServerKeyValueStore[PostgresKvConnections]):
    """A `KeyValueStore` in the table `{table}_values` of a PostgreSQL database.

    It takes a URL, or an asyncpg `pool` that stays the caller's: it is used on its own event loop, and not closed. `namespace`
    keeps several users of one table apart.
    """

    def __init__(
        self, url: str | None = None, *, pool: Any = None, table: str = "perdure", namespace: str = "", pool_size: int = 5
    ) -> None:
        if (url is None) == (pool is None):
            raise ValueError(f"pass the URL of the PostgreSQL database, {FORM}, or a pool of yours as pool=, one of them")
        driver()
        place = PostgresAddress(f"pool {id(pool)}", "", "") if url is None else parse_address(url)
        self._namespace = check_namespace(namespace)
        super().__init__(PostgresKvConnections(place, table, dsn=url, pool=pool, pool_size=pool_size))

    @property
    def place(self) -> tuple[str, ...]:
        """Host and port, database, search path, table and namespace."""
        place = self._connections.place
        return ("postgresql", place.hosts, place.database, place.search_path, self._connections.statements.table, self._namespace)

    async def _get(self, key: str) -> bytes | None:
        rows = await self._connections.rows(self._connections.statements.get, self._namespace, key)
        return rows[0][0] if rows else None

    async def _set(self, key: str, data: bytes, length: int | None) -> None:
        statements = self._connections.statements
        rows = await self._connections.rows(statements.set, self._namespace, key, data, length)
        if rows[0][0]:
            await self._connections.rows(statements.sweep, SWEPT_PER_WRITE)

    async def _delete(self, key: str) -> bool:
        rows = await self._connections.rows(self._connections.statements.delete, self._namespace, key)
        return bool(rows and rows[0][0])

    async def _exists(self, key: str) -> bool:
        return bool(await self._connections.rows(self._connections.statements.exists, self._namespace, key))

    async def _keys_with_prefix(self, prefix: str) -> list[str]:
        first, end = key_range(prefix)
        rows = await self._connections.rows(self._connections.statements.keys, self._namespace, first, end)
        return [row[0] for row in rows]
