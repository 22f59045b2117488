"""A caller's own statements inside a transaction.

The driver formats their values, since the caller's columns have any type. Several statements in one text, which the driver always
lets through, are refused once their results show that there were several.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.base.retries import REPEATED_REPLY_WITHIN
from perdure.backends.mysql.connection import MysqlConnection
from perdure.backends.mysql.connections import MysqlConnections
from perdure.backends.sql.session import Session
from perdure.backends.sql.transaction import SqlTransaction
from perdure.model.records import Lease

# The server executes a comment that begins with /*! or /*M!, so it is not skipped.
_FIRST_WORD: Final = re.compile(r"(?:[\s(]|--\s[^\n]*(?:\n|$)|\#[^\n]*(?:\n|$)|/\*(?!M?!).*?\*/)*([A-Za-z]*)", re.DOTALL)
_REFUSED: Final = frozenset({
    "", "CACHE", "CALL", "CHANGE", "CHECK", "DEALLOCATE", "EXECUTE", "FLUSH", "INSTALL", "KILL", "LOAD", "PURGE", "SHUTDOWN",
    "STOP", "UNINSTALL",
})  # fmt: skip


class MysqlTransaction(SqlTransaction):
    """The transaction of `transaction(lease)`, usable until the context is left."""

    def __init__(self, connections: MysqlConnections, namespace: str, lease: Lease) -> None:
        super().__init__(connections, namespace, lease)
        self._mysql = connections
        # The connection on which a statement of the caller runs.
        self._busy: MysqlConnection | None = None

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of one statement of the caller, in which `%s` is a value.

        The server's errors about it are raised as they are. Raises `ValueError` for a statement that would end the transaction
        or outlive it. The server commits a statement that creates or alters tables at once, so such a one is accepted only as
        the first statement, and no other after it.
        """
        found = _FIRST_WORD.match(sql)
        word = "" if found is None else found[1].upper()
        if word in _REFUSED:
            raise ValueError(f"{word or sql[:20]!r} cannot be used inside a transaction(): it may end it")
        self._refuse(word)
        values, commits = tuple(parameters), self._is_committed_by(word)
        rows: list[tuple[Any, ...]] = await self._request(
            lambda db: self._execute(db, sql, values, commits=commits), is_callers=True
        )
        self._statements += 1
        if commits:
            self._broken = f"{word} has committed it already, as MySQL does by itself"
        return rows

    async def _execute(self, db: Session, sql: str, values: tuple[Any, ...], *, commits: bool) -> list[tuple[Any, ...]]:
        connection = db.channel
        if not isinstance(connection, MysqlConnection):
            raise TypeError(f"{connection!r} is no connection to MySQL")
        text = connection.driver_connection.cursor().mogrify(sql, values) if values else sql
        self._busy = connection
        try:
            results = await connection.send_texts([text.encode()], limit=REPEATED_REPLY_WITHIN)  # it may take its time
        finally:
            self._busy = None
        if len(results) > 1 or not (commits or connection.in_transaction):
            connection.driver_connection.close()
            raise ValueError("execute() takes one statement that does not end the transaction; what this one did may stay")
        return [tuple(row) for row in results[0].rows]

    async def _end(self) -> None:
        # A caller that has left must not wait for a slow statement, and neither must the worker that takes the run over.
        if self._busy is not None:
            await self._mysql.interrupt(self._busy)
        await super()._end()
