"""What the holder of a lease writes: records, and what ends or suspends a run. Each verb is one statement for many runs.

Plain records are one statement that is executed for each entry, all in one round trip and one transaction.

`held` is the fence: it picks the runs whose epoch and token are those of the lease, locks their rows in id order, and everything
that is written is joined to it. A record locks with KEY SHARE, which keeps out every verb that takes a run over (claim, acquire,
restore, reopen and delete lock FOR UPDATE) but neither signals, renewals nor other records. While a statement waits for the lock
other transactions may commit; then PostgreSQL looks at the fence again in the row's newest version, but reads other tables as
they were before. So `inbox_seq` stands in the row itself, and what might have been decided by an old inbox gets SEND_AGAIN and is
sent once more. An entry that another transaction wrote meanwhile is a unique violation, which rolls the statement back, and is
looked at anew as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.base.batching import SEND_AGAIN, Reply
from perdure.backends.base.duplicate_records import refusal_from
from perdure.backends.postgres.channel import columns, fetch, fetch_each
from perdure.backends.postgres.notifications import NEW_ITEMS, channel_name
from perdure.backends.sql.recording import Write
from perdure.backends.sql.rows import (
    ENTRY_COLUMNS,
    ENTRY_FIELDS,
    NO_LEASE_SQL,
    NO_PROBLEM_SQL,
    SIGNAL_FIELDS,
    awaited_text,
    entry_values,
    signal_from,
)
from perdure.backends.sql.session import Session
from perdure.errors import LeaseLost
from perdure.model.records import ENDED, Pulse, Signal

_TYPES: Final = {
    "key": "text", "phase": "text", "kind": "text", "name": "text", "ok": "smallint", "args_hash": "bytea", "payload": "bytea",
}  # fmt: skip
ENTRY_TYPES: Final = tuple(_TYPES.get(field, "bigint") for field in ENTRY_FIELDS)
ENDED_SQL: Final = f"({', '.join(repr(status) for status in sorted(ENDED))})"

_NO_ENTRY: Final = (None,) * len(ENTRY_FIELDS)
_OTHERS: Final = [column for column in ENTRY_COLUMNS.split(", ") if column != "seq"]


def _types(first: int) -> str:
    """Arrays of entry columns, from this parameter on."""
    return ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(ENTRY_TYPES, first))


# What every write has: $2..$5 the leases, $6..$18 entries, $19..$20 inbox rows to consume, $21..$24 items.
_WRITTEN: Final = f"""
    entry AS MATERIALIZED (
        SELECT held.run_id, input_row.*, (
            SELECT ({", ".join(f"there.{column}" for column in _OTHERS)})
                IS NOT DISTINCT FROM ({", ".join(f"input_row.{column}" for column in _OTHERS)})
            FROM $steps AS there WHERE there.namespace = $1 AND there.run_id = held.run_id AND there.seq = input_row.seq
        ) AS is_same
        FROM unnest($6::int[], {_types(7)}) AS input_row (request, {ENTRY_COLUMNS}) JOIN held USING (request)
    ),
    used AS MATERIALIZED (
        SELECT held.run_id, held.token, input_row.request, input_row.seq, (
            SELECT true FROM $signals AS there
            WHERE there.namespace = $1 AND there.run_id = held.run_id AND there.seq = input_row.seq
        ) IS TRUE AS is_there
        FROM unnest($19::int[], $20::bigint[]) AS input_row (request, seq) JOIN held USING (request)
    ),
    item AS MATERIALIZED (
        SELECT held.run_id, input_row.*, (
            SELECT there.payload = input_row.payload FROM $items AS there
            WHERE there.namespace = $1 AND there.run_id = held.run_id
                AND there.stream = input_row.stream AND there.n = input_row.n
        ) AS is_same
        FROM unnest($21::int[], $22::text[], $23::bigint[], $24::bytea[]) AS input_row (request, stream, n, payload)
        JOIN held USING (request)
    ),
    refused AS MATERIALIZED (
        SELECT request, format('entry %s', seq) AS reason FROM entry WHERE NOT is_same
        UNION ALL
        SELECT request, format('inbox %s', seq) FROM used WHERE NOT is_there
        UNION ALL
        SELECT request, format('item %s %s', n, stream) FROM item WHERE NOT is_same
    ),
    appended AS (
        INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
        SELECT $1, run_id, {ENTRY_COLUMNS} FROM entry
        WHERE is_same IS NULL AND request NOT IN (SELECT request FROM refused)
    ),
    consumed AS (
        UPDATE $signals AS signal SET consumed_by = used.token FROM used
        WHERE signal.namespace = $1 AND signal.run_id = used.run_id AND signal.seq = used.seq AND signal.consumed_by IS NULL
            AND used.request NOT IN (SELECT request FROM refused)
    ),
    added AS (
        INSERT INTO $items (namespace, run_id, stream, n, payload)
        SELECT $1, run_id, stream, n, payload FROM item
        WHERE is_same IS NULL AND request NOT IN (SELECT request FROM refused)
    )
