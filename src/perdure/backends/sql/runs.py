"""Runs as a whole: create, restore, read, delete, purge, reopen, cancel, hold."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from perdure.backends.base.batching import SEND_AGAIN, Reply
from perdure.backends.base.damaged_runs import FETCH_FAILURES, raise_damage
from perdure.backends.base.leases import refuse_leased
from perdure.backends.base.new_runs import new_row, row_after_create, row_after_restore
from perdure.backends.sql import inbox, listing
from perdure.backends.sql.dialect import Statement
from perdure.backends.sql.inbox import wake_time
from perdure.backends.sql.recording import append
from perdure.backends.sql.rows import NO_PROBLEM_SQL, RUN_COLUMNS, RUN_FIELDS, assignments, lease_of, run_from, run_values
from perdure.backends.sql.session import Parameters, Session, SqlConnections
from perdure.errors import LeaseHeld, PerdureError, RunFinished, RunNotFound
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import END_STATUSES, Claim, Created, EndStatus, NewRun, RunRow, Signal
from perdure.model.run_filter import RunFilter

_TIME: Final = "SELECT $clock"
# The time, and each of these queues that has limits; one row with NULL when none has.
_TIME_AND_LIMITED: Final = """
    SELECT $clock, limited.queue FROM (SELECT 1 AS one) AS always
    LEFT JOIN $queues AS limited ON limited.namespace = ?1 AND limited.queue IN ({})
"""
_GET: Final = f"SELECT {RUN_COLUMNS} FROM $runs WHERE namespace = ?1 AND id = ?2"
_GET_WITH_TOKEN: Final = f"SELECT {RUN_COLUMNS}, lease_token FROM $runs WHERE namespace = ?1 AND id = ?2"
_LOCK_FOR_CHANGE: Final = f"SELECT {RUN_COLUMNS}, $clock FROM $runs WHERE namespace = ?1 AND id = ?2 $for_change"
_LOCK_FOR_UPDATE: Final = f"SELECT {RUN_COLUMNS}, $clock FROM $runs WHERE namespace = ?1 AND id = ?2 $for_update"
_PLACES: Final = ", ".join(f"?{number}" for number in range(2, len(RUN_FIELDS) + 5))
# Its values are the namespace, those of `run_values`, the token of the lease, and the lengths of the journal and the inbox.
INSERT: Final = f"""
    $insert_new INTO $runs (namespace, {RUN_COLUMNS}, lease_token, journal_length, inbox_seq) VALUES (?1, {_PLACES}) $or_nothing
"""
_REPLACED_COLUMNS: Final = {
    name: f"?{number}" for number, name in enumerate([*RUN_FIELDS, "lease_token", "journal_length", "inbox_seq"], 2)
}
_REPLACE: Final = f"UPDATE $runs SET {assignments(_REPLACED_COLUMNS)} WHERE namespace = ?1 AND id = {_REPLACED_COLUMNS['id']}"
_INPUT_FIELDS: Final = (
    "workflow", "version", "input", "input_hash", "first_input_hash", "definition_hash", "queue", "priority", "limit_key",
    "start_at", "deadline", "parent_id", "parent_key", "wake_at", "updated_at",
)  # fmt: skip
_SET_INPUT: Final = f"""
    UPDATE $runs SET {assignments({name: f"?{number}" for number, name in enumerate(_INPUT_FIELDS, 3)})}
    WHERE namespace = ?1 AND id = ?2
"""
_LAST_SEQ: Final = "SELECT max(seq) FROM $steps WHERE namespace = ?1 AND run_id = ?2"
_REOPEN: Final = f"""
    UPDATE $runs SET status = 'pending', epoch = ?3, wake_at = ?4, updated_at = ?5, attempts = 0, cancel_requested = 0,
        outcome = NULL, waiting_for = '[]', parent_notified = 0, {NO_PROBLEM_SQL}
    WHERE namespace = ?1 AND id = ?2
