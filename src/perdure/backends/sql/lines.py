"""Whose turn it is: the due runs, by priority, then longest due, then by id.

Runs that may come due lie in one index by (workflow, queue, priority, wake_at). A claim visits each distinct (workflow, queue,
priority) with one seek, and reads from each only as many due rows as it could use, page by page. So its cost does not depend on
how many runs sleep, belong to other workflows or wait behind a queue's limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from perdure.backends.sql.room import Room
from perdure.backends.sql.session import Given, Session, Statement
from perdure.backends.sql.tables import in_pieces

_MAX_SELECTS: Final = 100

# A loose index scan: from the first row of a group straight to the first row of the next. Not a comparison of row values, for
# which SQLite would read through the rows of the present group.
_FIRST: Final = (
    "SELECT (SELECT id FROM $runs WHERE namespace = ?1 AND $may_wake AND workflow = {} ORDER BY queue, priority LIMIT 1)"
)
_GROUPS: Final = """
    WITH RECURSIVE first (id) AS (
        {}
        UNION ALL
        SELECT coalesce(
            (SELECT id FROM $runs WHERE namespace = ?1 AND $may_wake AND workflow = here.workflow
                AND queue = here.queue AND priority > here.priority ORDER BY priority LIMIT 1),
            (SELECT id FROM $runs WHERE namespace = ?1 AND $may_wake AND workflow = here.workflow
                AND queue > here.queue ORDER BY queue, priority LIMIT 1)
        )
        FROM first $each_of $runs AS here $each_where here.namespace = ?1 AND here.id = first.id $each_end
    )
    SELECT here.workflow, here.queue, here.priority
    FROM first $each_of $runs AS here $each_where here.namespace = ?1 AND here.id = first.id $each_end
"""
# The same step by step, for MySQL: it finds a row by an index only if it is told the values and not where they stand.
_NEXT: Final = """
    SELECT queue, priority FROM $runs $by_wake WHERE namespace = ?1 AND $may_wake AND workflow = ?2 {}
    ORDER BY queue, priority LIMIT 1
"""


class Group(NamedTuple):
    """Runs that may come due and are alike to a claim."""

    workflow: str
    queue: str
    priority: int

    def condition(self, given: Given) -> str:
        """What picks them."""
        places = given.one(self.workflow), given.one(self.queue), given.one(self.priority)
        return "namespace = ?1 AND $may_wake AND workflow = {} AND queue = {} AND priority = {}".format(*places)


class Turn(NamedTuple):
    """A due run."""

    wake_at: int
    id: str
    queue: str
    limit_key: str | None


class Line:
    """The due runs of one group, as far as they were read."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.turns: deque[Turn] = deque()
        self.is_read = False
        self._last: Turn | None = None

    def page(self, given: Given, room: Room, now: int, size: int) -> str:
        """What reads on."""
        conditions = [self.group.condition(given), f"wake_at <= {given.one(now)}"]
        if self._last is not None:
            at = given.one(self._last.wake_at)
            conditions.append(f"wake_at >= {at} AND (wake_at > {at} OR id > {given.one(self._last.id)})")
        full = room.full_keys(self.group.queue)
        if full:
            conditions.append(f"(limit_key IS NULL OR limit_key NOT IN ({given.many(full)}))")
        due = " AND ".join(conditions)
        return f"SELECT wake_at, id, limit_key FROM $runs $by_wake WHERE {due} ORDER BY wake_at, id LIMIT {size}"

    def add(self, turns: Sequence[Turn], size: int) -> None:
        """What was read, of `size` that were asked for."""
        self.turns.extend(turns)
        self.is_read = len(turns) < size
        self._last = turns[-1] if turns else self._last


