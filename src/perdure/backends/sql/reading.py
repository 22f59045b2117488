"""What is read without a lease: journals, streams, lists, counts, what is due. Each is one statement, so of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from perdure.backends.sql import inbox
from perdure.backends.sql.rows import ENTRY_COLUMNS, ENTRY_FIELDS, entry_from
from perdure.backends.sql.session import Given, Session
from perdure.model.journal import Entry
from perdure.model.records import STATUSES, Item, RunInfo, Signal, Status

_JOURNAL: Final = f"SELECT {ENTRY_COLUMNS} FROM $steps WHERE namespace = ?1 AND run_id = ?2 AND seq > ?3 ORDER BY seq"
_ITEMS: Final = """
    SELECT n, payload FROM $items WHERE namespace = ?1 AND run_id = ?2 AND stream = ?3 AND n > ?4 ORDER BY n LIMIT ?5
"""


class Parts(NamedTuple):
    """What several runs have beside their rows, by run."""

    journals: dict[str, list[Entry]]
    inboxes: dict[str, list[Signal]]
    item_counts: dict[str, dict[str, int]]


async def parts(db: Session, run_ids: Sequence[str]) -> Parts:
    """Journals, unconsumed inboxes and lengths of streams of these runs."""
    found = Parts({}, await inbox.unconsumed_of(db, run_ids), {})
    name, given = db.tables.values.name_from, Given()
    of_runs = f"namespace = ?1 AND run_id IN ({given.many(run_ids)})"
    journals, streams = await db.send(
        [
            db.statement(f"SELECT {ENTRY_COLUMNS}, run_id FROM $steps WHERE {of_runs} ORDER BY run_id, seq", *given.values),
            db.statement(f"SELECT run_id, stream, max(n) FROM $items WHERE {of_runs} GROUP BY run_id, stream", *given.values),
        ]
    )
    for row in journals.rows:
        found.journals.setdefault(name(row[len(ENTRY_FIELDS)]), []).append(entry_from(row, db.tables.values))
    for run_id, stream, last in streams.rows:
        found.item_counts.setdefault(name(run_id), {})[name(stream)] = int(last) + 1
    return found


async def journal(db: Session, run_id: str, after: int) -> list[Entry]:
    """The entries above `after`, by seq."""
    return [entry_from(row, db.tables.values) for row in await db.all(_JOURNAL, run_id, after)]


async def items(db: Session, run_id: str, stream: str, after: int, limit: int) -> list[Item]:
    """Items of a stream above `after`, in order."""
    rows = await db.all(_ITEMS, run_id, stream, after, max(limit, 0))
    return [Item(stream=stream, n=int(n), payload=db.tables.values.payload_from(payload)) for n, payload in rows]


async def due(db: Session, limit: int, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed, longest due first."""
    given = Given()
    until = "(SELECT $clock)" if now is None else given.one(now)  # as a subquery it is asked once
    template = f"""
        SELECT id FROM $runs WHERE $of_all = ?1 AND $may_wake AND wake_at <= {until}
        ORDER BY wake_at, id LIMIT {given.one(max(limit, 0))}
    """
    return [db.tables.values.name_from(row[0]) for row in await db.all(template, *given.values)]


def _conditions(given: Given, prefix: str, workflow: str | None, before: tuple[int, str] | None = None) -> str:
    conditions = ["namespace = ?1"]
    if prefix:
        conditions.append(f"id >= {given.one(prefix)}")
        end = after_prefix(prefix)
        conditions += [f"id < {given.one(end)}"] if end else []
    if workflow is not None:
        conditions.append(f"workflow = {given.one(workflow)}")
    if before is not None:
        at = given.one(before[0])
        conditions.append(f"updated_at <= {at} AND (updated_at < {at} OR id > {given.one(before[1])})")
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
    """Runs, last changed first, ties by id: the newest of each status, merged."""
    given = Given()
    conditions, most = _conditions(given, prefix, workflow, before), given.one(max(limit, 0))
    newest = (
        f"""
        SELECT * FROM (
            SELECT id, workflow, status, updated_at FROM $runs WHERE {conditions} AND status = {given.one(one)}
            ORDER BY updated_at DESC, id LIMIT {most}
        ) AS newest_{number}"""
        for number, one in enumerate(sorted(STATUSES) if status is None else [status])
    )
    template = f"""
        SELECT id, workflow, status, updated_at FROM ({" UNION ALL ".join(newest)}) AS newest
        ORDER BY updated_at DESC, id LIMIT {most}
    """
    rows = await db.all(template, *given.values)
    name = db.tables.values.name_from
    return [RunInfo.of(name(row[0]), name(row[1]), name(row[2]), int(row[3])) for row in rows]  # type: ignore[arg-type]


async def count(db: Session, prefix: str, status: Status | None, workflow: str | None) -> int:
    """How many runs there are."""
    given = Given()
    template = f"SELECT count(*) FROM $runs WHERE {_conditions(given, prefix, workflow)}"
    if status is not None:
        template += f" AND status = {given.one(status)}"
    row = await db.one(template, *given.values)
    return 0 if row is None else int(row[0])
