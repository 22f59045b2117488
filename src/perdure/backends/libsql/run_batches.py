"""New runs, heartbeats and signals, each as one batch of statements that needs no reply in between: one request.

The statements find out by themselves what depends on the database: the instant by the server's clock, whether a lease is current,
whether a signal is accepted and which run it wakes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from perdure.backends.base.batching import Reply
from perdure.backends.libsql.record_batch import MAX_ROWS, fence_statement
from perdure.backends.sql.dialect import Statement, Tables, chunks
from perdure.backends.sql.recording import fences_from, is_current
from perdure.backends.sql.rows import RUN_COLUMNS, RUN_FIELDS, run_values
from perdure.backends.sql.runs import RunCreation
from perdure.backends.sql.session import Parameters, Result
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import ENDED, Created, Lease, Pulse

# What a lease makes different in a new run.
_LEASE_FIELDS: Final = ("status", "epoch", "wake_at", "lease_owner", "lease_until", "attempts")
# `limited` says whether the queue {queue} has limits: then the run is not leased.
_INSERT_RUN: Final = f"""
    INSERT INTO $runs (namespace, {RUN_COLUMNS}, lease_token, journal_length, inbox_seq)
    SELECT ?1, {{places}}, {{token}}, 0, 0
    FROM (SELECT EXISTS (SELECT 1 FROM $queues WHERE namespace = ?1 AND queue = {{queue}}) AS limited)
    WHERE true ON CONFLICT DO NOTHING RETURNING updated_at, lease_token IS NOT NULL
"""
# In a renewal ?2 is the time if a test passed one, ?3 the length.
_NOW: Final = "coalesce(?2, $clock)"
_PROLONG: Final = f"""
    UPDATE $runs SET lease_until = {_NOW} + ?3, wake_at = {_NOW} + ?3, updated_at = {_NOW}, running_steps = {{}}
    WHERE namespace = ?1 AND id IN (SELECT column1 FROM (VALUES {{}})) AND (id, epoch, lease_token) IN (VALUES {{}})
"""
_ENDED: Final = ", ".join(f"'{status}'" for status in sorted(ENDED))
_SELECT_STATUS: Final = "SELECT status FROM $runs WHERE namespace = ?1 AND id = ?2"
# A repeated signal has the same identity.
_PUT_SIGNAL: Final = f"""
    INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, dedupe, identity)
    SELECT namespace, id, inbox_seq + 1, 'signal', ?3, ?4, ?5, ?6 FROM $runs
    WHERE namespace = ?1 AND id = ?2 AND status NOT IN ({_ENDED})
    ON CONFLICT (namespace, run_id, identity) WHERE identity IS NOT NULL DO NOTHING
"""
# Only for a new signal: its seq is above the run's `inbox_seq`.
_WAKE_RUN: Final = """
    UPDATE $runs SET inbox_seq = inbox_seq + 1, wake_at = CASE
        WHEN (status = 'pending' AND problem IS NOT NULL) OR (status = 'suspended' AND EXISTS (
            SELECT 1 FROM json_each($runs.waiting_for) AS awaited
            WHERE json_extract(awaited.value, '$[0]') = 'signal' AND json_extract(awaited.value, '$[1]') = ?4
        )) THEN min(coalesce(wake_at, coalesce(?5, $clock)), coalesce(?5, $clock))
        ELSE wake_at END
    WHERE namespace = ?1 AND id = ?2 AND inbox_seq < (
        SELECT seq FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND identity = ?3
    )
