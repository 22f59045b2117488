"""What is read without a lease: journals, streams, what is due.

Each is one statement, so of one moment, unless the dialect `has_few_indexes`: there what is due is read group by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from perdure.backends.base.damaged_runs import FETCH_FAILURES, raise_damage
from perdure.backends.sql import inbox
from perdure.backends.sql.due_order import due_by_group
from perdure.backends.sql.rows import ENTRY_COLUMNS, entries_from
from perdure.backends.sql.session import Parameters, Session
from perdure.model.journal import Entry
from perdure.model.records import Item, Signal

_JOURNAL: Final = f"SELECT {ENTRY_COLUMNS} FROM $steps WHERE namespace = ?1 AND run_id = ?2 AND seq > ?3 ORDER BY seq"
_ITEMS: Final = """
    SELECT n, payload FROM $items WHERE namespace = ?1 AND run_id = ?2 AND stream = ?3 AND n > ?4 ORDER BY n LIMIT ?5
"""
# A loose index scan: from each stream straight to the next.
_STREAMS: Final = """
    WITH RECURSIVE found (run_id, stream) AS (
        SELECT column1, (SELECT min(stream) FROM $items WHERE namespace = ?1 AND run_id = column1) FROM ({}) AS runs
        UNION ALL
        SELECT run_id, (SELECT min(stream) FROM $items WHERE namespace = ?1 AND run_id = found.run_id AND stream > found.stream)
        FROM found WHERE found.stream IS NOT NULL
    )
    SELECT run_id, stream, (SELECT max(n) FROM $items WHERE namespace = ?1 AND run_id = found.run_id AND stream = found.stream)
    FROM found WHERE stream IS NOT NULL
"""


class Parts(NamedTuple):
    """Journals, inboxes and lengths of streams of several runs, by run."""

    journals: dict[str, list[Entry]]
    inboxes: dict[str, list[Signal]]
    item_counts: dict[str, dict[str, int]]


async def parts(db: Session, run_ids: Sequence[str]) -> Parts:
    """Journals, unconsumed inboxes and lengths of streams of these runs. Raises `SnapshotCorrupt`, and `FETCH_FAILURES`."""
    found = Parts({}, await inbox.read_all(db, run_ids), {})
    values, params = db.tables.values, db.parameters()
    of_runs = f"namespace = ?1 AND {params.among('run_id', run_ids)}"
    streams = f"SELECT run_id, stream, max(n) FROM $items WHERE {of_runs} GROUP BY run_id, stream"
    if db.tables.dialect.name != "mysql":  # which finds a row by an index only by constants
        streams = _STREAMS.format(params.table())
    journals, lengths = await db.send(
        [
            db.statement(f"SELECT {ENTRY_COLUMNS}, run_id FROM $steps WHERE {of_runs} ORDER BY run_id, seq", *params.values),
            db.statement(streams, *params.values),
        ]
    )
    for key, rows in groupby(journals.rows, itemgetter(-1)):
        run_id = values.name_from(key)
        with raise_damage(run_id, "the journal"):
            found.journals[run_id] = entries_from(rows, values)
    for key, stream, last in lengths.rows:
        run_id = values.name_from(key)
        with raise_damage(run_id, "a stream"):
            found.item_counts.setdefault(run_id, {})[values.name_from(stream)] = int(last) + 1
    return found


async def journal(db: Session, run_id: str, after: int) -> list[Entry]:
    """The entries above `after`, by seq. Raises `SnapshotCorrupt`."""
    with raise_damage(run_id, "the journal", FETCH_FAILURES):
        rows = await db.all(_JOURNAL, run_id, after)
    with raise_damage(run_id, "the journal"):
        return entries_from(rows, db.tables.values)


async def items(db: Session, run_id: str, stream: str, after: int, limit: int) -> list[Item]:
    """Items of a stream above `after`, in order."""
    rows = await db.all(_ITEMS, run_id, stream, after, max(limit, 0))
    return [Item(stream=stream, n=int(n), payload=db.tables.values.payload_from(payload)) for n, payload in rows]


async def due(db: Session, limit: int, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed, longest due first."""
    if db.tables.dialect.has_few_indexes:
        return await due_by_group(db, max(limit, 0), now)
    params = Parameters()
    until = "(SELECT $clock)" if now is None else params.one(now)  # as a subquery it is evaluated once
    template = f"""
        SELECT id FROM $runs WHERE $due_namespace = ?1 AND $may_wake AND wake_at <= {until}
        ORDER BY wake_at, id LIMIT {params.one(max(limit, 0))}
    """
    return [
        run_id for (value,) in await db.all(template, *params.values) if (run_id := db.tables.values.id_from(value)) is not None
    ]
