"""Ends and sleeps of runs, many in one transaction; and runs that start over, one at a time.

The rows of these runs and of the parents to notify are locked together, in id order, so everything can be decided here and then
written. Sleeps come before ends: a parent that goes to sleep is woken by a child that ends in the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from perdure.backends.base.batching import SEND_AGAIN, Reply
from perdure.backends.sql import inbox
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.recording import Write, write_all
from perdure.backends.sql.rows import NO_LEASE_SQL, NO_PROBLEM_SQL, Row, awaited_from, awaited_text, identity
from perdure.backends.sql.session import Parameters, Session
from perdure.errors import LeaseLost
from perdure.model.records import ENDED, Awaited, Lease, NewInput, Signal

_SUSPEND: Final = f"""
    UPDATE $runs SET status = 'suspended', wake_at = ?3, waiting_for = ?4, updated_at = ?5, attempts = 0,
        {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
    WHERE namespace = ?1 AND id = ?2
"""
_END: Final = f"""
    UPDATE $runs SET status = ?3, outcome = ?4, updated_at = ?5, parent_notified = ?6, wake_at = NULL, waiting_for = '[]',
        {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
    WHERE namespace = ?1 AND id = ?2
"""
_LOCK_HELD: Final = "SELECT epoch, lease_token, seed, inbox_seq, $clock FROM $runs WHERE namespace = ?1 AND id = ?2 $for_update"
# MySQL assigns from left to right: the hash of the first input before the present one.
_CONTINUE: Final = f"""
    UPDATE $runs SET first_input_hash = COALESCE(first_input_hash, input_hash), input = ?3, input_hash = ?4, seed = ?5,
        definition_hash = ?6, deadline = ?7, generation = generation + 1, continued_at = ?8, updated_at = ?8, wake_at = ?8,
        status = 'pending', attempts = 0, waiting_for = '[]', journal_length = 0, {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
    WHERE namespace = ?1 AND id = ?2
"""
_EMPTY_JOURNAL: Final = "DELETE FROM $steps WHERE namespace = ?1 AND run_id = ?2"
# The last row stays: PostgreSQL sees by it that its snapshot has the whole inbox.
_DROP_CONSUMED: Final = """
    DELETE FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND seq < ?3 AND consumed_by IS NOT NULL AND dedupe IS NULL
"""
_WAS_CLOSED: Final = "SELECT epoch, lease_token, status, outcome FROM $runs WHERE namespace = ?1 AND id = ?2"


@dataclass(slots=True)
class _ClosingRun:
    """A locked run, as it is at this point of the batch."""

    id: str
    epoch: int
    token: str | None
    status: str
    parent_id: str | None
    parent_key: str | None
    parent_notified: bool
    cancel_requested: bool
    inbox_seq: int
    waiting_for: tuple[Awaited, ...]
    wake_at: int | None
    at: int

    @classmethod
    def of(cls, row: Row, name: Any) -> _ClosingRun:
        run_id, epoch, token, status, parent_id, parent_key, notified, cancel, inbox_seq, waiting_for, wake_at, at = row
        return cls(
            name(run_id), int(epoch), token and name(token), name(status), parent_id and name(parent_id),
            parent_key and name(parent_key), bool(notified), bool(cancel), int(inbox_seq), awaited_from(name(waiting_for)),
            None if wake_at is None else int(wake_at), int(at),
        )  # fmt: skip


async def close_all(db: Session, writes: Sequence[Write]) -> list[Reply[list[Signal]]]:
    """Record, and end or suspend each run. No two writes are for one run; one that is refused fails alone."""
    ids = await _ids_to_lock(db, writes)
    runs = await _lock(db, ids)
    replies: dict[str, Reply[list[Signal]]] = {write.run_id: _check_fence(runs, ids, write) for write in writes}
    passed = [write for write in writes if replies[write.run_id] == []]
    replies.update(await write_all(db, passed))
    passed = [write for write in passed if replies[write.run_id] == []]
    replies.update(await _find_awaited(db, passed))
    statements: list[Statement] = []
    for write in sorted(passed, key=lambda write: write.status != "suspended"):
        if replies[write.run_id] == []:
            run = runs[write.run_id]
            statements += _suspend(db, run, write) if write.status == "suspended" else _end(db, run, write, runs)
    await db.send(statements)
    return [replies[write.run_id] for write in writes]


async def _ids_to_lock(db: Session, writes: Sequence[Write]) -> set[str]:
    """The runs, and the parents of those that end."""
    ids = {write.run_id for write in writes}
    ending = [write.run_id for write in writes if write.status != "suspended"]
    if not ending:
        return ids
    params = Parameters()
    template = f"SELECT parent_id FROM $runs WHERE namespace = ?1 AND id IN ({params.many(ending)}) AND parent_id IS NOT NULL"
    return ids | {db.tables.values.name_from(parent_id) for (parent_id,) in await db.all(template, *params.values)}


async def _lock(db: Session, ids: set[str]) -> dict[str, _ClosingRun]:
    params = Parameters()
    template = f"""
        SELECT id, epoch, lease_token, status, parent_id, parent_key, parent_notified, cancel_requested, inbox_seq, waiting_for,
            wake_at, $clock
        FROM $runs WHERE namespace = ?1 AND id IN ({params.many(sorted(ids))}) ORDER BY id $for_change
    """
    runs = [_ClosingRun.of(row, db.tables.values.name_from) for row in await db.all(template, *params.values)]
    return {run.id: run for run in runs}


def _check_fence(runs: dict[str, _ClosingRun], locked: set[str], write: Write) -> Reply[list[Signal]]:
    run = runs.get(write.run_id)
    if run is None or (run.epoch, run.token) != (write.lease.epoch, write.lease.token):
        return LeaseLost(write.run_id, write.lease.epoch)
    if write.status != "suspended" and run.parent_id is not None and run.parent_id not in locked:
        return SEND_AGAIN  # its parent was set just now, and locking that after the others could be a deadlock
    return []


async def _find_awaited(db: Session, writes: Sequence[Write]) -> dict[str, Reply[list[Signal]]]:
    """By run, the awaited inbox rows that have arrived. A run that has any does not go to sleep."""
    waiting = {write.run_id: write.waiting_for for write in writes if write.waiting_for}
    arrived = await inbox.read_all(db, list(waiting)) if waiting else {}
    return {run_id: [row for row in rows if row.address in waiting[run_id]] for run_id, rows in arrived.items()}


def _suspend(db: Session, run: _ClosingRun, write: Write) -> list[Statement]:
    at = run.at if write.now is None else write.now
    run.status, run.waiting_for = "suspended", tuple(write.waiting_for)
    run.wake_at = inbox.wake_time(write.wake_at, at) if run.cancel_requested else write.wake_at
    return [db.statement(_SUSPEND, run.id, run.wake_at, awaited_text(write.waiting_for), at)]


def _end(db: Session, run: _ClosingRun, write: Write, runs: dict[str, _ClosingRun]) -> list[Statement]:
    at = run.at if write.now is None else write.now
    run.status, run.wake_at = write.status or "", None
    is_notified = run.parent_notified or (run.parent_id is not None and run.parent_key is not None)
    ended = db.statement(_END, run.id, run.status, write.outcome, at, is_notified)
    return [ended, *_notify_parent(db, run, write.outcome or b"", at, runs)]


def _notify_parent(db: Session, child: _ClosingRun, outcome: bytes, at: int, runs: dict[str, _ClosingRun]) -> list[Statement]:
    parent = None if child.parent_id is None or child.parent_key is None else runs.get(child.parent_id)
    if parent is None or child.parent_key is None or parent.status in ENDED:
        return []
    address = Awaited("child", child.parent_key)
    parent.inbox_seq += 1
    if parent.status == "suspended" and address in parent.waiting_for:
        parent.wake_at = inbox.wake_time(parent.wake_at, at)
    put = inbox.put(db, parent.id, parent.inbox_seq, address, outcome, None, identity(child.parent_key, None))
    return [put, inbox.update_run(db, parent.id, parent.inbox_seq, parent.wake_at)]


async def close_once(db: Session, writes: Sequence[Write], *, is_repeated: bool) -> list[Reply[list[Signal]]]:
    """As `close_all`. When it is repeated, a run that the lost attempt closed counts as closed by it."""
    replies = await close_all(db, writes)
    if not is_repeated:
        return replies
    return [
        [] if isinstance(reply, LeaseLost) and await was_closed(db, write) else reply
        for write, reply in zip(writes, replies, strict=True)
    ]


async def was_closed(db: Session, write: Write) -> bool:
    """Whether this write, whose reply was lost, has ended the lease: nothing else can under its epoch."""
    row = await db.one(_WAS_CLOSED, write.run_id)
    if row is None or int(row[0]) != write.lease.epoch or row[1] is not None:
        return False
    values = db.tables.values
    outcome = None if row[3] is None else values.payload_from(row[3])
    return values.name_from(row[2]) == write.status and write.outcome in (None, outcome)


async def continue_as(db: Session, lease: Lease, new: NewInput, now: int | None) -> None:
    """Let the run start over with this input, unless this very call has done that before and its reply was lost."""
    row = await db.one(_LOCK_HELD, lease.run_id)
    values = db.tables.values
    if row is not None and values.payload_from(row[2]) == new.seed:
        return
    if row is None or int(row[0]) != lease.epoch or row[1] is None or values.name_from(row[1]) != lease.token:
        raise LeaseLost(lease.run_id, lease.epoch)
    at = int(row[4]) if now is None else now
    columns = new.input, new.input_hash, new.seed, new.definition_hash, new.deadline, at
    await db.send([
        db.statement(_CONTINUE, lease.run_id, *columns),
        db.statement(_EMPTY_JOURNAL, lease.run_id),
        db.statement(_DROP_CONSUMED, lease.run_id, int(row[3])),
    ])  # fmt: skip
