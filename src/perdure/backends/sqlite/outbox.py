"""Connections of a program to the store's file, on which its own transaction is open: `sqlite3`'s and `aiosqlite`'s."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.base.leases import store_time
from perdure.backends.sql.dialect import Statement, Tables
from perdure.backends.sql.session import Channel, Result, Session
from perdure.backends.sql.transaction import SqlOutbox, refuse_autocommit, refuse_database, refuse_kind, unwrap
from perdure.backends.sqlite.writer_connection import WriterConnection

_HOW: Final = 'connection.execute("BEGIN IMMEDIATE")'
_FILES: Final = Statement("PRAGMA database_list")


class AiosqliteChannel:
    """A channel that sends statements through an aiosqlite connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def send(self, statements: Sequence[Statement]) -> list[Result]:
        """The result of each statement."""
        results = []
        for sql, values in statements:
            async with self._connection.execute(sql, values) as cursor:
                results.append(Result(list(await cursor.fetchall()), cursor.rowcount))
        return results


async def open_outbox(connection: Any, tables: Tables, namespace: str, path: str) -> SqlOutbox:
    """The verbs on this connection, if it is one to the file at this path with an open transaction."""
    caller = await unwrap(connection)
    channel = _channel_on(caller.driver_connection)
    (files,) = await channel.send([_FILES])
    found = next((str(file) for _, name, file in map(tuple, files.rows) if name == "main" and file), ":memory:")  # the real path
    if found != path:
        raise refuse_database(found, path)
    if not caller.driver_connection.in_transaction:
        # sqlite3 begins one by itself before the first write, and SQLAlchemy leaves it to that.
        if not caller.is_managed or caller.driver_connection.isolation_level is None:
            raise refuse_autocommit(_HOW)
        await channel.send([Statement("BEGIN IMMEDIATE")])
    return SqlOutbox(Session(channel, tables, namespace), clock=store_time)


def _channel_on(connection: Any) -> Channel:
    if isinstance(connection, sqlite3.Connection):
        return WriterConnection(connection)
    aiosqlite = sys.modules.get("aiosqlite")
    if aiosqlite is not None and isinstance(connection, aiosqlite.Connection):
        return AiosqliteChannel(connection)
    raise refuse_kind(connection, "SQLite", "a connection of sqlite3 or aiosqlite")