"""
RECORD: Final = f"""
    WITH requested AS MATERIALIZED (
        SELECT * FROM unnest($2::int[], $3::text[], $4::bigint[], $5::text[]) AS requested (request, run_id, epoch, token)
    ),
    held AS MATERIALIZED (
        SELECT requested.request, requested.token, run.id AS run_id, run.cancel_requested, run.inbox_seq
        FROM (SELECT * FROM requested ORDER BY run_id COLLATE "C", request) AS requested CROSS JOIN LATERAL (
            SELECT id, cancel_requested, inbox_seq FROM $runs
            WHERE namespace = $1 AND id = requested.run_id AND epoch = requested.epoch AND lease_token = requested.token
            FOR KEY SHARE
        ) AS run
    ),
    {_WRITTEN}
    SELECT requested.request, held.request IS NOT NULL, held.inbox_seq, held.cancel_requested,
        (SELECT min(reason) FROM refused WHERE refused.request = requested.request),
        (SELECT pg_notify($25, '{NEW_ITEMS}') WHERE EXISTS (SELECT FROM item))::text
    FROM requested LEFT JOIN held USING (request) ORDER BY requested.request
"""
# What nearly every record is: a new entry and nothing else. One that is there already is a unique violation, by which nothing is
# written, and RECORD looks more closely. For one entry _APPEND takes 20 us more of the server than a plain INSERT, RECORD 100.
# Many are sent as many times this statement: driver and client need two thirds of what arrays of columns took them.
_APPEND: Final = f"""
    WITH held AS MATERIALIZED (
        SELECT id, epoch, lease_token, inbox_seq, cancel_requested FROM $runs
        WHERE namespace = $1 AND id = $2 AND epoch = $3 AND lease_token = $4 FOR KEY SHARE
    ),
    appended AS (
        INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
        SELECT $1, id, {", ".join(f"${number}::{kind}" for number, kind in enumerate(ENTRY_TYPES, 5))} FROM held
    )
    SELECT id, epoch, lease_token, inbox_seq, cancel_requested FROM held