"""
_CANCEL: Final = "UPDATE $runs SET cancel_requested = 1, wake_at = ?3 WHERE namespace = ?1 AND id = ?2"
_HOLD: Final = "UPDATE $runs SET held = 1 WHERE namespace = ?1 AND id = ?2"
_UNHOLD: Final = "UPDATE $runs SET held = 0, wake_at = ?3 WHERE namespace = ?1 AND id = ?2"


class RunCreation(NamedTuple):
    """A run to create, with its first journal and inbox. `length` is that of its lease in microseconds, None for no lease."""

    run: NewRun
    length: int | None = None
    token: str = ""
    owner: str = ""
    entries: Sequence[Entry] = ()
    inbox: Sequence[Signal] = ()
    created_at: int | None = None
    now: int | None = None

    @property
    def written_rows(self) -> list[Hashable]:
        """The run's row."""
        return [self.run.id]

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        return len(self.run.input) + sum(len(entry.payload) for entry in self.entries) + 500

    def without_lease(self) -> RunCreation:
        """The same in a queue that has limits: there a run is leased by `claim` and `acquire` alone."""
        return self._replace(length=None)

    def result_at(self, at: int) -> Created:
        """The reply when the run is created at this instant."""
        run = new_row(self.run, at, self.created_at)
        if self.length is None:
            return Created(run=run, is_new=True)
        until = at + self.length
        run = msgspec.structs.replace(
            run, status="running", wake_at=until, epoch=max(1, at), lease_owner=self.owner, lease_until=until, attempts=1
        )
        claim = Claim(
            lease=lease_of(run, self.token),
            run=run,
            journal=[*self.entries],
            inbox=[*self.inbox],
            inbox_seq=last_seq(self.inbox),
            item_counts={},
        )
        return Created(run=run, is_new=True, claim=claim)


def last_seq(rows: Sequence[Entry] | Sequence[Signal]) -> int:
    """The highest seq of rows that are in order."""
    return rows[-1].seq if rows else 0


async def time(db: Session, now: int | None) -> int:
    """The server's present instant, or the one a test gave."""
    if now is not None:
        return now
    row = await db.one(_TIME)
    return int(row[0]) if row is not None else 0


async def create_all(db: Session, creations: Sequence[RunCreation]) -> list[Created | None]:
    """The reply to each creation; None for a run that exists already. No two are for one run."""
    at, limited = await _read_time_and_limited(db, creations)
    creations = [creation.without_lease() if creation.run.queue in limited else creation for creation in creations]
    replies = {creation.run.id: creation.result_at(at if creation.now is None else creation.now) for creation in creations}
    in_order = sorted(creations, key=lambda creation: creation.run.id.encode())
    results = await db.send([_insert(db, creation, replies[creation.run.id].run) for creation in in_order])
    new = [creation for creation, result in zip(in_order, results, strict=True) if result.count]
    await db.send(
        [statement for creation in new for statement in insert_parts(db, creation.run.id, creation.entries, creation.inbox)]
    )
    new_ids = {creation.run.id for creation in new}
    return [replies[creation.run.id] if creation.run.id in new_ids else None for creation in creations]


async def _read_time_and_limited(db: Session, creations: Sequence[RunCreation]) -> tuple[int, set[str]]:
    """The time, and the queues that have limits among those in which a run is to be leased."""
    queues = sorted({creation.run.queue for creation in creations if creation.length is not None})
    if not queues:
        return await time(db, None) if any(creation.now is None for creation in creations) else 0, set()
    params = Parameters()
    rows = await db.all(_TIME_AND_LIMITED.format(params.many(queues)), *params.values)
    return int(rows[0][0]), {db.tables.values.name_from(queue) for _, queue in rows if queue is not None}


def _insert(db: Session, creation: RunCreation, run: RunRow) -> Statement:
    token = None if creation.length is None else creation.token
    return db.statement(INSERT, *run_values(run), token, last_seq(creation.entries), last_seq(creation.inbox))


def insert_parts(db: Session, run_id: str, entries: Sequence[Entry], rows: Sequence[Signal]) -> list[Statement]:
    """The statements that write the journal and the inbox of a run that has none."""
    return [*append(db, [(run_id, entry) for entry in entries]), *inbox.insert(db, run_id, rows)]


async def find_others(
    connections: SqlConnections, namespace: str, creations: Sequence[RunCreation], replies: Sequence[Reply[Created | None]]
) -> list[Reply[Created]]:
    """The replies, with the run that exists already for each None. One that was deleted meanwhile is sent again."""
    missing = [creation for creation, reply in zip(creations, replies, strict=True) if reply is None]
    found = iter(await asyncio.gather(*(_find(connections, namespace, creation) for creation in missing)))
    return [next(found) if reply is None else reply for reply in replies]


