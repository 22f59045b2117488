"""Creating runs, many in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from perdure.backends.postgres.channel import columns, fetch
from perdure.backends.postgres.notifications import channel_name
from perdure.backends.postgres.recording import ENTRY_TYPES
from perdure.backends.sql.rows import ENTRY_COLUMNS, SIGNAL_COLUMNS, SIGNAL_FIELDS, entry_values, signal_values
from perdure.backends.sql.runs import RunCreation, last_seq
from perdure.backends.sql.session import Session
from perdure.model.records import Created, NewRun

_TYPES: Final = {
    "input": "bytea", "input_hash": "bytea", "first_input_hash": "bytea", "seed": "bytea", "metadata": "bytea",
    "version": "bigint", "priority": "bigint", "start_at": "bigint", "deadline": "bigint",
    "generation": "bigint", "continued_at": "bigint",
}  # fmt: skip
_NEW_FIELDS: Final = NewRun.__struct_fields__
_NEW_COLUMNS: Final = ", ".join(_NEW_FIELDS)
_NEW_TYPES: Final = tuple(_TYPES.get(field, "text") for field in _NEW_FIELDS)
# The numbers of parameters: $2 the request, from $3 on the fields of a new run, then what its lease and its row need.
_N: Final = 2 + len(_NEW_FIELDS)
_ENTRIES_FROM: Final = _N + 9
_SIGNAL_TYPES: Final = tuple({"seq": "bigint", "payload": "bytea"}.get(field, "text") for field in SIGNAL_FIELDS)
_SIGNALS_FROM: Final = _ENTRIES_FROM + 1 + len(ENTRY_TYPES)


def _arrays(first: int, *types: str) -> str:
    """Array parameters of these types, from this number on."""
    return ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(types, first))


# In a queue that has limits a run gets no lease, whatever was asked for.
# Runs that are not there yet, with journal and inbox; those that are there give no instant. In id order, since the statement
# waits for a run that another transaction is creating at this moment.
_CREATE: Final = f"""
    WITH requested AS MATERIALIZED (
        SELECT *, coalesce(caller_time, (SELECT $clock)) AS at,
            CASE WHEN asked_ttl IS NOT NULL AND queue NOT IN (SELECT queue FROM $queues WHERE namespace = $1) THEN asked_ttl END
                AS ttl
        FROM unnest($2::int[], {_arrays(3, *_NEW_TYPES)},
            {_arrays(_N + 1, "bigint", "bigint", "bigint", "text", "text", "bigint", "bigint")})
            AS requested (request, {_NEW_COLUMNS}, caller_time, began_at, asked_ttl, token, owner, journal_length, inbox_seq)
    ),
    inserted AS (
        INSERT INTO $runs (namespace, {_NEW_COLUMNS}, status, wake_at, waiting_for, epoch, lease_token, lease_owner, lease_until,
            attempts, problem_count, held, cancel_requested, parent_notified, created_at, updated_at, journal_length, inbox_seq)
        SELECT $1, {_NEW_COLUMNS}, CASE WHEN ttl IS NULL THEN 'pending' ELSE 'running' END,
            CASE WHEN ttl IS NULL THEN coalesce(start_at, at) ELSE at + ttl END, '[]',
            CASE WHEN ttl IS NULL THEN 0 ELSE greatest(1, at) END, CASE WHEN ttl IS NOT NULL THEN token END,
            CASE WHEN ttl IS NOT NULL THEN owner END, at + ttl,
            CASE WHEN ttl IS NULL THEN 0 ELSE 1 END, 0, 0, 0, 0, coalesce(began_at, at), at, journal_length, inbox_seq
        FROM requested ORDER BY id
        ON CONFLICT DO NOTHING
        RETURNING id, updated_at
    ),
    appended AS (
        INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
        SELECT $1, run_id, {ENTRY_COLUMNS}
        FROM unnest({_arrays(_ENTRIES_FROM, "text", *ENTRY_TYPES)})
            AS entry (run_id, {ENTRY_COLUMNS}) JOIN inserted ON inserted.id = entry.run_id
    ),
    delivered AS (
        INSERT INTO $signals (namespace, run_id, {SIGNAL_COLUMNS}, identity)
        SELECT $1, run_id, {SIGNAL_COLUMNS}, identity
        FROM unnest({_arrays(_SIGNALS_FROM, "text", *_SIGNAL_TYPES, "text")})
            AS signal (run_id, {SIGNAL_COLUMNS}, identity) JOIN inserted ON inserted.id = signal.run_id
    )
    SELECT requested.request, inserted.updated_at, requested.ttl IS NOT NULL AS is_leased,
        (SELECT pg_notify(${_N + 8}, '') FROM (SELECT count(*) FROM inserted) AS any_inserted)::text
    FROM requested LEFT JOIN inserted ON inserted.id = requested.id ORDER BY requested.request
"""


async def create_all(db: Session, creations: Sequence[RunCreation]) -> list[Created | None]:
    """What was created of these; None for each run that is there. No two are for one run."""
    runs = [_values(number, creation) for number, creation in enumerate(creations)]
    entries = [(creation.run.id, *entry_values(entry)) for creation in creations for entry in creation.entries]
    signals = [(creation.run.id, *signal_values(row)) for creation in creations for row in creation.inbox]
    arrays = (
        *columns(runs, 0),
        channel_name(db.tables),
        *columns(entries, 1 + len(ENTRY_TYPES)),
        *columns(signals, 2 + len(SIGNAL_FIELDS)),
    )
    rows = await fetch(db, _CREATE, *arrays)
    return [
        None if at is None else (creation if is_leased else creation.without_lease()).result_at(at)
        for creation, (_, at, is_leased, _) in zip(creations, rows, strict=True)
    ]


def _values(request: int, creation: RunCreation) -> tuple[Any, ...]:
    """What `_CREATE` takes of a run, but for journal and inbox."""
    is_leased = creation.length is not None
    return (
        request,
        *msgspec.structs.astuple(creation.run),
        creation.now,
        creation.created_at,
        creation.length,
        creation.token if is_leased else None,
        creation.owner if is_leased else None,
        last_seq(creation.entries),
        last_seq(creation.inbox),
    )
