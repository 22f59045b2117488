"""Runs as a whole: create, read, delete, reopen, restore, and what an operator asks of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from perdure.backends.base.new_runs import found_row, new_row, restored_row
from perdure.backends.postgres import inbox
from perdure.backends.postgres.rows import (
    ENDED_SQL,
    ENTRY_COLUMNS,
    ENTRY_TYPES,
    RUN_COLUMNS,
    RUN_FIELDS,
    columns,
    entry_values,
    lease_of,
    run_from,
    values_of,
)
from perdure.backends.postgres.schema import CLOCK, Session
from perdure.errors import LeaseHeld, RunFinished, RunNotFound
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import ENDED, Claim, Created, NewRun, RunRow, Signal

_NEW_TYPES: Final = {
    "input": "bytea",
    "input_hash": "bytea",
    "seed": "bytea",
    "metadata": "bytea",
    "priority": "bigint",
    "start_at": "bigint",
    "deadline": "bigint",
}
_NEW_FIELDS: Final = NewRun.__struct_fields__
_NEW_COLUMNS: Final = ", ".join(_NEW_FIELDS)
_GIVEN: Final = ", ".join(f"${number}::{_NEW_TYPES.get(name, 'text')}[]" for number, name in enumerate(_NEW_FIELDS, 3))
_N: Final = 2 + len(_NEW_FIELDS)
_ENTRIES_FROM: Final = _N + 9

# Runs that are not there yet, with journal and inbox; those that are there give no instant. In id order, since a run that
# somebody else is creating at this moment is waited for.
_CREATE: Final = f"""
    WITH given AS MATERIALIZED (
        SELECT *, coalesce(given_at, {CLOCK}) AS at
        FROM unnest($2::int[], {_GIVEN}, ${_N + 1}::bigint[], ${_N + 2}::bigint[], ${_N + 3}::bigint[],
            ${_N + 4}::text[], ${_N + 5}::text[], ${_N + 6}::bigint[], ${_N + 7}::bigint[])
            AS given (request, {_NEW_COLUMNS}, given_at, began_at, ttl, token, owner, journal_length, inbox_seq)
    ),
    made AS (
        INSERT INTO $runs (namespace, {_NEW_COLUMNS}, status, wake_at, waiting_for, epoch, lease_token, lease_owner, lease_until,
            attempts, held, cancel_requested, parent_notified, created_at, updated_at, journal_length, inbox_seq)
        SELECT $1, {_NEW_COLUMNS}, CASE WHEN ttl IS NULL THEN 'pending' ELSE 'running' END,
            CASE WHEN ttl IS NULL THEN coalesce(start_at, at) ELSE at + ttl END, '{{}}',
            CASE WHEN ttl IS NULL THEN 0 ELSE greatest(1, at) END, token, owner, at + ttl,
            CASE WHEN ttl IS NULL THEN 0 ELSE 1 END, false, false, false, coalesce(began_at, at), at, journal_length, inbox_seq
        FROM given ORDER BY id
        ON CONFLICT DO NOTHING
        RETURNING id, updated_at
    ),
    appended AS (
        INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
        SELECT $1, run_id, {ENTRY_COLUMNS}
        FROM unnest(${_ENTRIES_FROM}::text[],
            {", ".join(f"${number}::{kind}[]" for number, kind in enumerate(ENTRY_TYPES, _ENTRIES_FROM + 1))})
            AS entry (run_id, {ENTRY_COLUMNS}) JOIN made ON made.id = entry.run_id
    ),
    delivered AS (
        INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, dedupe, consumed_by, identity)
        SELECT $1, run_id, seq, kind, name, payload, dedupe, consumed_by, identity
        FROM unnest(${_N + 22}::text[], ${_N + 23}::bigint[], ${_N + 24}::text[], ${_N + 25}::text[], ${_N + 26}::bytea[],
            ${_N + 27}::text[], ${_N + 28}::text[], ${_N + 29}::bytea[])
            AS signal (run_id, seq, kind, name, payload, dedupe, consumed_by, identity) JOIN made ON made.id = signal.run_id
    )
    SELECT given.request, made.updated_at, (SELECT pg_notify(${_N + 8}, '') FROM (SELECT count(*) FROM made) AS any_made)::text
    FROM given LEFT JOIN made ON made.id = given.id ORDER BY given.request