async def _find(connections: SqlConnections, namespace: str, creation: RunCreation) -> Reply[Created]:
    try:
        found = await connections.read(namespace, lambda db: _look_up(db, creation))
        if found is not None and found.run.lacks_input:
            found = await connections.perform(namespace, lambda db, _: find(db, creation), notify=True)
    except PerdureError as refusal:
        return refusal
    return SEND_AGAIN if found is None else found


async def find(db: Session, creation: RunCreation) -> Created | None:
    """The run that exists already; if it lacked its input it gets this one. None when it was deleted. Raises `RunConflict`."""
    found = await _look_up(db, creation)
    return await _set_input(db, creation) if found is not None and found.run.lacks_input else found


async def _look_up(db: Session, creation: RunCreation) -> Created | None:
    row = await db.one(_GET_WITH_TOKEN, creation.run.id)
    if row is None:
        return None
    found = run_from(row, db.tables.values)
    if creation.length is not None and row[-1] is not None and db.tables.values.name_from(row[-1]) == creation.token:
        return creation.result_at(found.updated_at)  # created by this request, whose reply was lost
    return Created(run=found if found.lacks_input else row_after_create(found, creation.run, 0), is_new=False)


async def _set_input(db: Session, creation: RunCreation) -> Created | None:
    found, at = await lock_run(db, creation.run.id, creation.now)
    if found is None:
        return None
    run = row_after_create(found, creation.run, at)
    if run is not found:
        await db.run(_SET_INPUT, run.id, *(getattr(run, name) for name in _INPUT_FIELDS))
    return Created(run=run, is_new=False)


async def get(db: Session, run_id: str) -> RunRow | None:
    """The run's row, or None. Raises `SnapshotCorrupt`."""
    with raise_damage(run_id, "the row", FETCH_FAILURES):
        row = await db.one(_GET, run_id)
    return None if row is None else run_from(row, db.tables.values)


async def lock_run(db: Session, run_id: str, now: int | None, template: str = _LOCK_FOR_UPDATE) -> tuple[RunRow | None, int]:
    """The run's row, locked until the transaction ends, and the time. The default lock keeps out writes of the lease holder."""
    row = await db.one(template, run_id)
    if row is None:
        return None, await time(db, now)
    return run_from(row, db.tables.values), int(row[-1]) if now is None else now


async def restore(db: Session, run: RunRow, entries: Sequence[Entry], rows: Sequence[Signal], now: int | None) -> bool:
    """Put this whole run in place of what is there. Raises `LeaseHeld` while that is being driven.

    False when another transaction has just inserted the run: nothing was written, and the caller tries again.
    """
    found, at = await lock_run(db, run.id, now)
    if found is not None:
        refuse_leased(found, at)
    values: list[Any] = [*run_values(row_after_restore(run, rows, found, at)), None, last_seq(entries), last_seq(rows)]
    if found is None:
        if not await db.run(INSERT, *values):
            return False
    else:
        # The row stays, so that a signal that waits for its lock finds it.
        await db.send([db.statement(_REPLACE, *values), *_delete_parts(db, [run.id])])
    await db.send(insert_parts(db, run.id, entries, rows))
    return True


async def reopen(db: Session, run_id: str, drop: Collection[str], now: int | None) -> None:
    """Make an ended run pending and due under a new epoch, with one drop entry more."""
    run, at = await lock_run(db, run_id, now)
    if run is None:
        raise RunNotFound(run_id)
    if run.status == "completed":
        raise RunFinished(run_id, run.status)
    if not run.ended:
        raise LeaseHeld.by_attempt(run_id, run.status)
    epoch = max(run.epoch + 1, at)
    last = await db.one(_LAST_SEQ, run_id)
    entry = drop_entry((0 if last is None or last[0] is None else int(last[0])) + 1, drop, at, epoch)
    reopening = db.statement(_REOPEN, run_id, epoch, None if run.lacks_input else at, at)
    await db.send([*append(db, [(run_id, entry)]), reopening])


