"""Payloads that are too large for a row: stored in pieces, with a reference in the row.

A libSQL server takes rows of up to 5 MB only. A payload longer than MAX_INLINE is stored in a table of its own, under its hash
and length, in the transaction that writes the reference; so is a payload that looks like a reference, so that none is ever
mistaken for one. The same content has the same reference, so references compare like their payloads. Pieces that no row refers to
are removed when runs are deleted: partial indexes over references find them at once, and are empty where all payloads are small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from perdure.backends.libsql.hrana import ServerError
from perdure.backends.sql import closing, runs
from perdure.backends.sql.dialect import Statement, Tables
from perdure.backends.sql.rows import BytesValues
from perdure.backends.sql.session import Result, Session
from perdure.errors import PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import EndStatus, Lease, NewInput, RunRow, Signal

Send: TypeAlias = Callable[[Sequence[Statement]], Awaitable[Sequence[Result]]]

MAX_INLINE: Final = 1 << 20
MARK: Final = b"\0perdure:pieces\0"
PIECES_DELETED: Final = "PIECES_GONE"  # code of the error that a payload was deleted between the reads of row and pieces
_LENGTH_BYTES: Final = 8
_PIECES_PER_REPLY: Final = 6  # a reply may have 10 MB
_MAX_PIECES: Final = 10_000  # of a payload: a value in a user's own table may look like a reference of any length
_COLUMNS: Final = (
    *(("runs", column) for column in ("seed", "input_hash", "first_input_hash", "metadata", "progress", "outcome", "input")),
    *(("steps", column) for column in ("args_hash", "payload")),
    *(("schedules", column) for column in ("metadata", "input")),
    ("signals", "payload"),
    ("items", "payload"),
)


class LargePayload(NamedTuple):
    """A bound value that has to be stored in pieces."""

    payload: bytes


class ReferencingValues(BytesValues):
    """Payloads are bytes, or references to bytes, so no other kind of store may read these tables."""

    kind = 3

    def payload(self, payload: bytes) -> Any:
        """As it is, unless it is large or looks like a reference."""
        return LargePayload(payload) if len(payload) > MAX_INLINE or payload.startswith(MARK) else payload


def reference_to(payload: bytes) -> bytes:
    """The reference that a row holds instead of this payload."""
    return MARK + hashlib.sha256(payload).digest() + len(payload).to_bytes(_LENGTH_BYTES, "big")


def _length(reference: bytes) -> int:
    return int.from_bytes(reference[-_LENGTH_BYTES:], "big")


def is_reference(value: object) -> bool:
    """Whether a value that was read is a reference."""
    return isinstance(value, bytes) and value.startswith(MARK)


class LargeValues:
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
            f"WHERE {_is_reference_sql('there.' + column)} AND there.{column} = pieces.reference)"
            for table, column in _COLUMNS
        )
        self._sweep = f'DELETE FROM "{stem}_pieces" AS pieces WHERE {unused}'

    def schema(self) -> list[Statement]:
        """The statements that create the table, where it does not exist."""
        return [Statement(sql) for sql in self._schema]

    def sweep(self) -> Statement:
        """The statement that removes pieces to which no row refers."""
        return Statement(self._sweep)

    def replace(self, statements: Sequence[Statement]) -> tuple[list[Statement], list[Statement]]:
        """The statements that store the pieces, to be sent first, and the given ones with references instead of large values."""
        large = {value for statement in statements for value in statement.values if isinstance(value, LargePayload)}
        if not large:
            return [], list(statements)
        puts = [put for value in large for put in self._put_statements(value.payload)]
        return puts, [_with_references(statement) for statement in statements]

    def _put_statements(self, payload: bytes) -> list[Statement]:
        reference = reference_to(payload)
        starts = range(0, len(payload), MAX_INLINE)
        return [Statement(self._put, (reference, n, payload[start : start + MAX_INLINE])) for n, start in enumerate(starts)]

    async def resolve(self, send: Send, results: Sequence[Result], *, in_transaction: bool) -> list[Result]:
        """The results with payloads instead of references; `send` sends statements as they are.

        In a transaction a reference without pieces is a value in a user's own table, and stays. Otherwise it is an error.
        """
        found = {value for result in results for row in result.rows for value in row if is_reference(value)}
        if not found:
            return list(results)
        payloads = {reference: await self._load(send, reference) for reference in found}
        if None in payloads.values() and not in_transaction:
            raise ServerError("a payload was deleted while it was read", PIECES_DELETED)
        return [Result([_resolve_row(row, payloads) for row in result.rows], result.count) for result in results]

    async def _load(self, send: Send, reference: bytes) -> bytes | None:
        pieces: list[bytes] = []
        for first in range(0, min(-(-_length(reference) // MAX_INLINE), _MAX_PIECES), _PIECES_PER_REPLY):
            (result,) = await send([Statement(self._get, (reference, first, first + _PIECES_PER_REPLY))])
            pieces += [row[0] for row in result.rows]
        payload = b"".join(pieces)
        return payload if reference_to(payload) == reference else None


def _is_reference_sql(column: str) -> str:
    return f"substr({column}, 1, {len(MARK)}) = x'{MARK.hex()}'"


def _index(stem: str, table: str, column: str) -> str:
    name = f'"{stem}_{table}_{column}_pieces"'
    return f'CREATE INDEX IF NOT EXISTS {name} ON "{stem}_{table}" ({column}) WHERE {_is_reference_sql(column)}'


def _with_references(statement: Statement) -> Statement:
    return Statement(
        statement.sql,
        tuple(reference_to(value.payload) if isinstance(value, LargePayload) else value for value in statement.values),
    )


def _resolve_row(row: Sequence[Any], payloads: dict[bytes, bytes | None]) -> tuple[Any, ...]:
    known = {reference: payload for reference, payload in payloads.items() if payload is not None}
    return tuple(known.get(value, value) if isinstance(value, bytes) else value for value in row)


async def delete(db: Session, large: LargeValues, run_id: str) -> None:
    """Remove the run and everything of it."""
    await runs.delete(db, run_id)
    await db.send([large.sweep()])


async def purge(
    db: Session,
    large: LargeValues,
    age: int,
    status: Collection[EndStatus],
    workflow: str | None,
    limit: int,
    now: int | None,
) -> int:
    """Delete old runs and everything of them."""
    number = await runs.purge(db, age, status, workflow, limit, now)
    await db.send([large.sweep()])
    return number


async def continue_as(db: Session, large: LargeValues, lease: Lease, new: NewInput, now: int | None) -> None:
    """Let the run start over, and remove what its old journal had in pieces."""
    await closing.continue_as(db, lease, new, now)
    await db.send([large.sweep()])


async def restore(
    db: Session, large: LargeValues, run: RunRow, entries: Sequence[Entry], rows: Sequence[Signal], now: int | None
) -> None:
    """Put this whole run in place of the one that exists, and remove everything of that."""
    if not await runs.restore(db, run, entries, rows, now):  # another transaction created it after the lookup
        raise PersistenceError(f"run {run.id!r}", "it was created inside another's transaction; nothing was written")
    await db.send([large.sweep()])