"""
_GET: Final = f"SELECT {RUN_COLUMNS} FROM $runs WHERE namespace = $1 AND id = $2"
_FOUND: Final = f"SELECT {RUN_COLUMNS}, lease_token FROM $runs WHERE namespace = $1 AND id = $2"
_LOCKED: Final = f"""
    SELECT {RUN_COLUMNS}, coalesce($3::bigint, {CLOCK}) FROM $runs WHERE namespace = $1 AND id = $2 FOR UPDATE
"""
_TIME: Final = f"SELECT coalesce($2::bigint, {CLOCK}), $1::text"
_INSERT: Final = f"""
    INSERT INTO $runs (namespace, {RUN_COLUMNS}, journal_length, inbox_seq)
    VALUES ($1, {", ".join(f"${number}" for number in range(2, len(RUN_FIELDS) + 4))})
"""
_REPLACE: Final = f"""
    UPDATE $runs SET ({RUN_COLUMNS}, journal_length, inbox_seq, lease_token)
        = ({", ".join(f"${number}" for number in range(2, len(RUN_FIELDS) + 4))}, NULL)
    WHERE namespace = $1 AND id = ${2 + RUN_FIELDS.index("id")}
"""
_APPEND: Final = f"""
    INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
    SELECT $1, $2, * FROM unnest({", ".join(f"${number}::{kind}[]" for number, kind in enumerate(ENTRY_TYPES, 3))})
"""
_BEGIN: Final = """
    UPDATE $runs SET workflow = $3, input = $4, input_hash = $5, definition_hash = $6, queue = $7, priority = $8, limit_key = $9,
        start_at = $10, deadline = $11, parent_id = $12, parent_key = $13, wake_at = $14, updated_at = $15
    WHERE namespace = $1 AND id = $2
"""
_LAST_SEQ: Final = "SELECT coalesce(max(seq), 0) FROM $steps WHERE namespace = $1 AND run_id = $2"
_REOPEN: Final = """
    UPDATE $runs SET status = 'pending', epoch = $3, wake_at = CASE WHEN input_hash = '' THEN NULL ELSE $4::bigint END,
        updated_at = $4, attempts = 0, cancel_requested = false, outcome = NULL, waiting_for = '{}', parent_notified = false
    WHERE namespace = $1 AND id = $2
"""
_CANCEL: Final = f"""
    UPDATE $runs SET cancel_requested = true, wake_at = CASE
        WHEN status = 'running' OR input_hash = '' THEN wake_at ELSE least(wake_at, coalesce($3::bigint, {CLOCK})) END
    WHERE namespace = $1 AND id = $2 AND status NOT IN {ENDED_SQL} RETURNING 1
"""
_HOLD: Final = "UPDATE $runs SET held = $3 WHERE namespace = $1 AND id = $2 RETURNING 1"
_DELETE: Final = "DELETE FROM $runs WHERE namespace = $1 AND id = ANY ($2::text[])"
_DELETE_PARTS: Final = (
    "DELETE FROM $steps WHERE namespace = $1 AND run_id = ANY ($2::text[])",
    "DELETE FROM $signals WHERE namespace = $1 AND run_id = ANY ($2::text[])",
    "DELETE FROM $items WHERE namespace = $1 AND run_id = ANY ($2::text[])",
)
_NOTIFY: Final = "SELECT pg_notify($2, ''), $1::text"


class Begin(NamedTuple):
    """A run to create, with what it has before it is driven here. `length` is the lease's, in microseconds."""

    run: NewRun
    length: int | None
    token: str
    owner: str
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

    def values(self, request: int) -> tuple[Any, ...]:
        """What `_CREATE` takes of it, but for journal and inbox."""
        is_leased = self.length is not None
        return (
            request,
            *msgspec.structs.astuple(self.run),
            self.now,
            self.created_at,
            self.length,
            self.token if is_leased else None,
            self.owner if is_leased else None,
            self.entries[-1].seq if self.entries else 0,
            self.inbox[-1].seq if self.inbox else 0,
        )

    def made(self, at: int) -> Created:
        """What was created at this instant."""
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
            inbox_seq=self.inbox[-1].seq if self.inbox else 0,
            item_counts={},
        )
        return Created(run=run, is_new=True, claim=claim)


