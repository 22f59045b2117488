"""What is read without a lease: journals, streams, lists, counts, what is due.

Each is one statement, so of one moment, unless the dialect `has_few_indexes`: there lists, counts and what is due are read group
by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

from perdure.backends.base.damaged_runs import FETCH_FAILURES, UNREADABLE, check_line, damaged_line, raise_damage
from perdure.backends.sql import inbox
from perdure.backends.sql.dialect import chunks
from perdure.backends.sql.due_order import due_by_group
from perdure.backends.sql.rows import ENTRY_COLUMNS, Row, entries_from
from perdure.backends.sql.session import Parameters, Session
from perdure.model.durations import instant
from perdure.model.journal import Entry
from perdure.model.records import STATUSES, Item, RunInfo, Signal, Status

_JOURNAL: Final = f"SELECT {ENTRY_COLUMNS} FROM $steps WHERE namespace = ?1 AND run_id = ?2 AND seq > ?3 ORDER BY seq"
_ITEMS: Final = """
    SELECT n, payload FROM $items WHERE namespace = ?1 AND run_id = ?2 AND stream = ?3 AND n > ?4 ORDER BY n LIMIT ?5
"""
# Loose index scans: from each stream, or each workflow, straight to the next.
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
_WORKFLOWS: Final = """
    WITH RECURSIVE found (workflow) AS (
        SELECT min(workflow) FROM $runs WHERE namespace = ?1
        UNION ALL
        SELECT (SELECT min(workflow) FROM $runs WHERE namespace = ?1 AND workflow > found.workflow)
        FROM found WHERE found.workflow IS NOT NULL
    )
    SELECT workflow FROM found WHERE workflow IS NOT NULL
"""
# How many SELECTs are put together into one statement.
MAX_SELECTS: Final = 100


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


class RunGroup(NamedTuple):
    """Runs of one workflow and status that lie together in an index, last changed first. None stands for any."""

    workflow: str | None
    status: str | None


async def run_groups(db: Session, status: str | None, workflow: str | None) -> list[RunGroup]:
    """The groups of runs that lists and purges merge."""
    statuses = sorted(STATUSES) if status is None else [status]
    workflows: list[str | None] = [workflow]
    if workflow is None and db.tables.dialect.has_few_indexes:
        workflows = [db.tables.values.name_from(name) for (name,) in await db.all(_WORKFLOWS)]
    return [RunGroup(name, one) for name in workflows for one in statuses]


def group_condition(params: Parameters, prefix: str, group: RunGroup, before: tuple[int, str] | None = None) -> str:
    """The SQL condition that selects the runs of a group with this prefix, of those that a list has not reached yet."""
    # A prefix is looked up by the primary key.
    conditions, as_filter = (["namespace = ?1"], "$unindexed ") if prefix else (["$indexed_namespace = ?1"], "")
    if prefix:
        conditions.append(f"id >= {params.one(prefix)}")
        end = after_prefix(prefix)
        conditions += [f"id < {params.one(end)}"] if end else []
    if group.workflow is not None:
        conditions.append(f"{as_filter}workflow = {params.one(group.workflow)}")
    if group.status is not None:
        conditions.append(f"{as_filter}status = {params.one(group.status)}")
    if before is not None:
        at = params.one(before[0])
        conditions.append(f"updated_at <= {at} AND (updated_at < {at} OR id > {params.one(before[1])})")
    return " AND ".join(conditions)


def after_prefix(prefix: str) -> str:
    """The least text above every text that begins with `prefix`, or "" when there is none. Text sorts by its bytes."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return ""
    last = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if last == 0xD800 else last)  # surrogates are no text


async def list_runs(
    db: Session, prefix: str, status: Status | None, workflow: str | None, before: tuple[int, str] | None, limit: int
) -> list[RunInfo]:
    """Runs, last changed first, ties by id: the newest of each group, merged."""
    is_one_group = bool(prefix) and db.tables.dialect.has_few_indexes
    groups = [RunGroup(workflow, status)] if is_one_group else await run_groups(db, status, workflow)
    found: list[RunInfo] = []
    for chunk in chunks(groups, MAX_SELECTS):
        params = Parameters()
        most = params.one(max(limit, 0))
        newest = (
            f"""
            SELECT * FROM (
                SELECT id, workflow, version, status, updated_at, problem FROM $runs
                WHERE {group_condition(params, prefix, group, before)} ORDER BY updated_at DESC, id LIMIT {most}
            ) AS newest_{number}"""
            for number, group in enumerate(chunk)
        )
        template = f"""
            SELECT id, workflow, version, status, updated_at, problem FROM ({" UNION ALL ".join(newest)}) AS newest
            ORDER BY updated_at DESC, id LIMIT {most}
        """
        found += [line for row in await db.all(template, *params.values) if (line := _line(db, row)) is not None]
    return sorted(found, key=lambda line: (-instant(line.updated_at), line.id))[: max(limit, 0)]


def _line(db: Session, row: Row) -> RunInfo | None:
    """The line of a list for this row. A run whose id cannot be read has none: no verb can name it."""
    name, (run_id, workflow, version, status, updated_at, problem) = db.tables.values.name_from, row
    try:
        return check_line(
            RunInfo.of(name(run_id), name(workflow), int(version), name(status), int(updated_at), problem and name(problem))  # type: ignore[arg-type]
        )
    except UNREADABLE as reason:
        readable = db.tables.values.id_from(run_id)
        columns = {"workflow": workflow, "version": version, "status": status, "updated_at": updated_at}
        return None if readable is None else damaged_line(readable, columns, reason)


async def count(db: Session, prefix: str, status: Status | None, workflow: str | None) -> int:
    """How many runs there are."""
    groups = [RunGroup(workflow, status)]
    if not prefix and status is not None:
        groups = await run_groups(db, status, workflow)
    total = 0
    for chunk in chunks(groups, MAX_SELECTS):
        params = Parameters()
        counts = (f"SELECT count(*) FROM $runs WHERE {group_condition(params, prefix, group)}" for group in chunk)
        total += sum(int(row[0]) for row in await db.all(" UNION ALL ".join(counts), *params.values))
    return total
