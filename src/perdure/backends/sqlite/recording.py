"""What the holder of a lease writes. Each function looks at the fence before it writes anything."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from perdure.backends.sqlite import inbox
from perdure.backends.sqlite.link import Fence, Link
from perdure.backends.sqlite.rows import ENTRY_COLUMNS, awaited_text, clock, entries_from, entry_values
from perdure.backends.sqlite.schema import Session, Tables
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Awaited, EndStatus, Item, Lease, Pulse, Signal

_FENCE: Final = """
    SELECT epoch, lease_token, cancel_requested, parent_id, parent_key,
        (SELECT max(seq) FROM $signals WHERE namespace = ?1 AND run_id = ?2)
    FROM $runs WHERE namespace = ?1 AND id = ?2
"""
_ENTRY_AT: Final = f"SELECT {ENTRY_COLUMNS} FROM $steps WHERE namespace = ?1 AND run_id = ?2 AND seq = ?3"
_ITEM_AT: Final = "SELECT payload FROM $items WHERE namespace = ?1 AND run_id = ?2 AND stream = ?3 AND n = ?4"
_SIGNAL_AT: Final = "SELECT 1 FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND seq = ?3"
_LAST_SEQ: Final = "SELECT max(seq) FROM $steps WHERE namespace = ?1 AND run_id = ?2"
_APPEND: Final = f"INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_APPEND_MISSING: Final = f"{_APPEND} ON CONFLICT DO NOTHING"
_CONSUME: Final = """
    UPDATE $signals SET consumed_by = ?4 WHERE namespace = ?1 AND run_id = ?2 AND seq = ?3 AND consumed_by IS NULL
"""
_ADD_ITEM: Final = """
    INSERT INTO $items (namespace, run_id, stream, n, payload) VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT DO NOTHING
"""
_SUSPEND: Final = """
    UPDATE $runs SET status = 'suspended', wake_at = ?3, waiting_for = ?4, updated_at = ?5, attempts = 0,
        lease_token = NULL, lease_owner = NULL, lease_until = NULL
    WHERE namespace = ?1 AND id = ?2
"""
_FINISH: Final = """
    UPDATE $runs SET status = ?3, outcome = ?4, updated_at = ?5, wake_at = NULL, waiting_for = '[]',
        lease_token = NULL, lease_owner = NULL, lease_until = NULL
    WHERE namespace = ?1 AND id = ?2
"""
_PARENT_NOTIFIED: Final = "UPDATE $runs SET parent_notified = 1 WHERE namespace = ?1 AND id = ?2"
_REPORT: Final = "UPDATE $runs SET progress = ?3 WHERE namespace = ?1 AND id = ?2"


def fence(db: Session, lease: Lease) -> Fence:
    """Let the holder of the run's current lease pass. Raises `LeaseLost`."""
    of = db.tables.stem, db.namespace, lease.run_id, lease.epoch
    known = db.link.fences.get(lease.token)
    if known is not None and known.of == of:
        return known
    row = db.one(_FENCE, lease.run_id)
    if row is None or row[0] != lease.epoch or row[1] != lease.token:
        raise LeaseLost(lease.run_id, lease.epoch)
    known = db.link.fences[lease.token] = Fence(of, Pulse(row[5] or 0, bool(row[2])), row[3], row[4])
    return known


class Record(msgspec.Struct, frozen=True, gc=False):
    """`record` and nothing else, as it is handed over for every step: a closure would be six objects more to each."""

    tables: Tables
    namespace: str
    lease: Lease
    entries: Sequence[Entry]
    consume: Sequence[int]
    items: Sequence[Item]

    def __call__(self, link: Link) -> Pulse:
        """Write it, and give what the holder is told."""
        db = Session(link, self.tables, self.namespace)
        return record(db, self.lease, self.entries, self.consume, self.items).pulse


