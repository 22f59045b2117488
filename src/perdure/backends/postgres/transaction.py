"""A caller's own statements inside a transaction on PostgreSQL.

It has a connection from a pool of its own, so that open transactions never keep the store's verbs from theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from perdure.backends.base.batching import Reply
from perdure.backends.postgres.channel import connection_of
from perdure.backends.postgres.recording import record_all
from perdure.backends.sql.recording import Write
from perdure.backends.sql.session import Session
from perdure.backends.sql.transaction import SqlTransaction
from perdure.model.records import Pulse


class PostgresTransaction(SqlTransaction):
    """What `transaction(lease)` gives. Usable until the context is left. Values of a statement are `$1`, `$2` and so on."""

    REFUSED: ClassVar[frozenset[str]] = frozenset({
        "ABORT", "BEGIN", "COMMIT", "DEALLOCATE", "DISCARD", "END", "LISTEN", "PREPARE", "RELEASE", "RESET", "ROLLBACK",
        "SAVEPOINT", "SET", "START", "UNLISTEN",
    })  # fmt: skip

    async def _run(self, db: Session, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows = await connection_of(db).fetch(sql, *values)
        return [tuple(row) for row in rows]

    async def _record_all(self, db: Session, writes: Sequence[Write]) -> list[Reply[Pulse]]:
        return await record_all(db, writes)

    def _interrupt(self, holding: asyncio.Task[None]) -> None:
        holding.cancel()  # asyncpg cancels the statement on the server
