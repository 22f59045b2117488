"""Runs as a whole: create, read, delete, reopen, and what an operator asks of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from perdure.backends.base.leases import new_token
from perdure.backends.base.new_runs import found_row, new_row
from perdure.backends.base.process_owner import Owners
from perdure.backends.sqlite import inbox
from perdure.backends.sqlite.link import Fence
from perdure.backends.sqlite.recording import append
from perdure.backends.sqlite.rows import RUN_COLUMNS, RUN_FIELDS, clock, run_from, values_of
from perdure.backends.sqlite.schema import Session
from perdure.errors import LeaseHeld, RunFinished, RunNotFound
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import ENDED, Claim, Created, Lease, NewRun, Pulse, RunRow, Signal

_GET: Final = f"SELECT {RUN_COLUMNS} FROM $runs WHERE namespace = ?1 AND id = ?2"
_INSERT: Final = f"""
    INSERT INTO $runs (namespace, {RUN_COLUMNS}, lease_token, journal_length)
    VALUES (?, {", ".join("?" * len(RUN_FIELDS))}, ?, ?) ON CONFLICT DO NOTHING
"""
_BEGIN: Final = """
    UPDATE $runs SET workflow = ?3, input = ?4, input_hash = ?5, definition_hash = ?6, queue = ?7, priority = ?8, limit_key = ?9,
        start_at = ?10, deadline = ?11, parent_id = ?12, parent_key = ?13, wake_at = ?14, updated_at = ?15
    WHERE namespace = ?1 AND id = ?2
"""
_STATE: Final = """
    SELECT status, epoch, (SELECT max(seq) FROM $steps WHERE namespace = ?1 AND run_id = ?2)
    FROM $runs WHERE namespace = ?1 AND id = ?2
"""
_REOPEN: Final = """
    UPDATE $runs SET status = 'pending', epoch = ?3, wake_at = CASE WHEN input_hash = x'' THEN NULL ELSE ?4 END, updated_at = ?4,
        attempts = 0, cancel_requested = 0, outcome = NULL, waiting_for = '[]', parent_notified = 0
    WHERE namespace = ?1 AND id = ?2
"""
_CANCEL: Final = """
    UPDATE $runs SET cancel_requested = 1,
        wake_at = CASE WHEN status = 'running' OR input_hash = x'' THEN wake_at ELSE min(coalesce(wake_at, ?3), ?3) END
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


class Begun(NamedTuple):
    """What a run has before it is driven here: its journal and inbox, by seq, and when it was begun if not now."""

    entries: Sequence[Entry] = ()
    inbox: Sequence[Signal] = ()
    created_at: int | None = None


_ANEW: Final = Begun()


def create(db: Session, new: NewRun, length: int | None, owners: Owners, now: int | None, begun: Begun = _ANEW) -> Created:
    """The run that is there with the same workflow and input, or a new one, leased for `length` microseconds if that is given."""
    at = clock(now)
    run = new_row(new, at, begun.created_at)
    created = Created(run=run, is_new=True) if length is None else _leased(run, at + length, owners.here, begun)
    if insert(db, created.run, None if created.claim is None else created.claim.lease.token, begun):
        if created.claim is not None:
            _remember(db, created.claim)
        return created
    existing = get(db, new.id)
    if existing is None:
        raise RunNotFound(new.id)  # it is there, in this very transaction
    return Created(run=_existing(db, existing, new, at), is_new=False)


def _remember(db: Session, claim: Claim) -> None:
    """The lease that was just made is in force."""
    run, lease = claim.run, claim.lease
    of = db.tables.stem, db.namespace, lease.run_id, lease.epoch
    db.link.fences[lease.token] = Fence(of, Pulse(claim.inbox_seq, run.cancel_requested), run.parent_id, run.parent_key)


def _existing(db: Session, run: RunRow, new: NewRun, at: int) -> RunRow:
    begun = found_row(run, new, at)
    if begun is not run:
        db.link.fences.clear()  # it may have a parent now
        db.run(
            _BEGIN,
            run.id,
            begun.workflow,
            begun.input,
            begun.input_hash,
            begun.definition_hash,
            begun.queue,
            begun.priority,
            begun.limit_key,
            begun.start_at,
            begun.deadline,
            begun.parent_id,
            begun.parent_key,
            begun.wake_at,
            begun.updated_at,
        )
    return begun


def insert(db: Session, run: RunRow, token: str | None, begun: Begun = _ANEW) -> bool:
    """Write a run that is not there, with its journal and inbox; False when it is."""
    if not db.run(_INSERT, *values_of(run), token, begun.entries[-1].seq if begun.entries else 0):
        return False
    if begun.entries:
        append(db, run.id, begun.entries)
    inbox.insert(db, run.id, begun.inbox)
    return True


def _leased(pending: RunRow, until: int, owner: str, begun: Begun) -> Created:
    epoch = max(1, pending.updated_at)
    leased = {"status": "running", "wake_at": until, "epoch": epoch, "lease_owner": owner, "lease_until": until, "attempts": 1}
    run = msgspec.structs.replace(pending, **leased)
    lease = Lease(run_id=run.id, epoch=run.epoch, token=new_token(), until=until)
    inbox_seq = begun.inbox[-1].seq if begun.inbox else 0
    claim = Claim(lease=lease, run=run, journal=[*begun.entries], inbox=[*begun.inbox], inbox_seq=inbox_seq, item_counts={})
    return Created(run=run, is_new=True, claim=claim)


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
