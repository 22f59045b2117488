"""Creating runs, with SQL of its own as in `recording`: a short run is mostly its creation and its end."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.backends.base.leases import new_token, store_time
from perdure.backends.base.process_owner import Owners
from perdure.backends.sql import runs
from perdure.backends.sql.rows import run_values
from perdure.backends.sqlite.session import SqliteSession, run_verb
from perdure.backends.sqlite.writer_connection import Fence
from perdure.errors import RunNotFound
from perdure.model.journal import Entry
from perdure.model.records import Claim, Created, NewRun, Pulse, Signal


def create(
    db: SqliteSession,
    new: NewRun,
    length: int | None,
    owners: Owners,
    now: int | None,
    entries: Sequence[Entry] = (),
    inbox: Sequence[Signal] = (),
    created_at: int | None = None,
) -> Created:
    """The run that is there with the same workflow and input, or a new one, leased for `length` microseconds if that is given."""
    at = store_time(now)
    creation = runs.RunCreation(new, length, new_token(), owners.here, entries, inbox, created_at, at)
    created = creation.result_at(at)
    token = None if length is None else creation.token
    values = (*run_values(created.run, bytearray), token, runs.last_seq(entries), runs.last_seq(inbox))
    if not db.channel.execute(db.tables.filled[runs.INSERT], (db.namespace, *values)).rowcount:
        return _find(db, creation)
    if entries or inbox:
        run_verb(db.send(runs.insert_parts(db, new.id, entries, inbox)))
    if created.claim is not None:
        _remember(db, created.claim)
    return created


def _find(db: SqliteSession, creation: runs.RunCreation) -> Created:
    found = run_verb(runs.find(db, creation))
    db.channel.fences.clear()  # with its input the run may have got a parent, which the fence of its holder has to know
    if found is None:
        raise RunNotFound(creation.run.id)  # cannot be: nothing removes it in this transaction
    return found


def _remember(db: SqliteSession, claim: Claim) -> None:
    """Keep the fence of a lease that was just made."""
    run, lease = claim.run, claim.lease
    of = db.tables.stem, db.namespace, lease.run_id, lease.epoch
    db.channel.fences[lease.token] = Fence(of, Pulse(claim.inbox_seq, run.cancel_requested), run.parent_id, run.parent_key)