async def create_all(db: Session, begins: Sequence[Begin]) -> list[Created | None]:
    """What was created of these; None for each run that is there. No two are for one run."""
    entries = [(begin.run.id, *entry_values(entry)) for begin in begins for entry in begin.entries]
    signals = [(begin.run.id, *inbox.inbox_values(row)) for begin in begins for row in begin.inbox]
    given = columns([begin.values(number) for number, begin in enumerate(begins)], 0)
    values = (*given, db.tables.channel, *columns(entries, 1 + len(ENTRY_TYPES)), *columns(signals, 8))
    rows = await db.all(_CREATE, *values)
    return [None if at is None else begin.made(at) for begin, (_, at, _) in zip(begins, rows, strict=True)]


async def find(db: Session, begin: Begin) -> Created | None:
    """The run that is there already, given its input if it lacked that. None when it is gone. Raises `RunConflict`."""
    row = await db.one(_FOUND, begin.run.id)
    if row is None:
        return None
    found = run_from(row)
    if begin.length is not None and row[-1] == begin.token:
        return begin.made(found.updated_at)  # our own, whose reply was lost
    if not found.lacks_input:
        return Created(run=found_row(found, begin.run, 0), is_new=False)
    return await _bring_input(db, begin)


async def _bring_input(db: Session, begin: Begin) -> Created | None:
    async with db.transaction():
        found, at = await locked(db, begin.run.id, begin.now)
        if found is None:
            return None
        begun = found_row(found, begin.run, at)
        if begun is not found:
            await db.all(_BEGIN, *_begun_values(begun))
            await db.all(_NOTIFY, db.tables.channel)
        return Created(run=begun, is_new=False)


def _begun_values(run: RunRow) -> tuple[Any, ...]:
    return (
        run.id,
        run.workflow,
        run.input,
        run.input_hash,
        run.definition_hash,
        run.queue,
        run.priority,
        run.limit_key,
        run.start_at,
        run.deadline,
        run.parent_id,
        run.parent_key,
        run.wake_at,
        run.updated_at,
    )


async def get(db: Session, run_id: str) -> RunRow | None:
    """The run's row, or None."""
    row = await db.one(_GET, run_id)
    return None if row is None else run_from(row)


async def locked(db: Session, run_id: str, now: int | None) -> tuple[RunRow | None, int]:
    """The run's row, locked until the transaction ends, and the time; it keeps out every holder's writes."""
    row = await db.one(_LOCKED, run_id, now)
    if row is not None:
        return run_from(row), row[-1]
    time = await db.one(_TIME, now)
    return None, time[0] if time is not None else 0


async def restore(db: Session, run: RunRow, entries: Sequence[Entry], rows: Sequence[Signal], now: int | None) -> None:
    """Put this whole run in place of what is there, unless somebody drives that."""
    async with db.transaction():
        found, at = await locked(db, run.id, now)
        if found is not None and found.lease_until is not None and found.lease_until > at:
            raise LeaseHeld(run.id, found.lease_owner or "a live worker")
        values = (*values_of(restored_row(run, rows, found, at)), entries[-1].seq if entries else 0, rows[-1].seq if rows else 0)
        if found is None:
            await db.all(_INSERT, *values)
        else:
            await db.all(_REPLACE, *values)  # the row stays, so that a signal which waits for it finds it
            await _delete_parts(db, [run.id])
        await _append(db, run.id, entries)
        await inbox.insert(db, run.id, rows)
        await db.all(_NOTIFY, db.tables.channel)


