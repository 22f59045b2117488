"""Payloads that are too large for a row: kept in pieces, with a reference in their place.

A libSQL server takes rows of up to 5 MB only. What is longer than LARGEST is put into a table of its own, under its hash and
length, in the transaction that writes the reference; a payload that looks like a reference is put there as well, so none is ever
mistaken. The same content has the same reference, so that payloads are compared as before. What nothing refers to any more is
removed when runs are deleted. An index over references alone tells that at once, and is empty where all payloads are small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from perdure.backends.libsql.hrana import ServerError
from perdure.backends.sql import runs
from perdure.backends.sql.session import Result, Session, Statement
from perdure.backends.sql.tables import Tables
from perdure.backends.sql.values import BytesValues
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import RunRow, Signal

Send: TypeAlias = Callable[[Sequence[Statement]], Awaitable[Sequence[Result]]]

LARGEST: Final = 1 << 20
MARK: Final = b"\0perdure:pieces\0"
GONE: Final = "PIECES_GONE"  # the code of the error: what was read was deleted before its pieces were
_LENGTH_BYTES: Final = 8
_AT_ONCE: Final = 6  # pieces of a reply, which may have 10 MB
_MOST: Final = 10_000  # pieces of a payload; a value in somebody's table may look like a reference and say any length
_COLUMNS: Final = (
    *(("runs", column) for column in ("seed", "input_hash", "metadata", "progress", "outcome", "input")),
    *(("steps", column) for column in ("args_hash", "payload")),
    *(("schedules", column) for column in ("metadata", "input")),
    ("signals", "payload"),
    ("items", "payload"),
)


class Large(NamedTuple):
    """A payload on its way into pieces."""

    payload: bytes


class PieceValues(BytesValues):
    """Payloads are bytes, or references to bytes: so nobody else should read these tables."""

    kind = 3

    def payload(self, payload: bytes) -> Any:
        """As it is, unless it is large or looks like a reference."""
        return Large(payload) if len(payload) > LARGEST or payload.startswith(MARK) else payload


def reference_to(payload: bytes) -> bytes:
    """What stands in the place of this payload."""
    return MARK + hashlib.sha256(payload).digest() + len(payload).to_bytes(_LENGTH_BYTES, "big")


def _length(reference: bytes) -> int:
    return int.from_bytes(reference[-_LENGTH_BYTES:], "big")


def is_reference(value: object) -> bool:
    """Whether a value that was read is a reference."""
    return isinstance(value, bytes) and value.startswith(MARK)


class Pieces:
    """The table of pieces that belongs to a store's tables."""

    def __init__(self, tables: Tables) -> None:
        stem = tables.stem
        table = "(reference BLOB NOT NULL, n INTEGER NOT NULL, piece BLOB NOT NULL, PRIMARY KEY (reference, n))"
        self._schema = [
            f'CREATE TABLE IF NOT EXISTS "{stem}_pieces" {table}',
            *(_index(stem, *column) for column in _COLUMNS),
        ]
        self._put = f'INSERT INTO "{stem}_pieces" (reference, n, piece) VALUES (?, ?, ?) ON CONFLICT DO NOTHING'
        self._get = f'SELECT piece FROM "{stem}_pieces" WHERE reference = ? AND n >= ? AND n < ? ORDER BY n'
        unused = " AND ".join(
            f'NOT EXISTS (SELECT 1 FROM "{stem}_{table}" AS there INDEXED BY "{stem}_{table}_{column}_pieces" '
            f"WHERE {_marked('there.' + column)} AND there.{column} = pieces.reference)"
            for table, column in _COLUMNS
        )
        self._sweep = f'DELETE FROM "{stem}_pieces" AS pieces WHERE {unused}'

    def schema(self) -> list[Statement]:
        """What creates the table, where it is not there."""
        return [Statement(sql, ()) for sql in self._schema]

    def sweep(self) -> Statement:
        """What removes pieces that nothing refers to."""
        return Statement(self._sweep, ())

    def taken_apart(self, statements: Sequence[Statement]) -> tuple[list[Statement], list[Statement]]:
        """What puts the pieces of these statements there, to be sent before them, and the statements with references instead."""
        large = {value for statement in statements for value in statement.values if isinstance(value, Large)}
        if not large:
            return [], list(statements)
        return [put for value in large for put in self._puts(value.payload)], [_shortened(statement) for statement in statements]

    def _puts(self, payload: bytes) -> list[Statement]:
        reference = reference_to(payload)
        starts = range(0, len(payload), LARGEST)
        return [Statement(self._put, (reference, n, payload[start : start + LARGEST])) for n, start in enumerate(starts)]

    async def put_together(self, send: Send, results: Sequence[Result], *, in_transaction: bool) -> list[Result]:
        """The results with payloads in the places of references; `send` sends statements as they are.

        In a transaction what has no pieces is no reference but a value in somebody's own table. Otherwise it is an error.
        """
        found = {value for result in results for row in result.rows for value in row if is_reference(value)}
        if not found:
            return list(results)
        payloads = {reference: await self._whole(send, reference) for reference in found}
        if None in payloads.values() and not in_transaction:
            raise ServerError("a payload was deleted while it was read", GONE)
        return [Result([_resolved(row, payloads) for row in result.rows], result.count) for result in results]

    async def _whole(self, send: Send, reference: bytes) -> bytes | None:
        pieces: list[bytes] = []
        for first in range(0, min(-(-_length(reference) // LARGEST), _MOST), _AT_ONCE):
            (result,) = await send([Statement(self._get, (reference, first, first + _AT_ONCE))])
            pieces += [row[0] for row in result.rows]
        payload = b"".join(pieces)
        return payload if reference_to(payload) == reference else None


def _marked(column: str) -> str:
    return f"substr({column}, 1, {len(MARK)}) = x'{MARK.hex()}'"


def _index(stem: str, table: str, column: str) -> str:
    name = f'"{stem}_{table}_{column}_pieces"'
    return f'CREATE INDEX IF NOT EXISTS {name} ON "{stem}_{table}" ({column}) WHERE {_marked(column)}'


def _shortened(statement: Statement) -> Statement:
    return Statement(
        statement.sql, tuple(reference_to(value.payload) if isinstance(value, Large) else value for value in statement.values)
    )


def _resolved(row: Sequence[Any], payloads: dict[bytes, bytes | None]) -> tuple[Any, ...]:
    known = {reference: payload for reference, payload in payloads.items() if payload is not None}
    return tuple(known.get(value, value) if isinstance(value, bytes) else value for value in row)


async def delete(db: Session, pieces: Pieces, run_id: str) -> None:
    """Remove the run and everything of it."""
    await runs.delete(db, run_id)
    await db.send([pieces.sweep()])


async def purge(db: Session, pieces: Pieces, age: int, limit: int, now: int | None) -> int:
    """Delete old runs and everything of them."""
    number = await runs.purge(db, age, limit, now)
    await db.send([pieces.sweep()])
    return number


async def restore(
    db: Session, pieces: Pieces, run: RunRow, entries: Sequence[Entry], rows: Sequence[Signal], now: int | None
) -> None:
    """Put this whole run in place of what is there, and remove everything of that."""
    if not await runs.restore(db, run, entries, rows, now):  # somebody put another there since it was looked for
        raise PersistenceError(f"run {run.id!r}", "it was created inside another's transaction; nothing was written")
    await db.send([pieces.sweep()])
