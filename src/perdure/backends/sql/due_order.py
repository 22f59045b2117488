"""The order in which due runs are claimed: by priority, then longest due, then by id.

Runs that may come due lie in one index by (workflow, version, queue, priority, is_started, wake_at). A claim visits each distinct
group of the first five with one seek, and reads from each only as many due rows as it could use, page by page. So its cost does
not depend on how many runs sleep, belong to other workflows and versions, or wait behind a queue's limit. `is_started` is in the
index because a rate holds back only runs that were never leased: the others must not be looked for behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from perdure.backends.base.claim_rules import ClaimFilter, QueueCounter, SuspectCounter
from perdure.backends.base.damaged_runs import UNREADABLE, log_once
from perdure.backends.sql.dialect import Statement, chunks
from perdure.backends.sql.rows import Row
from perdure.backends.sql.session import Parameters, Session
from perdure.errors import PersistenceError
from perdure.model.records import SUSPECT_ATTEMPTS, WorkflowVersion

_MAX_SELECTS: Final = 100
# `RunRow.is_suspect`.
_IS_SUSPECT: Final = f"status = 'running' AND attempts >= {SUSPECT_ATTEMPTS}"

# A loose index scan: from the first row of a group straight to the first row of the next. It does not compare row values,
# because SQLite would then read through the rows of the present group.
_FIRST: Final = """
    SELECT (SELECT id FROM $runs WHERE $indexed_namespace = ?1 AND $may_wake AND workflow = {} AND version = {}
        ORDER BY queue, priority, $is_started LIMIT 1)
"""
_GROUPS: Final = """
    WITH RECURSIVE first (id) AS (
        {}
        UNION ALL
        SELECT coalesce(
            (SELECT id FROM $runs WHERE $indexed_namespace = ?1 AND $may_wake AND workflow = here.workflow
                AND version = here.version AND queue = here.queue AND priority = here.priority AND $is_started = 1
                AND here.epoch <= 0 ORDER BY wake_at LIMIT 1),
            (SELECT id FROM $runs WHERE $indexed_namespace = ?1 AND $may_wake AND workflow = here.workflow
                AND version = here.version AND queue = here.queue AND priority > here.priority
                ORDER BY priority, $is_started LIMIT 1),
            (SELECT id FROM $runs WHERE $indexed_namespace = ?1 AND $may_wake AND workflow = here.workflow
                AND version = here.version AND queue > here.queue ORDER BY queue, priority, $is_started LIMIT 1){}
        )
        FROM first $each_of $runs AS here $each_where here.namespace = ?1 AND here.id = first.id $each_end
    )
    SELECT here.workflow, here.version, here.queue, here.priority, CASE WHEN here.epoch > 0 THEN 1 ELSE 0 END
    FROM first $each_of $runs AS here $each_where here.namespace = ?1 AND here.id = first.id $each_end
"""
# The same scan over all workflows.
_FIRST_OF_ALL: Final = """
    SELECT (SELECT id FROM $runs WHERE $indexed_namespace = ?1 AND $may_wake
        ORDER BY workflow, version, queue, priority, $is_started LIMIT 1)
"""
_OF_NEXT_WORKFLOW: Final = """,
            (SELECT id FROM $runs WHERE $indexed_namespace = ?1 AND $may_wake AND workflow = here.workflow
                AND version > here.version ORDER BY version, queue, priority, $is_started LIMIT 1),
            (SELECT id FROM $runs WHERE $indexed_namespace = ?1 AND $may_wake AND workflow > here.workflow
                ORDER BY workflow, version, queue, priority, $is_started LIMIT 1)"""
# The same scan with a statement per step, for MySQL: it seeks in an index by constants, but not by columns of a joined row.
_NEXT: Final = """
    SELECT queue, priority, $is_started FROM $runs $by_wake
    WHERE $indexed_namespace = ?1 AND $may_wake AND workflow = ?2 AND version = ?3 {}
    ORDER BY queue, priority, $is_started LIMIT 1