def record(db: Session, lease: Lease, entries: Sequence[Entry], consume: Sequence[int] = (), items: Sequence[Item] = ()) -> Fence:
    """Append entries and items and consume signals. What is there already, and the same, is a lost reply."""
    state = fence(db, lease)
    if items:
        _refuse_overwriting_items(db, lease, items)
    if consume:
        _refuse_missing(db, lease, consume)
    if entries and not _are_new(db, lease.run_id, entries):
        _refuse_overwriting(db, lease, entries)
        append(db, lease.run_id, entries)
    for seq in consume:
        db.run(_CONSUME, lease.run_id, seq, str(lease.epoch))
    for item in items:
        db.run(_ADD_ITEM, lease.run_id, item.stream, item.n, item.payload)
    return state


def _are_new(db: Session, run_id: str, entries: Sequence[Entry]) -> bool:
    """Whether nothing is recorded under their seqs, which is found out by writing them; False when that is not known."""
    if db.link.defers:
        for entry in entries:
            db.run_later_with(_APPEND, entry_values(db.namespace, run_id, entry))
        return True
    if len(entries) > 1:
        return False
    try:
        db.run_with(_APPEND, entry_values(db.namespace, run_id, entries[0]))
    except sqlite3.IntegrityError:
        return False
    return True


def _refuse_overwriting(db: Session, lease: Lease, entries: Sequence[Entry]) -> None:
    last = db.one(_LAST_SEQ, lease.run_id)
    last_seq = 0 if last is None else last[0] or 0
    said: dict[int, Entry] = {}
    for entry in entries:
        there = entries_from(db.all(_ENTRY_AT, lease.run_id, entry.seq)) if entry.seq <= last_seq else []
        if said.setdefault(entry.seq, there[0] if there else entry) != entry:
            raise _refusal(lease, f"something else is recorded under seq {entry.seq} already")


def _refuse_overwriting_items(db: Session, lease: Lease, items: Sequence[Item]) -> None:
    said: dict[tuple[str, int], bytes] = {}
    for item in items:
        there = db.one(_ITEM_AT, lease.run_id, item.stream, item.n)
        if said.setdefault((item.stream, item.n), item.payload if there is None else there[0]) != item.payload:
            raise _refusal(lease, f"stream {item.stream!r} has another item {item.n} already")


def _refuse_missing(db: Session, lease: Lease, consume: Sequence[int]) -> None:
    for seq in consume:
        if db.one(_SIGNAL_AT, lease.run_id, seq) is None:
            raise _refusal(lease, f"its inbox has no row {seq} to consume")


def _refusal(lease: Lease, reason: str) -> PersistenceError:
    return PersistenceError(f"run {lease.run_id!r}", f"{reason}; nothing was written")


def append(db: Session, run_id: str, entries: Sequence[Entry]) -> None:
    """Insert the entries; one whose seq is taken is left out."""
    db.run_each(_APPEND_MISSING, [entry_values(db.namespace, run_id, entry) for entry in entries])


def suspend(
    db: Session,
    lease: Lease,
    wake_at: int | None,
    waiting_for: Collection[Awaited],
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> list[Signal]:
    """Record, then give up the lease unless something awaited is there, which is returned."""
    state = record(db, lease, entries, consume)
    there = inbox.waiting(db, lease.run_id, waiting_for)
    if there:
        return there
    at = clock(now)
    if state.pulse.cancel_requested:
        wake_at = at if wake_at is None else min(wake_at, at)
    db.run(_SUSPEND, lease.run_id, wake_at, awaited_text(waiting_for), at)
    return []


def finish(
    db: Session,
    lease: Lease,
    status: EndStatus,
    outcome: bytes,
    entries: Sequence[Entry],
    consume: Sequence[int],
    now: int | None,
) -> None:
    """Record, end the run and tell its parent."""
    state = record(db, lease, entries, consume)
    at = clock(now)
    db.run_later(_FINISH, lease.run_id, status, bytearray(outcome), at)
    del db.link.fences[lease.token]
    if state.parent_id is not None and state.parent_key is not None:
        inbox.tell_parent(db, state.parent_id, state.parent_key, outcome, at)
        db.link.fences.clear()  # the parent's inbox has grown, and its holder is to be told
        db.run(_PARENT_NOTIFIED, lease.run_id)


def report(db: Session, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress."""
    fence(db, lease)
    db.run(_REPORT, lease.run_id, progress)
