"""Putting a whole run in place of what is there."""

from __future__ import annotations

from perdure.journal import Entry
from perdure.records import RunRow, Signal
from perdure.stores.beginning import restored_row
from perdure.stores.owner import Owners
from perdure.stores.sqlite_store import runs
from perdure.stores.sqlite_store.claims import refuse_live
from perdure.stores.sqlite_store.rows import clock
from perdure.stores.sqlite_store.schema import Session


def restore(db: Session, run: RunRow, entries: list[Entry], rows: list[Signal], owners: Owners, now: int | None) -> None:
    """Write this run, unless somebody drives the one that is there."""
    at = clock(now)
    found = runs.get(db, run.id)
    if found is not None:
        refuse_live(found, owners, at)
        runs.delete(db, run.id)
    runs.insert(db, restored_row(run, rows, found, at), None, runs.Begun(entries, rows))