async def _append(db: Session, run_id: str, entries: Sequence[Entry]) -> None:
    if entries:
        await db.all(_APPEND, run_id, *columns([entry_values(entry) for entry in entries], len(ENTRY_TYPES)))


async def reopen(db: Session, run_id: str, drop: Collection[str], now: int | None) -> None:
    """Make an ended run pending and due under a new epoch, with one drop entry more."""
    async with db.transaction():
        run, at = await locked(db, run_id, now)
        if run is None:
            raise RunNotFound(run_id)
        if run.status == "completed":
            raise RunFinished(run_id, run.status)
        if not run.ended:
            raise LeaseHeld(run_id, f"its present attempt (it is {run.status}); wait until it has ended")
        epoch = max(run.epoch + 1, at)
        last = await db.one(_LAST_SEQ, run_id)
        await _append(db, run_id, [drop_entry((last[0] if last is not None else 0) + 1, drop, at, epoch)])
        await db.all(_REOPEN, run_id, epoch, at)
        await db.all(_NOTIFY, db.tables.channel)


async def cancel(db: Session, run_id: str, now: int | None) -> None:
    """Ask the run to stop, and make it due unless somebody drives it."""
    if await db.one(f"WITH done AS ({_CANCEL}) SELECT pg_notify($4, '')::text FROM done", run_id, now, db.tables.channel) is None:
        run = await get(db, run_id)
        if run is None:
            raise RunNotFound(run_id)
        if run.status in ENDED:
            raise RunFinished(run_id, run.status)


async def hold(db: Session, run_id: str, *, held: bool) -> None:
    """Put the run on hold, or take it off."""
    if await db.one(f"WITH done AS ({_HOLD}) SELECT pg_notify($4, '')::text FROM done", run_id, held, db.tables.channel) is None:
        raise RunNotFound(run_id)


async def delete(db: Session, run_id: str) -> None:
    """Remove the run and everything of it."""
    async with db.transaction():
        await locked(db, run_id, 0)  # first, so that the deletions see what a writer who was waited for has written
        await _delete(db, [run_id])
        await db.all(_NOTIFY, db.tables.channel)


async def _delete(db: Session, run_ids: Sequence[str]) -> None:
    await db.all(_DELETE, list(run_ids))
    await _delete_parts(db, run_ids)


async def _delete_parts(db: Session, run_ids: Sequence[str]) -> None:
    for statement in _DELETE_PARTS:
        await db.all(statement, list(run_ids))


_OLD: Final = f"""
    SELECT id FROM $runs WHERE namespace = $1 AND id IN (
        SELECT old.id FROM unnest(ARRAY{sorted(ENDED)}) AS ended (status) CROSS JOIN LATERAL (
            SELECT id, updated_at FROM $runs
            WHERE namespace || '' = $1 AND status = ended.status AND updated_at <= coalesce($2::bigint, {CLOCK}) - $3
            ORDER BY updated_at LIMIT $4
        ) AS old
        ORDER BY old.updated_at, old.id LIMIT $4
    ) AND status IN {ENDED_SQL} AND updated_at <= coalesce($2::bigint, {CLOCK}) - $3
    ORDER BY id FOR UPDATE SKIP LOCKED
"""


async def purge(db: Session, age: int, limit: int, now: int | None) -> int:
    """Delete runs that ended `age` microseconds ago or earlier, oldest first."""
    async with db.transaction():
        old = [row[0] for row in await db.all(_OLD, now, age, max(limit, 0))]
        if old:
            await _delete(db, old)
        return len(old)
