"""Text by key in an SQLite file, for all processes of one machine, with nothing but the standard library.

It shares its threads with the `SQLiteStore`s on the same file: all writes of a process go through one thread, many in one commit.
The clock is this machine's, read in that thread.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Concatenate, Final, NoReturn, ParamSpec, TypeVar

from perdure.backends.base.address import path_text
from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.sqlite.connection_thread import ConnectionThread
from perdure.backends.sqlite.database import database_at
from perdure.backends.sqlite.pending_call import PendingCall
from perdure.backends.sqlite.session import SqliteTables
from perdure.kv.limits import check_key, check_namespace, decode_value, encode_value, lifetime
from perdure.kv.patterns import key_range, literal_prefix, matches
from perdure.model.durations import Duration

P = ParamSpec("P")
T = TypeVar("T")

# How many expired rows a write removes: more than it adds, so that they become fewer.
SWEPT_PER_WRITE: Final = 100

_CREATE: Final = (
    """
    CREATE TABLE IF NOT EXISTS $table (
        namespace  TEXT NOT NULL,
        key        TEXT NOT NULL,
        value      BLOB NOT NULL,
        expires_at INTEGER,
        PRIMARY KEY (namespace, key)
    ) STRICT
    """,
    "CREATE INDEX IF NOT EXISTS $index ON $table (expires_at) WHERE expires_at IS NOT NULL",
)
_GET: Final = "SELECT value FROM $table WHERE namespace = ? AND key = ? AND $is_live"
_EXISTS: Final = "SELECT 1 FROM $table WHERE namespace = ? AND key = ? AND $is_live"
_KEYS: Final = "SELECT key FROM $table WHERE namespace = ? AND $is_live AND key >= ? AND key < ?"
_SET: Final = """
    INSERT INTO $table (namespace, key, value, expires_at) VALUES (?, ?, ?, ?)
    ON CONFLICT (namespace, key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at
"""
_SWEEP: Final = """
    DELETE FROM $table WHERE rowid IN (SELECT rowid FROM $table WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)
"""
# Not RETURNING $is_live: some SQLites assume there that a column with a partial index is never null (seen: 3.40).
_DELETE: Final = "DELETE FROM $table WHERE namespace = ? AND key = ? RETURNING expires_at"
# SQLite sorts blobs after text.
_AFTER_ALL_TEXT: Final = b""


class SQLiteKeyValueStore:
    """A `KeyValueStore` in the table `{table}_values` of an SQLite file. What was set is on the disk when `set` returns.

    `namespace` keeps several users of one table apart.
    """

    # What `stores.key_value` says of runs in this store.
    durability: Final = "disk"

    def __init__(self, path: str | Path, *, table: str = "perdure", namespace: str = "") -> None:
        SqliteTables(table)  # which refuses what is no identifier
        self._rows = _ValueRows(f"{table}_values", check_namespace(namespace))
        self._ready_mark = f"{table}/values"
        self._database = database_at(_check_path(path), full=True)
        self._lifecycle = Lifecycle(f"SQLite store {self._database.file.path!r}")
        # A store that is dropped without being closed still releases the threads.
        self._release = weakref.finalize(self, self._database.abandon)
        self._release.atexit = False

    def __repr__(self) -> str:
        return f"SQLiteKeyValueStore({self._database.file.path!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SQLiteKeyValueStore cannot be pickled: send its path, and open one on it in the other process")

    @property
    def place(self) -> tuple[str, ...]:
        """Two stores with the same place hold the same texts: the real path, table (SQLite folds its case) and namespace."""
        return ("sqlite", self._database.file.path, self._ready_mark.lower(), self._rows.namespace)

    async def get(self, key: str) -> str | None:
        """The text under `key`, or None."""
        return await self._ask(self._database.reader, self._rows.get, check_key(key))

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        """Store the text, for `ttl` or without expiry."""
        name = check_key(key)
        await self._ask(self._database.writer, self._rows.set, name, encode_value(name, value), lifetime(ttl))

    async def delete(self, key: str) -> bool:
        """Whether there was anything to delete."""
        return await self._ask(self._database.writer, self._rows.delete, check_key(key))

    async def exists(self, key: str) -> bool:
        """Whether there is text under `key`."""
        return await self._ask(self._database.reader, self._rows.exists, check_key(key))

    async def keys(self, pattern: str) -> list[str]:
        """The keys that match the pattern, in any order."""
        prefix = literal_prefix(pattern)
        if prefix is None:
            return []
        found = await self._ask(self._database.reader, self._rows.keys_with_prefix, prefix)
        return [key for key in found if matches(key, pattern)]

    async def close(self) -> None:
        """Wait for what was submitted, and close the file if nothing else of this process uses it."""
        empty = self._lifecycle.close()
        if empty is None or self._release.detach() is None:
            return
        try:
            await asyncio.wrap_future(empty)
        except asyncio.CancelledError:
            self._database.abandon()
            raise
        await self._database.close()

    async def _ask(
        self, thread: ConnectionThread, verb: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        with self._lifecycle:
            if self._ready_mark not in self._database.ready:
                await self._set_up()
            call = PendingCall(lambda opened: verb(opened.connection, *args, **kwargs))
            thread.put(call)
            return await call

    async def _set_up(self) -> None:
        database = self._database
        database.file.may_create = True
        call = PendingCall(lambda opened: self._rows.create(opened.connection))
        database.writer.put(call)
        await call
        database.ready.add(self._ready_mark)


class _ValueRows:
    """The rows of one namespace. Every method runs in a thread of the file, those that write in a transaction."""

    def __init__(self, table: str, namespace: str) -> None:
        self._names = {
            "table": f'"{table}"',
            "index": f'"{table}_expiring"',
            "is_live": "(expires_at IS NULL OR expires_at > ?)",
        }
        self.namespace = namespace
        self._get, self._exists, self._keys = map(self._fill, (_GET, _EXISTS, _KEYS))
        self._set, self._sweep, self._delete = map(self._fill, (_SET, _SWEEP, _DELETE))

    def _fill(self, template: str) -> str:
        return Template(template).substitute(self._names)

    def create(self, connection: sqlite3.Connection) -> None:
        for statement in _CREATE:
            connection.execute(self._fill(statement))

    def get(self, connection: sqlite3.Connection, key: str) -> str | None:
        rows = connection.execute(self._get, (self.namespace, key, _now())).fetchall()
        return decode_value(rows[0][0]) if rows else None

    def exists(self, connection: sqlite3.Connection, key: str) -> bool:
        return bool(connection.execute(self._exists, (self.namespace, key, _now())).fetchall())

    def keys_with_prefix(self, connection: sqlite3.Connection, prefix: str) -> list[str]:
        first, end = key_range(prefix)
        values = (self.namespace, _now(), first, _AFTER_ALL_TEXT if end is None else end)
        return [key for (key,) in connection.execute(self._keys, values).fetchall()]

    def set(self, connection: sqlite3.Connection, key: str, data: bytes, length: int | None) -> None:
        now = _now()
        connection.execute(self._set, (self.namespace, key, data, None if length is None else now + length))
        connection.execute(self._sweep, (now, SWEPT_PER_WRITE))

    def delete(self, connection: sqlite3.Connection, key: str) -> bool:
        rows = connection.execute(self._delete, (self.namespace, key)).fetchall()
        return bool(rows) and (rows[0][0] is None or rows[0][0] > _now())


def _now() -> int:
    return time.time_ns() // 1000


def _check_path(path: str | Path) -> str:
    text = path_text(path, 'an SQLite key-value store takes the path of a file, such as "app.db"')
    if not text or text == ":memory:" or "\0" in text:
        raise ValueError(f"path {path!r} must name a file; for a store without one use MemoryKeyValueStore()")
    return os.path.realpath(text)
