"""Which runs there are: `list` and `count`, by their indexes.

Runs with a prefix are found by the primary key. Otherwise they lie in groups, last changed first, in one of two indexes: by
status, or by (workflow, queue, status). Of each group the newest are read, and merged. Where a filter leaves out the workflow or
the queue, a loose index scan says which there are: from each straight to the next.

What is found at first is only ids. The columns of a line, which may be long, are read for the lines of the page alone. A page is
one statement, or a few if there are very many groups. All groups of one workflow and queue, which a run never changes, are in the
same statement, so a run that changes its status meanwhile is not missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from perdure.backends.base.damaged_runs import FETCH_FAILURES, LINE_FIELDS, UNREADABLE, damaged_line, line_from
from perdure.backends.sql.dialect import chunks
from perdure.backends.sql.rows import Row, awaited_from, field_from
from perdure.backends.sql.session import Parameters, Session
from perdure.codec.outcomes import FAILED, OUTCOME_START
from perdure.model.durations import instant
from perdure.model.records import RunInfo, Status
from perdure.model.run_filter import RunFilter

# How many SELECTs are put together into one statement.
_MAX_SELECTS: Final = 100

_ALL_WORKFLOWS: Final = """
    SELECT min(workflow) FROM $runs WHERE $listed_namespace = ?1
    UNION ALL
    SELECT (SELECT min(workflow) FROM $runs WHERE $listed_namespace = ?1 AND workflow > names.workflow)
    FROM names WHERE names.workflow IS NOT NULL
"""
_WORKFLOWS: Final = f"""
    WITH RECURSIVE names (workflow) AS ({_ALL_WORKFLOWS}) SELECT workflow FROM names WHERE workflow IS NOT NULL
"""
_QUEUES: Final = """
    WITH RECURSIVE names (workflow) AS ({}),
    found (workflow, queue) AS (
        SELECT workflow, (SELECT min(queue) FROM $runs WHERE $listed_namespace = ?1 AND workflow = names.workflow)
        FROM names WHERE workflow IS NOT NULL
        UNION ALL
        SELECT workflow,
            (SELECT min(queue) FROM $runs WHERE $listed_namespace = ?1 AND workflow = found.workflow AND queue > found.queue)
        FROM found WHERE found.queue IS NOT NULL
    )
    SELECT workflow, queue FROM found WHERE queue IS NOT NULL
