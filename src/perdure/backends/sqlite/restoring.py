"""Putting a whole run in place of what is there."""

from __future__ import annotations

from perdure.backends.base.new_runs import restored_row
from perdure.backends.base.process_owner import Owners
from perdure.backends.sqlite import runs
from perdure.backends.sqlite.claims import refuse_live
from perdure.backends.sqlite.rows import clock
from perdure.backends.sqlite.schema import Session
from perdure.model.journal import Entry
from perdure.model.records import RunRow, Signal


def restore(db: Session, run: RunRow, entries: list[Entry], rows: list[Signal], owners: Owners, now: int | None) -> None:
    """Write this run, unless somebody drives the one that is there."""
    at = clock(now)
    found = runs.get(db, run.id)
    if found is not None:
        refuse_live(found, owners, at)
        runs.delete(db, run.id)
    runs.insert(db, restored_row(run, rows, found, at), None, runs.Begun(entries, rows))