"""
# What nearly every end is: that of a run without a parent, and at most new entries with it. A run that has none has a row without
# one. What is not found here (a lost lease, a parent) is for CLOSE to look at, which takes ten times as long.
_END: Final = f"""
    WITH held AS MATERIALIZED (
        SELECT requested.*, coalesce(caller_time, (SELECT $clock)) AS at
        FROM (
            SELECT * FROM unnest(
                $2::int[], $3::text[], $4::bigint[], $5::text[], $6::text[], $7::bytea[], $8::bigint[], {_types(9)}
            ) AS requested (request, run_id, lease_epoch, token, status, outcome, caller_time, {ENTRY_COLUMNS})
            ORDER BY run_id COLLATE "C", request
        ) AS requested
        CROSS JOIN LATERAL (
            SELECT id FROM $runs
            WHERE namespace = $1 AND id = requested.run_id AND epoch = requested.lease_epoch AND lease_token = requested.token
                AND parent_id IS NULL
            FOR NO KEY UPDATE
        ) AS run
    ),
    appended AS (
        INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
        SELECT $1, run_id, {ENTRY_COLUMNS} FROM held WHERE seq IS NOT NULL
    ),
    ended AS (
        UPDATE $runs AS run SET status = held.status, outcome = held.outcome, updated_at = held.at, wake_at = NULL,
            waiting_for = '[]', {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
        FROM (SELECT DISTINCT ON (request) request, run_id, status, outcome, at FROM held ORDER BY request) AS held
        WHERE run.namespace = $1 AND run.id = held.run_id
        RETURNING held.request
    )
    SELECT request, (SELECT pg_notify(${9 + len(ENTRY_FIELDS)}, ''))::text FROM ended
"""
# $25..$29 how each run ends or sleeps, $30..$32 what it waits for, $33 the channel. Children and parents are locked together, in
# id order. A child whose parent is in the same batch is sent again: one statement changes a row once. `waiting_for` is JSON
# without spaces, in which ["child","key"] can only be an element: a quote inside a name is written as \".
CLOSE: Final = f"""
    WITH requested AS MATERIALIZED (
        SELECT request, run_id, epoch, token, status, outcome, wake_at, coalesce(at, (SELECT $clock)) AS at, waiting_for
        FROM unnest($2::int[], $3::text[], $4::bigint[], $5::text[], $25::text[], $26::bytea[], $27::bigint[], $28::bigint[],
            $29::text[]) AS requested (request, run_id, epoch, token, status, outcome, wake_at, at, waiting_for)
    ),
    awaited AS MATERIALIZED (
        SELECT * FROM unnest($30::int[], $31::text[], $32::text[]) AS awaited (request, kind, name)
    ),
    locked AS MATERIALIZED (
        SELECT id, epoch, lease_token, status, parent_id, parent_key, cancel_requested, inbox_seq, waiting_for
        FROM $runs WHERE namespace = $1 AND id = ANY ($3::text[] || ARRAY(
            SELECT child.parent_id FROM requested JOIN $runs AS child ON child.namespace = $1 AND child.id = requested.run_id
            WHERE child.parent_id IS NOT NULL AND requested.status <> 'suspended'
        ))
        ORDER BY id FOR NO KEY UPDATE
    ),
    fenced AS MATERIALIZED (
        SELECT requested.*, locked.parent_id, locked.parent_key, locked.cancel_requested,
            CASE WHEN requested.status = 'suspended' THEN locked.inbox_seq > coalesce((
                SELECT max(seq) FROM $signals AS there WHERE there.namespace = $1 AND there.run_id = locked.id
            ), 0)
            ELSE locked.parent_id <> locked.id AND locked.parent_id = ANY ($3::text[]) END IS TRUE AS again
        FROM requested JOIN locked ON locked.id = requested.run_id
        WHERE locked.epoch = requested.epoch AND locked.lease_token = requested.token
    ),
    held AS MATERIALIZED (
        SELECT * FROM fenced WHERE NOT again
    ),
    {_WRITTEN},
    arrived AS MATERIALIZED (
        SELECT held.request, {", ".join(f"signal.{field}" for field in SIGNAL_FIELDS)}
        FROM held JOIN $signals AS signal ON signal.namespace = $1 AND signal.run_id = held.run_id AND signal.consumed_by IS NULL
        WHERE held.status = 'suspended'
            AND (held.request, signal.kind, signal.name) IN (SELECT request, kind, name FROM awaited)
            AND (held.request, signal.seq) NOT IN (SELECT request, seq FROM used)
    ),
    closed AS (
        UPDATE $runs AS run SET status = held.status, updated_at = held.at,
            {NO_LEASE_SQL}, {NO_PROBLEM_SQL},
            outcome = CASE WHEN held.status = 'suspended' THEN run.outcome ELSE held.outcome END,
            attempts = CASE WHEN held.status = 'suspended' THEN 0 ELSE run.attempts END,
            wake_at = CASE
                WHEN held.status <> 'suspended' THEN NULL
                WHEN held.cancel_requested = 1 THEN least(held.wake_at, held.at)
                ELSE held.wake_at END,
            waiting_for = held.waiting_for,
            parent_notified = CASE
                WHEN held.status <> 'suspended' AND run.parent_id IS NOT NULL AND run.parent_key IS NOT NULL THEN 1
                ELSE run.parent_notified END
        FROM held
        WHERE run.namespace = $1 AND run.id = held.run_id
            AND held.request NOT IN (SELECT request FROM refused) AND held.request NOT IN (SELECT request FROM arrived)
        RETURNING held.request, held.status, held.outcome, held.at, held.run_id, held.parent_id, held.parent_key
    ),
    news AS MATERIALIZED (
        SELECT parent.id AS run_id, closed.parent_key AS name, closed.outcome, closed.at,
            parent.inbox_seq + row_number() OVER (PARTITION BY parent.id ORDER BY closed.request) AS seq,
            parent.status = 'suspended'
                AND position('["child",' || to_json(closed.parent_key)::text || ']' IN parent.waiting_for) > 0 AS is_awaited
        FROM closed JOIN locked AS parent ON parent.id = closed.parent_id
        WHERE closed.status <> 'suspended' AND closed.parent_key IS NOT NULL AND closed.run_id <> parent.id
            AND parent.status NOT IN {ENDED_SQL}
    ),
    delivered AS (
        INSERT INTO $signals (namespace, run_id, seq, kind, name, identity, payload)
        SELECT $1, run_id, seq, 'child', name, replace(gen_random_uuid()::text, '-', ''), outcome FROM news
    ),
    woken AS (
        UPDATE $runs AS run SET inbox_seq = latest.seq,
            wake_at = CASE WHEN latest.woken_at IS NULL THEN run.wake_at ELSE least(run.wake_at, latest.woken_at) END
        FROM (
            SELECT run_id, max(seq) AS seq, min(at) FILTER (WHERE is_awaited) AS woken_at FROM news GROUP BY run_id
        ) AS latest
        WHERE run.namespace = $1 AND run.id = latest.run_id
    )
    SELECT requested.request, fenced.request IS NOT NULL, fenced.again,
        (SELECT min(reason) FROM refused WHERE refused.request = requested.request),
        (SELECT pg_notify($33, '') FROM (SELECT count(*) FROM closed) AS any_closed)::text,
        {", ".join(f"arrived.{field}" for field in SIGNAL_FIELDS)}
    FROM requested LEFT JOIN fenced USING (request) LEFT JOIN arrived USING (request) ORDER BY requested.request, arrived.seq
"""


def are_plain(writes: Sequence[Write]) -> bool:
    """Whether they have entries and nothing else."""
    return all([write.entries and not write.consume and not write.items for write in writes])  # noqa: C419 - faster for a few


async def append_all(db: Session, writes: Sequence[Write]) -> list[Reply[Pulse]]:
    """As `record_all`, for plain writes whose entries are new: one that is not is a unique violation, and nothing is written."""
    parameters = [
        (write.lease.run_id, write.lease.epoch, write.lease.token, *entry_values(entry))
        for write in sorted(writes, key=_run_id)  # in which order the rows are locked
        for entry in write.entries
    ]
    rows = await fetch_each(db, _APPEND, parameters)
    pulses = {(run_id, epoch, token): Pulse(seq, bool(cancelled)) for run_id, epoch, token, seq, cancelled in rows}
    return [
        pulses.get((write.lease.run_id, write.lease.epoch, write.lease.token)) or LeaseLost(write.run_id, write.lease.epoch)
        for write in writes
    ]


def _run_id(write: Write) -> str:
    """Text in Python sorts like its bytes in UTF-8, which is how ids are sorted there."""
    return write.lease.run_id


async def record_all(db: Session, writes: Sequence[Write]) -> list[Reply[Pulse]]:
    """Append what each write has; one that is refused is answered with its error, alone."""
    rows = await fetch(db, RECORD, *_arrays(writes), channel_name(db.tables))
    return [_pulse(write, row) for write, row in zip(writes, rows, strict=True)]


def _pulse(write: Write, row: Sequence[Any]) -> Reply[Pulse]:
    _, is_held, inbox_seq, cancel_requested, reason, _ = row
    if not is_held:
        return LeaseLost(write.run_id, write.lease.epoch)
    return Pulse(inbox_seq, bool(cancel_requested)) if reason is None else refusal_from(write.run_id, reason)


def are_plain_ends(writes: Sequence[Write]) -> bool:
    """Whether they end runs, with at most new entries."""
    return all(write.status != "suspended" and not write.consume and not write.items for write in writes)


async def end_all(db: Session, writes: Sequence[Write]) -> list[Reply[list[Signal]]]:
    """As `close_all`, for plain ends whose entries are new: one that is not is a unique violation, and nothing is written."""
    parameters: list[tuple[Any, ...]] = []
    for write, lease in zip(writes, _leases(writes), strict=True):
        end = (*lease, write.status, write.outcome, write.now)
        parameters += [(*end, *entry_values(entry)) for entry in write.entries] or [(*end, *_NO_ENTRY)]
    ended = {row[0] for row in await fetch(db, _END, *columns(parameters, 7 + len(ENTRY_FIELDS)), channel_name(db.tables))}
    others = [write for number, write in enumerate(writes) if number not in ended]
    answers = iter(await close_all(db, others) if others else [])
    return [[] if number in ended else next(answers) for number in range(len(writes))]


async def close_all(db: Session, writes: Sequence[Write]) -> list[Reply[list[Signal]]]:
    """Record, and end or suspend each run. No two writes are for one run."""
    closing = [(write.status, write.outcome, write.wake_at, write.now, awaited_text(write.waiting_for)) for write in writes]
    awaited = [(number, one.kind, one.name) for number, write in enumerate(writes) for one in write.waiting_for]
    values = (*_arrays(writes), *columns(closing, 5), *columns(awaited, 3), channel_name(db.tables))
    answers: dict[int, Reply[list[Signal]]] = {}
    for row in await fetch(db, CLOSE, *values):
        before = answers.get(row[0])
        if isinstance(before, list):
            before.append(signal_from(row[5:], db.tables.values))
        else:
            answers[row[0]] = _close_reply(db, writes[row[0]], row)
    return [answers[number] for number in range(len(writes))]


def _close_reply(db: Session, write: Write, row: Sequence[Any]) -> Reply[list[Signal]]:
    _, is_fenced, again, reason = row[:4]
    if not is_fenced:
        return LeaseLost(write.run_id, write.lease.epoch)
    if again:
        return SEND_AGAIN
    if reason is not None:
        return refusal_from(write.run_id, reason)
    return [] if row[5] is None else [signal_from(row[5:], db.tables.values)]


def _arrays(writes: Sequence[Write]) -> list[list[Any]]:
    """The arrays $2..$24 of a statement: leases, entries, inbox rows to consume, items."""
    entries = [(number, *entry_values(entry)) for number, write in enumerate(writes) for entry in write.entries]
    consume = [(number, seq) for number, write in enumerate(writes) for seq in write.consume]
    items = [(number, item.stream, item.n, item.payload) for number, write in enumerate(writes) for item in write.items]
    return [
        *columns(_leases(writes), 4), *columns(entries, 1 + len(ENTRY_FIELDS)), *columns(consume, 2), *columns(items, 4),
    ]  # fmt: skip


def _leases(writes: Sequence[Write]) -> list[tuple[Any, ...]]:
    return [(number, write.run_id, write.lease.epoch, write.lease.token) for number, write in enumerate(writes)]
