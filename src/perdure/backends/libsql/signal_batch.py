"""Signals as one batch: whether one is taken, and whom it wakes, its statements find out by themselves."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from perdure.backends.base.batching import Reply
from perdure.backends.sql.session import Result, Statement
from perdure.backends.sql.tables import Tables
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import ENDED

_ENDED: Final = ", ".join(f"'{status}'" for status in sorted(ENDED))
_TARGET: Final = "SELECT status FROM $runs WHERE namespace = ?1 AND id = ?2"
# One that is there already has the same identity.
_PUT: Final = f"""
    INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, dedupe, identity)
    SELECT namespace, id, inbox_seq + 1, 'signal', ?3, ?4, ?5, ?6 FROM $runs
    WHERE namespace = ?1 AND id = ?2 AND status NOT IN ({_ENDED})
    ON CONFLICT (namespace, run_id, identity) WHERE identity IS NOT NULL DO NOTHING
"""
# Only if it is new: then the run's row does not know of it yet.
_WAKE: Final = """
    UPDATE $runs SET inbox_seq = inbox_seq + 1, wake_at = CASE
        WHEN status = 'suspended' AND EXISTS (
            SELECT 1 FROM json_each($runs.waiting_for) AS awaited
            WHERE json_extract(awaited.value, '$[0]') = 'signal' AND json_extract(awaited.value, '$[1]') = ?4
        ) THEN min(coalesce(wake_at, coalesce(?5, $clock)), coalesce(?5, $clock))
        ELSE wake_at END
    WHERE namespace = ?1 AND id = ?2 AND inbox_seq < (
        SELECT seq FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND identity = ?3
    )
"""
_SEQ: Final = "SELECT seq FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND identity = ?3"


@dataclass(frozen=True, slots=True)
class Sending:
    """A signal on its way, with what puts it there."""

    run_id: str
    statements: Sequence[Statement]
    size: int
    written_rows: Collection[Hashable] = ()  # any number may go to one run, one after the other


def sending(
    tables: Tables, namespace: str, run_id: str, name: str, payload: bytes, dedupe: str | None, sent: str, now: int | None
) -> Sending:
    """What puts a signal with the identity `sent` into the run's inbox, unless it is there."""
    statements = [
        tables.statement(_TARGET, namespace, run_id),
        tables.statement(_PUT, namespace, run_id, name, payload, dedupe, sent),
        tables.statement(_WAKE, namespace, run_id, sent, name, now),
        tables.statement(_SEQ, namespace, run_id, sent),
    ]
    return Sending(run_id, statements, len(payload) + sum(len(statement.sql) for statement in statements))


def seqs_from(tables: Tables, asked: Sequence[Sending], results: Sequence[Result]) -> list[Reply[int]]:
    """What each signal is answered, by what the statements of all gave: its seq, `RunNotFound` or `RunFinished`."""
    given = iter(results)
    return [_seq_from(tables, signal.run_id, list(islice(given, len(signal.statements)))) for signal in asked]


def _seq_from(tables: Tables, run_id: str, results: Sequence[Result]) -> Reply[int]:
    target, _, _, found = results
    if not target.rows:
        return RunNotFound(run_id)
    if not found.rows:
        return RunFinished(run_id, tables.values.name_from(target.rows[0][0]))
    return int(found.rows[0][0])
