"""A caller's own statements inside a transaction.

What the driver makes of values is used here, since the caller's columns are of all kinds. Several statements in one text, which
the driver always lets through, are refused once their results show that there were several.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.mysql.connections import MysqlConnections
from perdure.backends.mysql.errors import DUPLICATE, code_of
from perdure.backends.mysql.wire import Wire
from perdure.backends.sql.session import Session
from perdure.backends.sql.transaction import SqlTransaction
from perdure.errors import PersistenceError
from perdure.model.records import Lease

# A comment that begins with /*! or /*M! is carried out by the server, so it is not skipped.
_FIRST_WORD: Final = re.compile(r"(?:[\s(]|--\s[^\n]*(?:\n|$)|\#[^\n]*(?:\n|$)|/\*(?!M?!).*?\*/)*([A-Za-z]*)", re.DOTALL)
_REFUSED: Final = frozenset({
    "", "CACHE", "CALL", "CHANGE", "CHECK", "DEALLOCATE", "EXECUTE", "FLUSH", "INSTALL", "KILL", "LOAD", "PURGE", "SHUTDOWN",
    "STOP", "UNINSTALL",
})  # fmt: skip


class MysqlTransaction(SqlTransaction):
    """What `transaction(lease)` gives. Usable until the context is left."""

    def __init__(self, connections: MysqlConnections, namespace: str, lease: Lease) -> None:
        super().__init__(connections, namespace, lease)
        self._mysql = connections
        # The connection on which a statement of the caller's is under way.
        self._busy: Wire | None = None

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of the caller's, in which `%s` is a value, and give its rows.

        The server's complaints about it are raised as they are. Raises `ValueError` for a statement that would end the
        transaction or outlive it. What creates or alters tables is committed by the server at once, so it is taken only as the
        first statement, and nothing after it.
        """
        found = _FIRST_WORD.match(sql)
        word = "" if found is None else found[1].upper()
        if word in _REFUSED:
            raise ValueError(f"{word or sql[:20]!r} cannot be used inside a transaction(): it may end it")
        self._refuse(word)
        values, commits = tuple(parameters), self._is_committed_by(word)
        try:
            rows: list[tuple[Any, ...]] = await self._ask(
                lambda db: self._execute(db, sql, values, commits=commits), is_callers=True
            )
        except PersistenceError as error:
            if error.__cause__ is not None and code_of(error.__cause__) == DUPLICATE:  # not by chance, in the caller's own tables
                raise error.__cause__ from None
            raise
        self._statements += 1
        if commits:
            self._broken = f"{word} has committed it already, as MySQL does by itself"
        return rows

    async def _execute(self, db: Session, sql: str, values: tuple[Any, ...], *, commits: bool) -> list[tuple[Any, ...]]:
        wire = db.channel
        if not isinstance(wire, Wire):
            raise TypeError(f"{wire!r} is no connection to MySQL")
        text = wire.connection.cursor().mogrify(sql, values) if values else sql
        self._busy = wire
        try:
            results = await wire.send_texts([text.encode()])
        finally:
            self._busy = None
        if len(results) > 1 or not (commits or wire.in_transaction):
            wire.connection.close()
            raise ValueError("execute() takes one statement that does not end the transaction; what this one did may stay")
        return [tuple(row) for row in results[0].rows]

    async def _end(self) -> None:
        # Whoever has left does not wait for a statement that takes long, and neither does who takes the run over.
        if self._busy is not None:
            await self._mysql.interrupt(self._busy)
        await super()._end()
