"""New runs as one batch: each says by itself when it was created, by the server's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.sql.rows import RUN_COLUMNS, RUN_FIELDS, run_values
from perdure.backends.sql.runs import Begin
from perdure.backends.sql.session import Given, Result, Statement
from perdure.backends.sql.tables import Tables
from perdure.model.records import Created

_INSERT: Final = f"""
    INSERT INTO $runs (namespace, {RUN_COLUMNS}, lease_token, journal_length, inbox_seq)
    VALUES (?1, {{}}, {{}}, 0, 0) ON CONFLICT DO NOTHING RETURNING updated_at
"""


def create_statements(tables: Tables, namespace: str, begins: Sequence[Begin]) -> list[Statement]:
    """What inserts these runs, which begin with nothing; one that is there is left alone. `created_from` tells which."""
    return [_statement(tables, namespace, begin) for begin in begins]


def created_from(begins: Sequence[Begin], results: Sequence[Result]) -> list[Created | None]:
    """What was created, or None where a run was there."""
    return [begin.made(int(result.rows[0][0])) if result.rows else None for begin, result in zip(begins, results, strict=True)]


def _statement(tables: Tables, namespace: str, begin: Begin) -> Statement:
    given = Given()
    at = 0 if begin.now is None else begin.now
    values: dict[str, Any] = dict(zip(RUN_FIELDS, run_values(begin.made(at).run), strict=True))
    timed = _by_the_clock(begin, given) if begin.now is None else {}
    places = [timed[name] if name in timed else given.one(value) for name, value in values.items()]
    token = given.one(None if begin.length is None else begin.token)
    return tables.statement(_INSERT.format(", ".join(places), token), namespace, *given.values)


def _by_the_clock(begin: Begin, given: Given) -> dict[str, str]:
    """The columns that depend on when the run is created, as SQL."""
    columns = {"updated_at": "$clock"}
    if begin.created_at is None:
        columns["created_at"] = "$clock"
    if begin.length is not None:
        until = f"$clock + {given.one(begin.length)}"
        return columns | {"epoch": "$clock", "wake_at": until, "lease_until": until}
    return columns if begin.run.start_at is not None else columns | {"wake_at": "$clock"}