"""
# MySQL does this scan by itself, and finds a row by an index only by constants.
_DISTINCT: Final = "SELECT DISTINCT {} FROM $runs $by_workflow WHERE namespace = ?1"

_STATUSES: Final = ", ".join(f"'{status}'" for status in FAILED)
_COLUMNS: Final = (
    ", ".join(f"here.{name}" for name in LINE_FIELDS)
    + f", CASE WHEN here.status IN ({_STATUSES}) THEN substr(here.outcome, 1, {OUTCOME_START}) END"
)


class RunGroup(NamedTuple):
    """Runs that lie together in an index, last changed first. None stands for any."""

    status: Status | None
    workflow: str | None = None
    queue: str | None = None


class _LineAndMetadata(NamedTuple):
    """A line of a list, and the stored metadata of its run."""

    info: RunInfo
    metadata: bytes


async def run_groups(db: Session, wanted: RunFilter) -> list[RunGroup]:
    """The groups that together have all runs that are asked for."""
    if wanted.prefix:
        return [RunGroup(None, wanted.workflow, wanted.queue)]
    if wanted.workflow is wanted.queue is None and not db.tables.dialect.has_few_indexes:
        return [RunGroup(status) for status in wanted.statuses]
    pairs = await _workflows_and_queues(db, wanted)
    return [RunGroup(status, workflow, queue) for workflow, queue in pairs for status in wanted.statuses]


async def _workflows_and_queues(db: Session, wanted: RunFilter) -> list[tuple[str, str]]:
    """Each workflow with each of its queues, as far as they are asked for."""
    name, is_mysql = db.tables.values.name_from, db.tables.dialect.name == "mysql"
    workflow, queue = wanted.workflow, wanted.queue
    if queue is not None:
        workflows = [workflow]
        if workflow is None:
            rows = await db.all(_DISTINCT.format("workflow") if is_mysql else _WORKFLOWS)
            workflows = [name(found) for (found,) in rows]
        return [(one, queue) for one in workflows if one is not None]
    params = Parameters()
    if is_mysql:
        of_one = "" if workflow is None else f" AND workflow = {params.one(workflow)}"
        template = _DISTINCT.format("workflow, queue") + of_one
    else:
        template = _QUEUES.format(_ALL_WORKFLOWS if workflow is None else f"SELECT {params.one(workflow, 'text')}")
    return [(name(one), name(other)) for one, other in await db.all(template, *params.values)]


def group_chunks(groups: Sequence[RunGroup], wanted: RunFilter) -> list[Sequence[RunGroup]]:
    """The groups for one statement each: all of a workflow and queue together."""
    per_queue = len(wanted.statuses)
    return chunks(groups, _MAX_SELECTS // per_queue * per_queue)


def _table(wanted: RunFilter, group: RunGroup) -> str:
    """The runs, with the index that has the group."""
    if wanted.prefix:
        return "$runs"
    return "$runs $by_changed" if group.workflow is None else "$runs $by_workflow"


def condition(params: Parameters, wanted: RunFilter, group: RunGroup, before: tuple[int, str] | None = None) -> str:
    """The SQL condition that selects the runs of a group that are asked for, of those that a list has not reached yet."""
    namespace = "$changed_namespace" if group.workflow is None else "$listed_namespace"
    as_filter = ""
    if wanted.prefix:  # it is looked up by the primary key, and no other column must make the planner choose another index
        namespace, as_filter = "namespace", "$unindexed "
    conditions = [f"{namespace} = ?1"]
    if wanted.prefix:
        conditions.append(f"id >= {params.one(wanted.prefix)}")
        end = after_prefix(wanted.prefix)
        conditions += [f"id < {params.one(end)}"] if end else []
        conditions += [f"{as_filter}status IN ({params.many(wanted.status)})"] if wanted.status else []
    for column, value in zip(("status", "workflow", "queue"), group, strict=True):
        conditions += [] if value is None else [f"{as_filter}{column} = {params.one(value)}"]
    if wanted.updated_after is not None:
        conditions.append(f"{as_filter}updated_at >= {params.one(wanted.updated_after)}")
    if wanted.updated_before is not None:
        conditions.append(f"{as_filter}updated_at < {params.one(wanted.updated_before)}")
    if wanted.metadata_text is not None:
        conditions.append(f"$instr(metadata, {params.one(wanted.metadata_text)}) > 0")
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


async def list_runs(db: Session, wanted: RunFilter, before: tuple[int, str] | None, limit: int) -> list[RunInfo]:
    """The runs that are asked for, last changed first, ties by id."""
    groups = await run_groups(db, wanted)
    found: list[RunInfo] = []
    while True:
        # The database cannot tell metadata from what they contain, so a page may lose lines and another is needed.
        size = limit - len(found)
        page = await _page(db, groups, wanted, before, size)
        found += [line.info for line in page if wanted.has_metadata(line.metadata)]
        if len(page) < size or len(found) == limit:
            return found
        before = instant(page[-1].info.updated_at), page[-1].info.id


async def _page(
    db: Session, groups: Sequence[RunGroup], wanted: RunFilter, before: tuple[int, str] | None, size: int
) -> list[_LineAndMetadata]:
    """The newest `size` of the groups' runs."""
    found: list[_LineAndMetadata] = []
    for chunk in group_chunks(groups, wanted):
        params = Parameters()
        most = params.one(size)
        newest = (
            f"""
            SELECT * FROM (
                SELECT id, updated_at FROM {_table(wanted, group)} WHERE {condition(params, wanted, group, before)}
                ORDER BY updated_at DESC, id LIMIT {most}
            ) AS newest_{number}"""
            for number, group in enumerate(chunk)
        )
        page = f"SELECT id FROM ({' UNION ALL '.join(newest)}) AS newest ORDER BY updated_at DESC, id LIMIT {most}"
        found += await _lines(db, page, params)
    return sorted(found, key=lambda line: (-instant(line.info.updated_at), line.info.id))[:size]