async def cancel(db: Session, run_id: str, now: int | None) -> None:
    """Request that the run stops, and make it due unless it is being driven."""
    run, at = await lock_run(db, run_id, now, _LOCK_FOR_CHANGE)
    if run is None:
        raise RunNotFound(run_id)
    if run.ended:
        raise RunFinished(run_id, run.status)
    keeps_wake_at = run.status == "running" or run.lacks_input
    await db.run(_CANCEL, run_id, run.wake_at if keeps_wake_at else wake_time(run.wake_at, at))


async def hold(db: Session, run_id: str) -> None:
    """Put the run on hold."""
    if not await db.run(_HOLD, run_id):
        raise RunNotFound(run_id)


async def unhold(db: Session, run_id: str, now: int | None) -> None:
    """Take the run off hold; one that is pending with a problem is due at once."""
    run, at = await lock_run(db, run_id, now, _LOCK_FOR_CHANGE)
    if run is None:
        raise RunNotFound(run_id)
    has_problem = run.status == "pending" and run.problem is not None
    await db.run(_UNHOLD, run_id, wake_time(run.wake_at, at) if has_problem else run.wake_at)


async def delete(db: Session, run_id: str) -> None:
    """Remove the run and everything of it."""
    await lock_run(db, run_id, 0)  # first, so that the deletions see what the writer that held the lock has written
    await _delete(db, [run_id])


async def _delete(db: Session, run_ids: Sequence[str]) -> None:
    params = db.parameters()
    runs = f"DELETE FROM $runs WHERE namespace = ?1 AND {params.among('id', run_ids)}"
    await db.send([db.statement(runs, *params.values), *_delete_parts(db, run_ids)])


def _delete_parts(db: Session, run_ids: Sequence[str]) -> list[Statement]:
    params = db.parameters()
    of_runs = params.among("run_id", run_ids)
    return [
        db.statement(f"DELETE FROM {table} WHERE namespace = ?1 AND {of_runs}", *params.values)
        for table in ("$steps", "$signals", "$items")
    ]


async def purge(db: Session, age: int, status: Collection[EndStatus], workflow: str | None, limit: int, now: int | None) -> int:
    """Delete runs that ended `age` microseconds ago or earlier, oldest first."""
    if not status:
        return 0
    until = await time(db, now) - age
    old = await _oldest(db, until, status, workflow, max(limit, 0))
    if not old:
        return 0
    params = db.parameters()
    template = f"""
        SELECT id FROM $runs WHERE namespace = ?1 AND {params.among("id", old)} AND status IN ({params.many(sorted(status))})
            AND updated_at <= {params.one(until)}
        ORDER BY id $for_update $skip_locked
    """
    ids = [db.tables.values.name_from(row[0]) for row in await db.all(template, *params.values)]
    if ids:
        await _delete(db, ids)
    return len(ids)


# As a subquery that gives one value it is looked up by the primary key; PostgreSQL may read the whole table for an EXISTS.
_PARENT_STATUS: Final = "SELECT parent.status FROM $runs AS parent WHERE parent.namespace = ?1 AND parent.id = run.parent_id"
_ENDS: Final = ", ".join(f"'{status}'" for status in END_STATUSES)
_HAS_NO_LIVE_PARENT: Final = f"COALESCE(({_PARENT_STATUS}), 'dead') IN ({_ENDS})"


async def _oldest(db: Session, until: int, status: Collection[EndStatus], workflow: str | None, limit: int) -> list[str]:
    wanted = RunFilter(status=tuple(status), workflow=workflow)
    groups = await listing.run_groups(db, wanted)
    name, found = db.tables.values.name_from, list[tuple[int, str]]()
    for chunk in listing.group_chunks(groups, wanted):
        params = Parameters()
        last, most = params.one(until), params.one(limit)
        oldest = (
            f"""
            SELECT * FROM (
                SELECT id, updated_at FROM $runs AS run
                WHERE {listing.condition(params, wanted, group)} AND updated_at <= {last} AND {_HAS_NO_LIVE_PARENT}
                ORDER BY updated_at, id LIMIT {most}
            ) AS oldest_{number}"""
            for number, group in enumerate(chunk)
        )
        template = f"SELECT id, updated_at FROM ({' UNION ALL '.join(oldest)}) AS old ORDER BY updated_at, id LIMIT {most}"
        found += [(int(at), name(run_id)) for run_id, at in await db.all(template, *params.values)]
    return [run_id for _, run_id in sorted(found)[:limit]]
