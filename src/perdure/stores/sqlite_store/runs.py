"""Runs as a whole: create, read, delete, reopen, and what an operator asks of them."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Final

import msgspec

from perdure.errors import LeaseHeld, RunConflict, RunFinished, RunNotFound
from perdure.journal import drop_entry
from perdure.store import ENDED, Claim, Created, Lease, NewRun, RunRow
from perdure.stores.sqlite_store.owner import Owners
from perdure.stores.sqlite_store.recording import append
from perdure.stores.sqlite_store.rows import RUN_COLUMNS, RUN_FIELDS, clock, run_from, values_of
from perdure.stores.sqlite_store.schema import Session

_GET: Final = f"SELECT {RUN_COLUMNS} FROM $runs WHERE namespace = ?1 AND id = ?2"
_INSERT: Final = f"""
    INSERT INTO $runs (namespace, {RUN_COLUMNS}, lease_token, journal_length)
    VALUES (?, {", ".join("?" * len(RUN_FIELDS))}, ?, 0)
"""
_STATE: Final = """
    SELECT status, epoch, (SELECT max(seq) FROM $steps WHERE namespace = ?1 AND run_id = ?2)
    FROM $runs WHERE namespace = ?1 AND id = ?2
"""
_REOPEN: Final = """
    UPDATE $runs SET status = 'pending', epoch = ?3, wake_at = ?4, updated_at = ?4, attempts = 0, cancel_requested = 0,
        outcome = NULL, waiting_for = '[]', parent_notified = 0
    WHERE namespace = ?1 AND id = ?2
"""
_CANCEL: Final = """
    UPDATE $runs SET cancel_requested = 1,
        wake_at = CASE WHEN status = 'running' THEN wake_at ELSE min(coalesce(wake_at, ?3), ?3) END
    WHERE namespace = ?1 AND id = ?2
"""
_HOLD: Final = "UPDATE $runs SET held = ?3 WHERE namespace = ?1 AND id = ?2"
_DELETE: Final = (
    "DELETE FROM $runs WHERE namespace = ?1 AND id = ?2",
    "DELETE FROM $steps WHERE namespace = ?1 AND run_id = ?2",
    "DELETE FROM $signals WHERE namespace = ?1 AND run_id = ?2",
    "DELETE FROM $items WHERE namespace = ?1 AND run_id = ?2",
)


def get(db: Session, run_id: str) -> RunRow | None:
    """The run's row, or None."""
    values = db.one(_GET, run_id)
    return None if values is None else run_from(values)


def create(db: Session, new: NewRun, length: int | None, owners: Owners, now: int | None) -> Created:
    """The run that is there with the same workflow and input, or a new one, leased for `length` microseconds if that is given."""
    existing = get(db, new.id)
    if existing is not None:
        return _existing(existing, new)
    at = clock(now)
    if length is None:
        run = insert_pending(db, new, at)
        return Created(run=run, is_new=True)
    return _create_leased(db, new, at, at + length, owners.here)


def _existing(run: RunRow, new: NewRun) -> Created:
    if run.workflow != new.workflow:
        raise RunConflict(new.id, f"another workflow ({run.workflow!r})")
    if run.input_hash != new.input_hash:
        raise RunConflict(new.id, "another input")
    return Created(run=run, is_new=False)


def insert_pending(db: Session, new: NewRun, at: int) -> RunRow:
    """Write a run that is due at its start."""
    wake_at = at if new.start_at is None else new.start_at
    run = RunRow(**msgspec.structs.asdict(new), status="pending", wake_at=wake_at, created_at=at, updated_at=at)
    db.run(_INSERT, *values_of(run), None)
    return run


def _create_leased(db: Session, new: NewRun, at: int, until: int, owner: str) -> Created:
    run = RunRow(
        **msgspec.structs.asdict(new),
        status="running",
        wake_at=until,
        epoch=max(1, at),
        lease_owner=owner,
        lease_until=until,
        attempts=1,
        created_at=at,
        updated_at=at,
    )
    lease = Lease(run_id=run.id, epoch=run.epoch, token=secrets.token_hex(16), until=until)
    db.run(_INSERT, *values_of(run), lease.token)
    return Created(run=run, is_new=True, claim=Claim(lease=lease, run=run, journal=[], inbox=[], inbox_seq=0, item_counts={}))


def reopen(db: Session, run_id: str, drop: Collection[str], now: int | None) -> None:
    """Make an ended run pending and due under a new epoch, with one drop entry more."""
    state = db.one(_STATE, run_id)
    if state is None:
        raise RunNotFound(run_id)
    status, epoch, last_seq = state
    if status == "completed":
        raise RunFinished(run_id, status)
    if status not in ENDED:
        raise LeaseHeld(run_id, f"its present attempt (it is {status}); wait until it has ended")
    at = clock(now)
    epoch = max(epoch + 1, at)
    append(db, run_id, [drop_entry((last_seq or 0) + 1, drop, at, epoch)])
    db.run(_REOPEN, run_id, epoch, at)


def cancel(db: Session, run_id: str, now: int | None) -> None:
    """Ask the run to stop, and make it due unless somebody drives it."""
    state = db.one(_STATE, run_id)
    if state is None:
        raise RunNotFound(run_id)
    if state[0] in ENDED:
        raise RunFinished(run_id, state[0])
    db.run(_CANCEL, run_id, clock(now))


def hold(db: Session, run_id: str, *, held: bool) -> None:
    """Put the run on hold, or take it off."""
    if not db.run(_HOLD, run_id, held):
        raise RunNotFound(run_id)


def delete(db: Session, run_id: str) -> None:
    """Remove the run and everything of it."""
    for statement in _DELETE:
        db.run(statement, run_id)