"""


class DueGroup(NamedTuple):
    """Runs that may come due and have the same workflow, version, queue and priority, and were all leased before or never."""

    workflow: str
    version: int
    queue: str
    priority: int
    is_started: bool

    def condition(self, params: Parameters) -> str:
        """The SQL condition that selects them."""
        workflow, version, queue, priority = (params.one(value) for value in self[:4])
        columns = f"workflow = {workflow} AND version = {version} AND queue = {queue} AND priority = {priority}"
        return f"$indexed_namespace = ?1 AND $may_wake AND {columns} AND $is_started = {int(self.is_started)}"


class DueRun(NamedTuple):
    """A due run. Within a priority they are claimed in the order of these fields."""

    wake_at: int
    id: str
    queue: str
    limit_key: str | None
    is_suspect: bool
    is_start: bool


class _DuePages:
    """The due runs of one group, read page by page."""

    def __init__(self, group: DueGroup) -> None:
        self.group = group
        self.runs: deque[DueRun] = deque()
        self.is_read = False
        self._last: DueRun | None = None

    def select_page(
        self, params: Parameters, counter: QueueCounter, suspects: SuspectCounter, now: int, size: int, *, is_postgres: bool
    ) -> str:
        """The template that reads the next page."""
        conditions = [self.group.condition(params), f"wake_at <= {params.one(now)}"]
        if self._last is not None:
            at = params.one(self._last.wake_at)
            conditions.append(f"wake_at >= {at} AND (wake_at > {at} OR id > {params.one(self._last.id)})")
        full = counter.full_keys(self.group.queue)
        if full:
            conditions.append(f"(limit_key IS NULL OR limit_key NOT IN ({params.many(full)}))")
        if not suspects.has_room:  # they must not fill the pages
            conditions.append(f"NOT ({_IS_SUSPECT})")
        due = " AND ".join(conditions)
        columns = f"wake_at, id, limit_key, CASE WHEN {_IS_SUSPECT} THEN 1 ELSE 0 END AS is_suspect"
        page = f"SELECT {columns} FROM $runs $by_wake WHERE {due} ORDER BY wake_at"
        if is_postgres:  # in the order of the index: PostgreSQL expects few rows, and would read and sort all that are due
            return f"SELECT * FROM ({page} FETCH FIRST {size} ROWS WITH TIES) AS page ORDER BY wake_at, id LIMIT {size}"
        return f"{page}, id LIMIT {size}"

    def add_page(self, runs: Sequence[DueRun], size: int, count: int) -> None:
        """Append a page, of which `count` rows were read; one with fewer rows than `size` is the last."""
        self.runs.extend(runs)
        self.is_read = count < size or not runs
        self._last = runs[-1] if runs else self._last


class DueOrder:
    """The due runs of a claim in their order, as far as the limits of their queues let them in."""

    def __init__(
        self,
        db: Session,
        groups: Iterable[DueGroup],
        counter: QueueCounter,
        suspects: SuspectCounter,
        now: int,
        limit: int,
    ) -> None:
        self._db = db
        self._counter = counter
        self._suspects = suspects
        self._now = now
        self._size = limit + 20
        by_priority = groupby(sorted(groups, key=lambda group: -group.priority), key=lambda group: group.priority)
        self._levels = deque([_DuePages(group) for group in alike] for _, alike in by_priority)

    async def next(self, number: int) -> list[DueRun]:
        """The next due runs, at most `number`; each is counted into its queue."""
        picked: list[DueRun] = []
        while self._levels and len(picked) < number:
            run = await self._pop_first(self._levels[0])
            if run is None:
                self._levels.popleft()
            elif self._suspects.take(is_suspect=run.is_suspect):
                if self._counter.take(run.queue, run.limit_key, is_start=run.is_start):
                    picked.append(run)
                else:
                    self._suspects.give_back(is_suspect=run.is_suspect)
        return picked

    async def _pop_first(self, level: Sequence[_DuePages]) -> DueRun | None:
        """The next run of these groups, or None when there are no more that their queues let in."""
        with_room = [pages for pages in level if self._lets_in(pages.group)]
        await self._read_next_pages([pages for pages in with_room if not pages.runs and not pages.is_read])
        waiting = [pages for pages in with_room if pages.runs]
        return min(waiting, key=lambda pages: pages.runs[0]).runs.popleft() if waiting else None

    def _lets_in(self, group: DueGroup) -> bool:
        queue = group.queue
        return self._counter.has_room(queue) and (group.is_started or self._counter.may_start(queue))

    async def _read_next_pages(self, groups: Sequence[_DuePages]) -> None:
        db = self._db
        statements: list[Statement] = []
        for pages in groups:
            params = Parameters()
            is_postgres = db.tables.dialect.name == "postgres"
            template = pages.select_page(params, self._counter, self._suspects, self._now, self._size, is_postgres=is_postgres)
            statements.append(db.statement(template, *params.values))
        for pages, result in zip(groups, await db.send(statements), strict=True):
            pages.add_page([run for row in result.rows if (run := _due_run(db, row, pages.group))], self._size, len(result.rows))


def _due_run(db: Session, row: Row, group: DueGroup) -> DueRun | None:
    """The due run of this row; None when its id cannot be read. What else cannot be read is found when it is leased."""
    wake_at, run_id, limit_key, is_suspect = row
    readable = db.tables.values.id_from(run_id)
    if readable is None:
        return None
    key = None if limit_key is None else db.tables.values.id_from(limit_key)
    return DueRun(int(wake_at), readable, group.queue, key, bool(int(is_suspect)), not group.is_started)


async def due_groups(db: Session, wanted: ClaimFilter) -> list[DueGroup]:
    """Every group that the filter matches and in which a run may come due."""
    find = _groups_step_by_step if db.tables.dialect.name == "mysql" else _groups
    found = [group for chunk in chunks(wanted.workflows, _MAX_SELECTS) for group in await find(db, chunk)]
    return [group for group in found if wanted.queues is None or group.queue in wanted.queues]


async def _groups(db: Session, workflows: Sequence[WorkflowVersion]) -> list[DueGroup]:
    params = Parameters()
    firsts = " UNION ALL ".join(_FIRST.format(params.one(workflow), params.one(version)) for workflow, version in workflows)
    return _groups_from(db, await db.all(_GROUPS.format(firsts, ""), *params.values))


def _groups_from(db: Session, rows: Iterable[Row]) -> list[DueGroup]:
    return [group for row in rows if (group := _group_from(db, *row)) is not None]


def _group_from(db: Session, workflow: Any, version: Any, queue: Any, priority: Any, is_started: Any) -> DueGroup | None:
    """The group, or None when what its runs have in common cannot be read: then no worker can take them."""
    name = db.tables.values.id_from
    try:
        of, within = name(workflow), name(queue)
        if of is not None and within is not None:
            return DueGroup(of, int(version), within, int(priority), bool(int(is_started)))
    except UNREADABLE:
        pass
    columns = f"workflow {workflow!r:.200}, version {version!r:.50}, queue {queue!r:.200} and priority {priority!r:.50}"
    log_once(f"runs with {columns} are not claimed: one of these is damaged")
    return None


async def _groups_step_by_step(db: Session, workflows: Sequence[WorkflowVersion]) -> list[DueGroup]:
    found: list[DueGroup] = []
    steps = [db.statement(_NEXT.format(""), *workflow) for workflow in workflows]
    step_workflows = list(workflows)
    while steps:
        results = await db.send(steps)
        rows = {
            workflow: result.rows[0]
            for workflow, result in zip(reversed(step_workflows), reversed(results), strict=True)
            if result.rows
        }
        groups = [group for workflow, row in rows.items() if (group := _group_from(db, *workflow, *row)) is not None]
        if not set(found).isdisjoint(groups):
            raise PersistenceError("MySQL", f"its index gave {groups} after {found}, and they would be looked for without end")
        found += groups
        # The statements of a workflow look further and further away; the nearest row counts.
        next_steps = [(step, (group.workflow, group.version)) for group in groups for step in _after(db, group)]
        steps = [step for step, _ in next_steps]
        step_workflows = [workflow for _, workflow in next_steps]
    return found


def _after(db: Session, group: DueGroup) -> list[Statement]:
    """The statements that look for the next group: with the same priority, in the same queue, and in the queues after it."""
    same_priority = [] if group.is_started else [_NEXT.format("AND queue = ?4 AND priority = ?5 AND $is_started = 1")]
    return [
        *(db.statement(template, *group[:4]) for template in same_priority),
        db.statement(_NEXT.format("AND queue = ?4 AND priority > ?5"), *group[:4]),
        db.statement(_NEXT.format("AND queue > ?4"), *group[:3]),
    ]


async def next_wake_at(db: Session, groups: Sequence[DueGroup], now: int) -> int | None:
    """The next instant after `now` at which a run of these groups comes due by time alone."""
    wake_ats: list[int] = []
    for chunk in chunks(groups, _MAX_SELECTS):
        params = Parameters()
        after = params.one(now)
        # Not min(): where PostgreSQL expects few rows, it would read every run that sleeps.
        selects = [
            f"SELECT (SELECT wake_at FROM $runs $by_wake WHERE {group.condition(params)} AND wake_at > {after} "
            "ORDER BY wake_at LIMIT 1)"
            for group in chunk
        ]
        rows = await db.all(" UNION ALL ".join(selects), *params.values)
        wake_ats += [wake_at for row in rows if (wake_at := _instant(row[0])) is not None]
    return min(wake_ats, default=None)


def _instant(value: Any) -> int | None:
    """The instant, or None for NULL and for what is none: SQLite holds text in a column of numbers, behind all of them."""
    try:
        return None if value is None else int(value)
    except UNREADABLE:
        return None


async def due_by_group(db: Session, limit: int, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed, longest due first, for dialects without an index of all due runs."""
    groups = _groups_from(db, await db.all(_GROUPS.format(_FIRST_OF_ALL, _OF_NEXT_WORKFLOW)))
    due: list[tuple[int, str]] = []
    for chunk in chunks(groups, _MAX_SELECTS):
        params = Parameters()
        until = "(SELECT $clock)" if now is None else params.one(now)
        most = params.one(limit)
        pages = (
            f"SELECT * FROM (SELECT wake_at, id FROM $runs WHERE {group.condition(params)} AND wake_at <= {until} "
            f"ORDER BY wake_at, id LIMIT {most})"
            for group in chunk
        )
        for at, value in await db.all(" UNION ALL ".join(pages), *params.values):
            run_id = db.tables.values.id_from(value)
            if run_id is not None:
                due.append((int(at), run_id))
    return [run_id for _, run_id in sorted(due)[:limit]]
