"""New and restored runs: the rows that `create` and `restore` write, the same for every store.

A store reads the existing row, and writes the row that these functions make of it, in one transition. They raise before anything
is written. Leases are not decided here: those differ from store to store.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

import msgspec

from perdure.errors import RunConflict
from perdure.model.id_checks import check_names
from perdure.model.ids import check_id, check_text
from perdure.model.journal import Entry
from perdure.model.records import NO_PROBLEM, NewRun, RunRow, Signal


def new_row(new: NewRun, now: int, created_at: int | None = None) -> RunRow:
    """A new run's row, pending and due at its start."""
    wake_at = now if new.start_at is None else new.start_at
    created = now if created_at is None else created_at
    return RunRow(**msgspec.structs.asdict(new), status="pending", wake_at=wake_at, created_at=created, updated_at=now)


def check_start(new: NewRun) -> NewRun:
    """The run, if its names are text and it has an input hash. Raises `TypeError` or `ValueError` otherwise."""
    if not new.input_hash:
        raise ValueError(f"run {new.id!r} has an empty input_hash, which only a run restored without its input may have")
    return check_names(new)


def row_after_create(existing: RunRow, new: NewRun, now: int) -> RunRow:
    """The existing row after a `create` of `new`: unchanged, unless it waits for its input.

    Raises `RunConflict` when it is another run.
    """
    if existing.workflow != new.workflow and not (existing.lacks_input and existing.workflow == ""):
        raise RunConflict(new.id, f"another workflow ({existing.workflow!r})")
    if existing.lacks_input:
        return _with_input(existing, new, now)
    if existing.original_input_hash != new.original_input_hash:
        raise RunConflict(new.id, "another input")
    return existing


def _with_input(found: RunRow, new: NewRun, now: int) -> RunRow:
    has_parent = found.parent_id is not None
    is_due = found.cancel_requested or new.start_at is None
    return msgspec.structs.replace(
        found,
        workflow=new.workflow,
        version=found.version or new.version,
        input=new.input,
        input_hash=new.input_hash,
        first_input_hash=new.first_input_hash,
        definition_hash=new.definition_hash,
        queue=new.queue,
        priority=new.priority,
        limit_key=new.limit_key,
        start_at=new.start_at,
        deadline=new.deadline,
        parent_id=found.parent_id if has_parent else new.parent_id,
        parent_key=found.parent_key if has_parent else new.parent_key,
        wake_at=None if found.ended else now if is_due else new.start_at,
        updated_at=now,
    )


def row_after_restore(run: RunRow, inbox: Iterable[Signal], found: RunRow | None, now: int) -> RunRow:
    """The row that `restore` writes for `run` with this inbox, in place of `found`."""
    is_pending = not run.ended and (run.status == "running" or run.lacks_input)
    status = "pending" if is_pending else run.status
    row = msgspec.structs.replace(
        run,
        status=status,
        waiting_for=run.waiting_for if status == "suspended" else (),
        epoch=max((0 if found is None else found.epoch) + 1, now),
        lease_owner=None,
        lease_until=None,
        running_steps=None,
        attempts=0,
        held=run.held if found is None else found.held,
        updated_at=now,
        **({} if status == "pending" and not run.lacks_input else NO_PROBLEM),
    )
    return msgspec.structs.replace(row, wake_at=_wake_at(row, inbox, now))


def _wake_at(row: RunRow, inbox: Iterable[Signal], now: int) -> int | None:
    if row.ended or row.lacks_input:
        return None
    if row.cancel_requested or any(signal.address in row.waiting_for for signal in inbox):
        return now if row.wake_at is None else min(row.wake_at, now)
    return now if row.status == "pending" and row.wake_at is None else row.wake_at


def check_journal(entries: Iterable[Entry]) -> list[Entry]:
    """The entries by seq. Raises `ValueError` unless every seq is above zero and unique, `TypeError` for a key that is no str."""
    journal = sorted(entries, key=attrgetter("seq"))
    if journal:
        _check_seqs([entry.seq for entry in journal], "journal")
        for entry in journal:
            check_text(entry.key, "a key")  # that of a drop entry is empty
    return journal


def check_inbox(rows: Iterable[Signal]) -> list[Signal]:
    """The rows by seq. Raises `ValueError` for a bad seq, a consumed row or a repeated signal."""
    inbox = sorted(rows, key=attrgetter("seq"))
    if not inbox:
        return inbox
    _check_seqs([row.seq for row in inbox], "inbox")
    for row in inbox:
        check_id(row.name, "a signal's name")
        if row.dedupe is not None:
            check_id(row.dedupe, "a signal's dedupe")
        if row.consumed_by is not None:
            raise ValueError(f"inbox row {row.seq} was consumed; leave it out, its outcome is in the journal")
        if row.kind == "child" and row.dedupe is not None:
            raise ValueError(f"inbox row {row.seq} is a child's outcome and has a dedupe, which only signals have")
    repeated = _first_repeated((row.name, row.dedupe) for row in inbox if row.dedupe is not None)
    if repeated is not None:
        raise ValueError(f"two inbox rows have the name and dedupe {repeated!r}; a signal that was repeated is one row")
    return inbox


def _check_seqs(seqs: Sequence[int], what: str) -> None:
    if seqs[0] < 1:
        raise ValueError(f"seq {seqs[0]} is in the {what}, but they count from 1")
    repeated = _first_repeated(seqs)
    if repeated is not None:
        raise ValueError(f"seq {repeated} is twice in the {what}")


def _first_repeated(values: Iterable[Hashable]) -> Hashable | None:
    """The first value that comes a second time, or None."""
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