async def _lines(db: Session, page: str, params: Parameters) -> list[_LineAndMetadata]:
    """The lines of the runs whose ids this query gives."""
    template = f"""
        SELECT {_COLUMNS} FROM ({page}) AS page
        $each_of $runs AS here $each_where here.namespace = ?1 AND here.id = page.id $each_end
    """
    try:
        return [line for row in await db.all(template, *params.values) if (line := _line(db, row)) is not None]
    except FETCH_FAILURES:  # the driver refuses all rows for one; only then they are read one by one
        ids = [db.tables.values.id_from(value) for (value,) in await db.all(page, *params.values)]
        lines = [await _line_of_one(db, run_id) for run_id in ids if run_id is not None]
        return [line for line in lines if line is not None]


async def _line_of_one(db: Session, run_id: str) -> _LineAndMetadata | None:
    one = "FROM $runs AS here WHERE here.namespace = ?1 AND here.id = ?2"
    try:
        row = await db.one(f"SELECT {_COLUMNS} {one}", run_id)
        return None if row is None else _line(db, row)
    except FETCH_FAILURES as reason:
        columns: dict[str, Any] = {}
        for name in ("workflow", "version", "status", "created_at", "updated_at", "queue"):
            with suppress(*FETCH_FAILURES, *UNREADABLE):
                found = await db.one(f"SELECT here.{name} {one}", run_id)
                columns[name] = None if found is None else field_from(name, found[0], db.tables.values)
        return _LineAndMetadata(damaged_line(run_id, columns, reason), b"{}")


def _line(db: Session, row: Row) -> _LineAndMetadata | None:
    """The line of a list for this row. A run whose id cannot be read has none: no verb can name it."""
    run_id = db.tables.values.id_from(row[0])
    if run_id is None:
        return None
    columns: dict[str, Any] = {}
    problem: BaseException | None = None
    for name, value in zip((*LINE_FIELDS, "outcome"), row, strict=True):
        try:
            columns[name] = field_from(name, value, db.tables.values)
            if name == "waiting_for":
                columns[name] = awaited_from(columns[name])
        except UNREADABLE as reason:
            problem = problem or reason
    if problem is not None:
        return _LineAndMetadata(damaged_line(run_id, columns, problem), b"{}")
    return _LineAndMetadata(line_from(run_id, columns, columns.pop("outcome")), columns["metadata"])


async def count(db: Session, wanted: RunFilter) -> int:
    """How many runs that are asked for there are."""
    narrowed_by = (wanted.status, wanted.queue, wanted.updated_after, wanted.updated_before)
    is_whole = all(one is None for one in narrowed_by)  # of a workflow or of all: one range of an index
    groups = [RunGroup(None, wanted.workflow)] if is_whole else await run_groups(db, wanted)
    total = 0
    for chunk in group_chunks(groups, wanted):
        params = Parameters()
        what = "count(*)" if wanted.metadata is None else "metadata"
        counts = (f"SELECT {what} FROM {_table(wanted, group)} WHERE {condition(params, wanted, group)}" for group in chunk)
        rows = await db.all(" UNION ALL ".join(counts), *params.values)
        if wanted.metadata is None:
            total += sum(int(row[0]) for row in rows)
        else:
            total += sum(_has_metadata(db, wanted, row[0]) for row in rows)
    return total


def _has_metadata(db: Session, wanted: RunFilter, stored: Any) -> bool:
    try:
        return wanted.has_metadata(db.tables.values.payload_from(stored))
    except UNREADABLE:
        return False
