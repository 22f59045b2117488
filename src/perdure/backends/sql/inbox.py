"""The inbox of a run: signals and children's outcomes, and when they make the run due."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from perdure.backends.base.damaged_runs import FETCH_FAILURES, raise_damage
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.recording import insert_rows
from perdure.backends.sql.rows import SIGNAL_COLUMNS, Row, awaited_from, signal_from, signal_values
from perdure.backends.sql.session import Session
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import ENDED, Awaited, Signal

_TARGET: Final = """
    SELECT status, waiting_for, inbox_seq, wake_at, $clock, problem FROM $runs WHERE namespace = ?1 AND id = ?2 $for_change
"""
_SAME_SIGNAL: Final = "SELECT seq FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND identity = ?3"
_PUT: Final = """
    INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, dedupe, identity) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
"""
_UPDATE_RUN: Final = "UPDATE $runs SET inbox_seq = ?3, wake_at = ?4 WHERE namespace = ?1 AND id = ?2"
_UNCONSUMED: Final = f"""
    SELECT {SIGNAL_COLUMNS} FROM $signals $by_unconsumed
    WHERE namespace = ?1 AND run_id = ?2 AND $unconsumed AND seq > ?3 ORDER BY seq
"""


async def signal(
    db: Session, run_id: str, name: str, payload: bytes, dedupe: str | None, identity: str | None, now: int | None
) -> int:
    """Put a signal with this identity into the inbox and return its seq; one that is there already keeps its own."""
    target = await db.one(_TARGET, run_id)
    if target is None:
        raise RunNotFound(run_id)
    first = None if identity is None else await db.one(_SAME_SIGNAL, run_id, identity)
    if first is not None:
        return int(first[0])
    status = db.tables.values.name_from(target[0])
    if status in ENDED:
        raise RunFinished(run_id, status)
    return await _deliver(db, run_id, target, Awaited("signal", name), payload, dedupe, identity, now)


async def notify_parent(db: Session, parent_id: str, parent_key: str, outcome: bytes, now: int | None) -> None:
    """Put a child's outcome into its parent's inbox, unless the parent has ended or is not there."""
    target = await db.one(_TARGET, parent_id)
    if target is not None and db.tables.values.name_from(target[0]) not in ENDED:
        await _deliver(db, parent_id, target, Awaited("child", parent_key), outcome, None, None, now)


async def _deliver(
    db: Session,
    run_id: str,
    target: Row,
    address: Awaited,
    payload: bytes,
    dedupe: str | None,
    identity: str | None,
    now: int | None,
) -> int:
    """Append to the inbox of a run whose row is `target`, and wake the run if it waits for this. Gives the new row's seq."""
    with raise_damage(run_id, "the row"):
        status, waiting_for = (db.tables.values.name_from(value) for value in target[:2])
        seq, wake_at = int(target[2]) + 1, None if target[3] is None else int(target[3])
        has_problem = status == "pending" and target[5] is not None and address.kind == "signal"
        if has_problem or (status == "suspended" and address in awaited_from(waiting_for)):
            wake_at = wake_time(wake_at, int(target[4]) if now is None else now)
    await db.send([put(db, run_id, seq, address, payload, dedupe, identity), update_run(db, run_id, seq, wake_at)])
    return seq


def wake_time(wake_at: int | None, at: int) -> int:
    """The new `wake_at` of a run that is woken at this instant: one that is due already keeps its place in the due order."""
    return at if wake_at is None else min(wake_at, at)


def put(
    db: Session, run_id: str, seq: int, address: Awaited, payload: bytes, dedupe: str | None, identity: str | None
) -> Statement:
    """The statement that appends a row to an inbox."""
    return db.statement(_PUT, run_id, seq, address.kind, address.name, payload, dedupe, identity)


def update_run(db: Session, run_id: str, inbox_seq: int, wake_at: int | None) -> Statement:
    """The statement that writes the new end of the inbox, and when the run is due, into the run's row."""
    return db.statement(_UPDATE_RUN, run_id, inbox_seq, wake_at)


def insert(db: Session, run_id: str, rows: Sequence[Signal]) -> list[Statement]:
    """The statements that write rows as they are into an inbox that is empty."""
    values = [[db.namespace, run_id, *signal_values(row)] for row in rows]
    return insert_rows(db, "$signals", f"run_id, {SIGNAL_COLUMNS}, identity", values)


async def read(db: Session, run_id: str, after: int = 0) -> list[Signal]:
    """The unconsumed rows with a seq above `after`, in order of arrival. Raises `SnapshotCorrupt`."""
    with raise_damage(run_id, "the inbox", FETCH_FAILURES):
        rows = await db.all(_UNCONSUMED, run_id, after)
    with raise_damage(run_id, "the inbox"):
        return [signal_from(row, db.tables.values) for row in rows]


async def read_all(db: Session, run_ids: Sequence[str]) -> dict[str, list[Signal]]:
    """The unconsumed rows of these runs, each in order of arrival. Raises `SnapshotCorrupt`, and `FETCH_FAILURES`."""
    params = db.parameters()
    template = f"""
        SELECT {SIGNAL_COLUMNS}, run_id FROM $signals $by_unconsumed
        WHERE namespace = ?1 AND {params.among("run_id", run_ids)} AND $unconsumed ORDER BY run_id, seq
    """
    found: dict[str, list[Signal]] = {}
    for key, rows in groupby(await db.all(template, *params.values), itemgetter(-1)):
        run_id = db.tables.values.name_from(key)
        with raise_damage(run_id, "the inbox"):
            found[run_id] = [signal_from(row, db.tables.values) for row in rows]
    return found
