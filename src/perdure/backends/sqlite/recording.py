"""What the holder of a lease writes. Each function checks the lease before it writes anything.

These verbs and `creating` have SQL of their own: every step passes here, and as verbs of the SQL core they would cost twice the
CPU time. What is not as it nearly always is (something is recorded already) goes to the core.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from perdure.backends.base.duplicate_records import check_consumed
from perdure.backends.base.leases import store_time
from perdure.backends.sql import inbox
from perdure.backends.sql.recording import Write, write_all
from perdure.backends.sql.rows import (
    ENTRY_COLUMNS,
    NO_LEASE_SQL,
    NO_PROBLEM_SQL,
    SIGNAL_COLUMNS,
    awaited_text,
    entry_values,
    signal_from,
)
from perdure.backends.sqlite.session import SqliteSession, SqliteTables, run_verb
from perdure.backends.sqlite.writer_connection import Fence, WriterConnection
from perdure.errors import LeaseLost
from perdure.model.journal import Entry
from perdure.model.records import Awaited, EndStatus, Item, Lease, Pulse, Signal

# The values of these are in the order of their placeholders.
_FENCE: Final = """
    SELECT epoch, lease_token, inbox_seq, cancel_requested, parent_id, parent_key FROM $runs WHERE namespace = ? AND id = ?
"""
_SIGNAL_AT: Final = "SELECT seq FROM $signals WHERE namespace = ? AND run_id = ? AND seq = ?"
_WAITING: Final = f"""
    SELECT {SIGNAL_COLUMNS} FROM $signals INDEXED BY $signals_waiting
    WHERE namespace = ? AND run_id = ? AND kind = ? AND name = ? AND consumed_by IS NULL
"""
_APPEND: Final = f"INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ADD_ITEM: Final = "INSERT INTO $items (namespace, run_id, stream, n, payload) VALUES (?, ?, ?, ?, ?)"
_CONSUME: Final = "UPDATE $signals SET consumed_by = ? WHERE namespace = ? AND run_id = ? AND seq = ? AND consumed_by IS NULL"
_SUSPEND: Final = f"""
    UPDATE $runs SET status = 'suspended', wake_at = ?, waiting_for = ?, updated_at = ?, attempts = 0,
        {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
    WHERE namespace = ? AND id = ?
"""
_FINISH: Final = f"""
    UPDATE $runs SET status = ?, outcome = ?, updated_at = ?, parent_notified = max(parent_notified, ?), wake_at = NULL,
        waiting_for = '[]', {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
    WHERE namespace = ? AND id = ?
"""


def fence(db: SqliteSession, lease: Lease) -> Fence:
    """Let the holder of the run's current lease pass. Raises `LeaseLost`."""
    of = db.tables.stem, db.namespace, lease.run_id, lease.epoch
    known = db.channel.fences.get(lease.token)
    if known is not None and known.of == of:
        return known
    rows = db.fetch(_FENCE, lease.run_id)
    if not rows or rows[0][0] != lease.epoch or rows[0][1] != lease.token:
        raise LeaseLost(lease.run_id, lease.epoch)
    _, _, inbox_seq, cancel_requested, parent_id, parent_key = rows[0]
    known = db.channel.fences[lease.token] = Fence(of, Pulse(inbox_seq, bool(cancel_requested)), parent_id, parent_key)
    return known


class Record(msgspec.Struct, frozen=True, gc=False):
    """The verb `record` with its arguments, as it is handed over for every step: a closure would be six objects more."""

    tables: SqliteTables
    namespace: str
    lease: Lease
    entries: Sequence[Entry]
    consume: Sequence[int]
    items: Sequence[Item]

    def __call__(self, connection: WriterConnection) -> Pulse:
        """Write it, and give the holder's pulse."""
        db = SqliteSession(connection, self.tables, self.namespace)
        return record(db, self.lease, self.entries, self.consume, self.items).pulse


def record(
    db: SqliteSession, lease: Lease, entries: Sequence[Entry], consume: Sequence[int] = (), items: Sequence[Item] = ()
) -> Fence:
    """Append entries and items and consume inbox rows. What is recorded already, and equal, is a lost reply."""
    state = fence(db, lease)
    connection, run_id = db.channel, lease.run_id
    if not connection.defers:
        if entries or consume or items:
            _record_missing(db, lease, entries, consume, items)
        return state
    # That nothing is recorded under these numbers is found out by writing. Otherwise the batch fails, and runs again undeferred.
    if consume:
        check_consumed(run_id, {seq for wanted in consume for (seq,) in db.fetch(_SIGNAL_AT, run_id, wanted)}, consume)
    filled = db.tables.filled
    for entry in entries:
        connection.execute_later(filled[_APPEND], (db.namespace, run_id, *entry_values(entry, bytearray)))
    for item in items:
        connection.execute_later(filled[_ADD_ITEM], (db.namespace, run_id, item.stream, item.n, bytearray(item.payload)))
    for seq in consume:
        connection.execute_later(filled[_CONSUME], (lease.token, db.namespace, run_id, seq))
    return state


def _record_missing(
    db: SqliteSession, lease: Lease, entries: Sequence[Entry], consume: Sequence[int], items: Sequence[Item]
) -> None:
    """Write what is not there yet. Raises `PersistenceError`, before anything is written, when something else is there."""
    for refusal in run_verb(write_all(db, [Write.record(lease, entries, consume, items)])).values():
        raise refusal


def suspend(
    db: SqliteSession,
    lease: Lease,
    wake_at: int | None,
    waiting_for: Collection[Awaited],
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> list[Signal]:
    """Record, then give up the lease, unless something awaited has arrived: then the run goes on with that."""
    state = record(db, lease, entries, consume)
    arrived = [row for address in waiting_for for row in db.fetch(_WAITING, lease.run_id, address.kind, address.name)]
    if arrived:
        return [signal_from(row, db.tables.values) for row in sorted(arrived)]
    at = store_time(now)
    if state.pulse.cancel_requested:
        wake_at = inbox.wake_time(wake_at, at)
    values = (wake_at, awaited_text(waiting_for), at, db.namespace, lease.run_id)
    db.channel.execute(db.tables.filled[_SUSPEND], values)
    return []


def finish(
    db: SqliteSession,
    lease: Lease,
    status: EndStatus,
    outcome: bytes,
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> None:
    """Record, end the run and notify its parent."""
    state = record(db, lease, entries, consume)
    at = store_time(now)
    has_parent = state.parent_id is not None and state.parent_key is not None
    values = (status, bytearray(outcome), at, 1 if has_parent else 0, db.namespace, lease.run_id)
    db.channel.execute_later(db.tables.filled[_FINISH], values)
    del db.channel.fences[lease.token]
    if state.parent_id is not None and state.parent_key is not None:
        run_verb(inbox.notify_parent(db, state.parent_id, state.parent_key, outcome, at))
        db.channel.fences.clear()  # the parent's inbox has grown, which its holder's next pulse has to say