class Lines:
    """All lines of a claim, and the room there is."""

    def __init__(self, db: Session, groups: Iterable[Group], room: Room, now: int, limit: int) -> None:
        self._db = db
        self._room = room
        self._now = now
        self._size = limit + 20
        by_priority = groupby(sorted(groups, key=lambda group: -group.priority), key=lambda group: group.priority)
        self._levels = deque([Line(group) for group in alike] for _, alike in by_priority)

    async def next(self, number: int) -> list[Turn]:
        """The runs whose turn it is, at most so many; each is counted into its queue."""
        picked: list[Turn] = []
        while self._levels and len(picked) < number:
            turn = await self._front(self._levels[0])
            if turn is None:
                self._levels.popleft()
            elif self._room.take(turn.queue, turn.limit_key):
                picked.append(turn)
        return picked

    async def _front(self, lines: Sequence[Line]) -> Turn | None:
        """The next of these lines, or None when they are at their end."""
        open_lines = [line for line in lines if self._room.queue_is_open(line.group.queue)]
        await self._read([line for line in open_lines if not line.turns and not line.is_read])
        waiting = [line for line in open_lines if line.turns]
        return min(waiting, key=lambda line: line.turns[0]).turns.popleft() if waiting else None

    async def _read(self, lines: Sequence[Line]) -> None:
        db, name = self._db, self._db.tables.values.name_from
        statements: list[Statement] = []
        for line in lines:
            given = Given()
            page = line.page(given, self._room, self._now, self._size)
            statements.append(db.statement(page, *given.values))
        for line, result in zip(lines, await db.send(statements), strict=True):
            rows = [Turn(int(at), name(run_id), line.group.queue, key and name(key)) for at, run_id, key in result.rows]
            line.add(rows, self._size)


async def groups_of(db: Session, workflows: Sequence[str], queues: frozenset[str] | None) -> list[Group]:
    """Every group of these workflows, in these queues or in all, in which a run may come due."""
    look = _groups_step_by_step if db.tables.dialect.name == "mysql" else _groups
    found = [group for piece in in_pieces(workflows, _MAX_SELECTS) for group in await look(db, piece)]
    return [group for group in found if queues is None or group.queue in queues]


async def _groups(db: Session, workflows: Sequence[str]) -> list[Group]:
    given, name = Given(), db.tables.values.name_from
    firsts = " UNION ALL ".join(_FIRST.format(given.one(workflow)) for workflow in workflows)
    rows = await db.all(_GROUPS.format(firsts), *given.values)
    return [Group(name(workflow), name(queue), int(priority)) for workflow, queue, priority in rows]


async def _groups_step_by_step(db: Session, workflows: Sequence[str]) -> list[Group]:
    found: list[Group] = []
    steps = [db.statement(_NEXT.format(""), workflow) for workflow in workflows]
    of = list(workflows)
    while steps:
        results = await db.send(steps)
        rows = {workflow: result.rows[0] for workflow, result in zip(reversed(of), reversed(results), strict=True) if result.rows}
        name = db.tables.values.name_from
        there = [Group(workflow, name(queue), int(priority)) for workflow, (queue, priority) in rows.items()]
        found += there
        # Of the two answers for a workflow the first one counts, if there is one.
        steps = [step for group in there for step in _after(db, group)]
        of = [group.workflow for group in there for _ in range(2)]
    return found


def _after(db: Session, group: Group) -> list[Statement]:
    """What looks for a group in the same queue, and what looks in the queues after it."""
    return [
        db.statement(_NEXT.format("AND queue = ?3 AND priority > ?4"), *group),
        db.statement(_NEXT.format("AND queue > ?3"), group.workflow, group.queue),
    ]


async def next_wake_at(db: Session, groups: Sequence[Group], now: int) -> int | None:
    """When a run of these groups will come due, as far as time alone decides."""
    wake_ats: list[int] = []
    for piece in in_pieces(groups, _MAX_SELECTS):
        given = Given()
        after = given.one(now)
        selects = [
            f"SELECT min(wake_at) FROM $runs $by_wake WHERE {group.condition(given)} AND wake_at > {after}" for group in piece
        ]
        wake_ats += [int(row[0]) for row in await db.all(" UNION ALL ".join(selects), *given.values) if row[0] is not None]
    return min(wake_ats, default=None)
