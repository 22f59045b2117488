"""What is read without a lease: journals, streams, lists, counts, what is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from perdure.backends.postgres.rows import ENTRY_COLUMNS, SIGNAL_COLUMNS, entry_from, signal_from
from perdure.backends.postgres.schema import CLOCK, Session
from perdure.model.journal import Entry
from perdure.model.records import STATUSES, Item, RunInfo, Signal, Status

_JOURNAL: Final = f"SELECT {ENTRY_COLUMNS} FROM $steps WHERE namespace = $1 AND run_id = $2 AND seq > $3 ORDER BY seq"
_ITEMS: Final = """
    SELECT n, payload FROM $items WHERE namespace = $1 AND run_id = $2 AND stream = $3 AND n > $4 ORDER BY n LIMIT $5
"""
_JOURNALS: Final = f"""
    SELECT {ENTRY_COLUMNS}, run_id FROM $steps WHERE namespace = $1 AND run_id = ANY ($2::text[]) ORDER BY run_id, seq
"""
_INBOXES: Final = f"""
    SELECT {SIGNAL_COLUMNS}, run_id FROM $signals
    WHERE namespace = $1 AND run_id = ANY ($2::text[]) AND consumed_by IS NULL ORDER BY run_id, seq
"""
# A loose index scan over the streams of each run: items may be many.
_STREAMS: Final = """
    WITH RECURSIVE found (run_id, stream) AS (
        SELECT run_id, (SELECT min(stream) FROM $items AS item WHERE item.namespace = $1 AND item.run_id = wanted.run_id)
        FROM unnest($2::text[]) AS wanted (run_id)
        UNION ALL
        SELECT run_id, (
            SELECT min(stream) FROM $items AS item
            WHERE item.namespace = $1 AND item.run_id = found.run_id AND item.stream > found.stream
        )
        FROM found WHERE stream IS NOT NULL
    )
    SELECT run_id, stream, (
        SELECT max(n) + 1 FROM $items AS item
        WHERE item.namespace = $1 AND item.run_id = found.run_id AND item.stream = found.stream
    )
    FROM found WHERE stream IS NOT NULL
"""
_DUE: Final = f"""
    SELECT id FROM $runs
    WHERE namespace || '' = $1 AND wake_at IS NOT NULL AND NOT held AND wake_at <= coalesce($2::bigint, {CLOCK})
    ORDER BY wake_at, id LIMIT $3
"""


class Parts(NamedTuple):
    """What several runs have beside their rows, by run."""

    journals: dict[str, list[Entry]]
    inboxes: dict[str, list[Signal]]
    item_counts: dict[str, dict[str, int]]


async def parts(db: Session, run_ids: Sequence[str]) -> Parts:
    """Journals, unconsumed inboxes and lengths of streams of these runs."""
    found = Parts({}, {}, {})
    wanted = list(run_ids)
    for row in await db.all(_JOURNALS, wanted):
        found.journals.setdefault(row["run_id"], []).append(entry_from(row))
    for row in await db.all(_INBOXES, wanted):
        found.inboxes.setdefault(row["run_id"], []).append(signal_from(row))
    for run_id, stream, number in await db.all(_STREAMS, wanted):
        found.item_counts.setdefault(run_id, {})[stream] = number
    return found


async def journal(db: Session, run_id: str, after: int) -> list[Entry]:
    """The entries above `after`, by seq."""
    return [entry_from(row) for row in await db.all(_JOURNAL, run_id, after)]


async def items(db: Session, run_id: str, stream: str, after: int, limit: int) -> list[Item]:
    """Items of a stream above `after`, in order."""
    rows = await db.all(_ITEMS, run_id, stream, after, max(limit, 0))
    return [Item(stream=stream, n=n, payload=payload) for n, payload in rows]


async def due(db: Session, limit: int, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed, longest due first."""
    return [row[0] for row in await db.all(_DUE, now, max(limit, 0))]


class Filter(NamedTuple):
    """Which runs to list: SQL conditions, made of constants only, and the values that they speak of."""

    conditions: str
    statuses: list[str]
    values: list[object]


def _filter(prefix: str, status: Status | None, workflow: str | None, before: tuple[int, str] | None) -> Filter:
    values: list[object] = []
    conditions = "namespace || '' = $1"  # by the indexes for lists, and with a prefix by the primary key
    if prefix:
        conditions = "namespace = $1"
        values.append(prefix)
        conditions += f" AND id >= ${len(values) + 2}"
        end = _after_prefix(prefix)
        if end:
            values.append(end)
            conditions += f" AND id < ${len(values) + 2}"
    if workflow is not None:
        values.append(workflow)
        conditions += f" AND workflow = ${len(values) + 2}"
    if before is not None:
        values += before
        at, run_id = len(values) + 1, len(values) + 2
        conditions += f" AND updated_at <= ${at} AND (updated_at < ${at} OR id > ${run_id})"
    return Filter(conditions, sorted(STATUSES) if status is None else [status], values)


def _after_prefix(prefix: str) -> str:
    """The least text above every text that begins with `prefix`, or "" when there is none. Text sorts by its bytes."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return ""
    last = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if last == 0xD800 else last)  # surrogates are no text


async def list_runs(
    db: Session, prefix: str, status: Status | None, workflow: str | None, before: tuple[int, str] | None, limit: int
) -> list[RunInfo]:
    """Runs, last changed first, ties by id: the newest of each status, merged."""
    chosen = _filter(prefix, status, workflow, before)
    limit_number = len(chosen.values) + 3
    template = f"""
        SELECT newest.id, newest.workflow, newest.status, newest.updated_at
        FROM unnest($2::text[]) AS wanted (status) CROSS JOIN LATERAL (
            SELECT id, workflow, status, updated_at FROM $runs WHERE {chosen.conditions} AND status = wanted.status
            ORDER BY updated_at DESC, id LIMIT ${limit_number}
        ) AS newest
        ORDER BY newest.updated_at DESC, newest.id LIMIT ${limit_number}
    """
    rows = await db.all(template, chosen.statuses, *chosen.values, max(limit, 0))
    return [RunInfo.of(*row) for row in rows]


async def count(db: Session, prefix: str, status: Status | None, workflow: str | None) -> int:
    """How many runs there are."""
    chosen = _filter(prefix, status, workflow, None)
    template = f"SELECT count(*) FROM $runs WHERE {chosen.conditions} AND status = ANY ($2::text[])"
    row = await db.one(template, chosen.statuses, *chosen.values)
    return 0 if row is None else int(row[0])