"""
_SELECT_SEQ: Final = "SELECT seq FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND identity = ?3"


def create_statements(tables: Tables, namespace: str, creations: Sequence[RunCreation]) -> list[Statement]:
    """The statements that insert these runs, which have no entries and no inbox; a run that exists is left alone."""
    return [_insert_statement(tables, namespace, creation) for creation in creations]


def created_from(creations: Sequence[RunCreation], results: Sequence[Result]) -> list[Created | None]:
    """The runs that were created, from the results of `create_statements`; None where a run existed."""
    return [
        _created_from(creation, *result.rows[0]) if result.rows else None
        for creation, result in zip(creations, results, strict=True)
    ]


def _created_from(creation: RunCreation, at: Any, is_leased: Any) -> Created:
    return (creation if int(is_leased) else creation.without_lease()).result_at(int(at))


def _insert_statement(tables: Tables, namespace: str, creation: RunCreation) -> Statement:
    params = Parameters()
    columns = _columns(creation.without_lease(), params, RUN_FIELDS)
    token = params.one(None)
    if creation.length is not None:
        leased = _columns(creation, params, _LEASE_FIELDS)
        columns |= {name: f"CASE WHEN limited THEN {columns[name]} ELSE {value} END" for name, value in leased.items()}
        token = f"CASE WHEN NOT limited THEN {params.one(creation.token)} END"
    template = _INSERT_RUN.format(places=", ".join(columns.values()), token=token, queue=params.one(creation.run.queue))
    return tables.statement(template, namespace, *params.values)


def _columns(creation: RunCreation, params: Parameters, names: Iterable[str]) -> dict[str, str]:
    """These columns of a new run as SQL."""
    at = 0 if creation.now is None else creation.now
    row: dict[str, Any] = dict(zip(RUN_FIELDS, run_values(creation.result_at(at).run), strict=True))
    timed = _clock_columns(creation, params) if creation.now is None else {}
    return {name: timed[name] if name in timed else params.one(row[name]) for name in names}


def _clock_columns(creation: RunCreation, params: Parameters) -> dict[str, str]:
    """The columns that depend on when the run is created, as SQL."""
    columns = {"updated_at": "$clock"}
    if creation.created_at is None:
        columns["created_at"] = "$clock"
    if creation.length is not None:
        until = f"$clock + {params.one(creation.length)}"
        return columns | {"epoch": "$clock", "wake_at": until, "lease_until": until}
    return columns if creation.run.start_at is not None else columns | {"wake_at": "$clock"}


def renew_statements(
    tables: Tables, namespace: str, leases: Sequence[Lease], length: int, running_steps: Mapping[Lease, bytes], now: int | None
) -> list[Statement]:
    """The statements that prolong each of these leases that is still current to `length` microseconds from now."""
    statements = [fence_statement(tables, namespace, {lease.run_id for lease in leases})]
    for chunk in chunks(leases, MAX_ROWS):
        params = Parameters()
        params.many([now, length])
        steps = params.by_id("running_steps", {lease.run_id: running_steps.get(lease) for lease in chunk})
        ids = ", ".join(f"({params.one(lease.run_id)})" for lease in chunk)
        whole = ", ".join(f"({params.many([lease.run_id, lease.epoch, lease.token])})" for lease in chunk)
        statements.append(tables.statement(_PROLONG.format(steps, ids, whole), namespace, *params.values))
    return statements


def pulses_from(tables: Tables, leases: Sequence[Lease], results: Sequence[Result]) -> list[Pulse | None]:
    """The pulse of each lease, from the results of `renew_statements`; None when it is no longer current."""
    fences = fences_from(tables, results[0])
    return [fences[lease.run_id][2] if is_current(fences, lease) else None for lease in leases]


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """A signal, with the statements that put it into the inbox of its run."""

    run_id: str
    statements: Sequence[Statement]
    size: int
    written_rows: Collection[Hashable] = ()  # a batch may hold any number for one run, in their order


def signal_request(
    tables: Tables, namespace: str, run_id: str, name: str, payload: bytes, dedupe: str | None, identity: str, now: int | None
) -> SignalRequest:
    """The request that puts a signal into the run's inbox, unless one with this identity is there."""
    statements = [
        tables.statement(_SELECT_STATUS, namespace, run_id),
        tables.statement(_PUT_SIGNAL, namespace, run_id, name, payload, dedupe, identity),
        tables.statement(_WAKE_RUN, namespace, run_id, identity, name, now),
        tables.statement(_SELECT_SEQ, namespace, run_id, identity),
    ]
    return SignalRequest(run_id, statements, len(payload) + sum(len(statement.sql) for statement in statements))


def seqs_from(tables: Tables, requests: Sequence[SignalRequest], results: Sequence[Result]) -> list[Reply[int]]:
    """The reply to each signal, from the results of all their statements: its seq, `RunNotFound` or `RunFinished`."""
    unread = iter(results)
    return [_seq_from(tables, signal.run_id, list(islice(unread, len(signal.statements)))) for signal in requests]


def _seq_from(tables: Tables, run_id: str, results: Sequence[Result]) -> Reply[int]:
    target, _, _, found = results
    if not target.rows:
        return RunNotFound(run_id)
    if not found.rows:
        return RunFinished(run_id, tables.values.name_from(target.rows[0][0]))
    return int(found.rows[0][0])
