"""Creating runs, with SQL of its own as in `recording`: a short run is mostly its creation and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perdure.backends.base.leases import new_token, store_time
from perdure.backends.sql import runs
from perdure.backends.sql.rows import RUN_COLUMNS, RUN_FIELDS, run_values
from perdure.backends.sqlite.session import SqliteSession, run_verb
from perdure.backends.sqlite.writer_connection import Fence
from perdure.errors import RunNotFound
from perdure.model.journal import Entry
from perdure.model.process_owner import Owners
from perdure.model.records import Claim, Created, NewRun, Pulse, Signal

# The run with its lease, unless it exists or its queue has limits. For a limited queue the last column is NULL, which is not
# allowed there and ignored: an INSERT from a SELECT with this condition takes a fifth longer.
_INSERT_LEASED: Final = f"""
    INSERT OR IGNORE INTO $runs (namespace, {RUN_COLUMNS}, lease_token, journal_length, inbox_seq) VALUES (
        ?1, {", ".join(f"?{number}" for number in range(2, len(RUN_FIELDS) + 4))},
        CASE WHEN EXISTS (SELECT 1 FROM $queues WHERE namespace = ?1 AND queue = ?{len(RUN_FIELDS) + 4}) THEN NULL
            ELSE ?{len(RUN_FIELDS) + 5} END
    )
"""


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
    """The run that is there with the same workflow and input, or a new one, leased for `length` microseconds if that is given.

    In a queue that has limits it is not leased.
    """
    creation = runs.RunCreation(new, length, new_token(), owners.here, entries, inbox, created_at, store_time(now))
    created = _insert(db, creation)
    if created is None:
        found = _find(db, creation)
        if found is not None:
            return found
        created = _insert(db, creation.without_lease())  # its queue has limits
    if created is None:
        raise RunNotFound(new.id)  # cannot be: nothing removes it in this transaction
    if entries or inbox:
        run_verb(db.send(runs.insert_parts(db, new.id, entries, inbox)))
    if created.claim is not None:
        _remember(db, created.claim)
    return created


def _insert(db: SqliteSession, creation: runs.RunCreation) -> Created | None:
    """None when nothing was inserted."""
    created = creation.result_at(creation.now or 0)
    journal_length, inbox_seq = runs.last_seq(creation.entries), runs.last_seq(creation.inbox)
    values = (db.namespace, *run_values(created.run, bytearray))
    if creation.length is None:
        template, values = runs.INSERT, (*values, None, journal_length, inbox_seq)
    else:
        template = _INSERT_LEASED
        values = (*values, creation.token, journal_length, db.namespace, creation.run.queue, inbox_seq)
    return created if db.channel.execute(db.tables.filled[template], values).rowcount else None


def _find(db: SqliteSession, creation: runs.RunCreation) -> Created | None:
    found = run_verb(runs.find(db, creation))
    db.channel.fences.clear()  # with its input the run may have got a parent, which the fence of its holder has to know
    return found


def _remember(db: SqliteSession, claim: Claim) -> None:
    """Keep the fence of a lease that was just made."""
    run, lease = claim.run, claim.lease
    of = db.tables.stem, db.namespace, lease.run_id, lease.epoch
    db.channel.fences[lease.token] = Fence(of, Pulse(claim.inbox_seq, run.cancel_requested), run.parent_id, run.parent_key)
