"""The inbox: signals and children's outcomes, and whom they wake."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from perdure.backends.sqlite.rows import SIGNAL_COLUMNS, awaited_from, clock, signal_from
from perdure.backends.sqlite.schema import Session
from perdure.errors import RunFinished, RunNotFound
from perdure.model.records import ENDED, Awaited, Signal

_TARGET: Final = "SELECT status, waiting_for FROM $runs WHERE namespace = ?1 AND id = ?2"
_REPEATED: Final = """
    SELECT seq FROM $signals WHERE namespace = ?1 AND run_id = ?2 AND name = ?3 AND dedupe = ?4
"""
_PUT: Final = """
    INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, dedupe)
    SELECT ?1, ?2, coalesce(max(seq), 0) + 1, ?3, ?4, ?5, ?6 FROM $signals WHERE namespace = ?1 AND run_id = ?2
    RETURNING seq
"""
_INSERT: Final = f"INSERT INTO $signals (namespace, run_id, {SIGNAL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_WAKE: Final = "UPDATE $runs SET wake_at = min(coalesce(wake_at, ?3), ?3) WHERE namespace = ?1 AND id = ?2"
_WAITING: Final = f"""
    SELECT {SIGNAL_COLUMNS} FROM $signals INDEXED BY $signals_waiting
    WHERE namespace = ?1 AND run_id = ?2 AND kind = ?3 AND name = ?4 AND consumed_by IS NULL ORDER BY seq
"""
_UNCONSUMED: Final = f"""
    SELECT {SIGNAL_COLUMNS} FROM $signals INDEXED BY $signals_waiting
    WHERE namespace = ?1 AND run_id = ?2 AND consumed_by IS NULL AND seq > ?3 ORDER BY seq
"""
_LAST_SEQ: Final = "SELECT max(seq) FROM $signals WHERE namespace = ?1 AND run_id = ?2"


def signal(db: Session, run_id: str, name: str, payload: bytes, dedupe: str | None, now: int | None) -> int:
    """Put a signal into the inbox and give its seq; a repeated `dedupe` gives the first one's."""
    target = db.one(_TARGET, run_id)
    if target is None:
        raise RunNotFound(run_id)
    if dedupe is not None:
        first = db.one(_REPEATED, run_id, name, dedupe)
        if first is not None:
            return int(first[0])
    status, waiting_for = target
    if status in ENDED:
        raise RunFinished(run_id, status)
    return _deliver(db, run_id, Awaited("signal", name), payload, dedupe, status, waiting_for, clock(now))


def tell_parent(db: Session, parent_id: str, parent_key: str, outcome: bytes, at: int) -> None:
    """Put a child's outcome into its parent's inbox, unless the parent takes nothing more."""
    target = db.one(_TARGET, parent_id)
    if target is not None and target[0] not in ENDED:
        _deliver(db, parent_id, Awaited("child", parent_key), outcome, None, target[0], target[1], at)


def _deliver(
    db: Session, run_id: str, address: Awaited, payload: bytes, dedupe: str | None, status: str, waiting_for: str, at: int
) -> int:
    put = db.one(_PUT, run_id, address.kind, address.name, payload, dedupe)
    if status == "suspended" and address in awaited_from(waiting_for):
        db.run(_WAKE, run_id, at)
    return int(put[0]) if put is not None else 0


def insert(db: Session, run_id: str, rows: Iterable[Signal]) -> None:
    """Write rows as they are into an inbox that is empty."""
    values = [(row.seq, row.kind, row.name, row.payload, row.dedupe, row.consumed_by) for row in rows]
    db.run_each(_INSERT, [(db.namespace, run_id, *columns) for columns in values])


def waiting(db: Session, run_id: str, addresses: Collection[Awaited]) -> list[Signal]:
    """The unconsumed rows with one of these addresses, in order of arrival."""
    found = [values for address in set(addresses) for values in db.all(_WAITING, run_id, address.kind, address.name)]
    return [signal_from(values) for values in sorted(found, key=lambda values: int(values[0]))]


def unconsumed(db: Session, run_id: str, after: int = 0) -> list[Signal]:
    """The unconsumed rows with a seq above `after`, in order of arrival."""
    return [signal_from(values) for values in db.all(_UNCONSUMED, run_id, after)]


def last_seq(db: Session, run_id: str) -> int:
    """The highest seq, consumed or not."""
    row = db.one(_LAST_SEQ, run_id)
    return int(row[0]) if row is not None and row[0] is not None else 0
