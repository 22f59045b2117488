"""What is read without a lease: journals, streams, lists, counts, what is due; and the purge, which goes by the same lists.

Runs lie in one index by (workflow, status, updated_at, id). A list merges its groups, so it reads no more rows than it gives,
whatever its filter; only with a prefix it reads and sorts the runs with that prefix. A run moves between the groups, so what
takes more than one statement is read `at_one_moment`: otherwise it could be missed, or met twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from perdure.backends.base.process_owner import Owners
from perdure.backends.sqlite import claims, inbox, runs
from perdure.backends.sqlite.rows import ENTRY_COLUMNS, clock, entries_from
from perdure.backends.sqlite.schema import Session
from perdure.model.journal import Entry
from perdure.model.records import ENDED, STATUSES, Claim, Item, RunInfo, Status

P = ParamSpec("P")
T = TypeVar("T")

_JOURNAL: Final = f"SELECT {ENTRY_COLUMNS} FROM $steps WHERE namespace = ?1 AND run_id = ?2 AND seq > ?3 ORDER BY seq"
_ITEMS: Final = """
    SELECT n, payload FROM $items WHERE namespace = ?1 AND run_id = ?2 AND stream = ?3 AND n > ?4 ORDER BY n LIMIT ?5
"""
_STREAMS: Final = """
    WITH RECURSIVE found(stream) AS (
        SELECT min(stream) FROM $items WHERE namespace = ?1 AND run_id = ?2
        UNION ALL
        SELECT (SELECT min(stream) FROM $items WHERE namespace = ?1 AND run_id = ?2 AND stream > found.stream)
        FROM found WHERE found.stream IS NOT NULL
    )
    SELECT stream, (SELECT max(n) + 1 FROM $items WHERE namespace = ?1 AND run_id = ?2 AND stream = found.stream)
    FROM found WHERE stream IS NOT NULL
"""
_WORKFLOWS: Final = """
    WITH RECURSIVE found(workflow) AS (
        SELECT min(workflow) FROM $runs WHERE namespace = ?1
        UNION ALL
        SELECT (SELECT min(workflow) FROM $runs WHERE namespace = ?1 AND workflow > found.workflow)
        FROM found WHERE found.workflow IS NOT NULL
    )
    SELECT workflow FROM found WHERE workflow IS NOT NULL
"""
_NEWEST: Final = """
    SELECT id, workflow, status, updated_at FROM $runs WHERE namespace = ?1 AND workflow = ?2 AND status = ?3
    ORDER BY updated_at DESC, id
"""
_NEWEST_BEFORE: Final = """
    SELECT id, workflow, status, updated_at FROM $runs
    WHERE namespace = ?1 AND workflow = ?2 AND status = ?3 AND updated_at <= ?4 AND (updated_at < ?4 OR id > ?5)
    ORDER BY updated_at DESC, id
"""
# The unary plus keeps the planner on the primary key.
_WITH_PREFIX: Final = """
    FROM $runs WHERE namespace = ?1 AND id >= ?2 AND id < ?3
    AND (?4 IS NULL OR +status = ?4) AND (?5 IS NULL OR +workflow = ?5)
"""
_LIST_PREFIX: Final = f"""
    SELECT id, workflow, status, updated_at {_WITH_PREFIX} AND (?6 IS NULL OR +updated_at < ?6 OR (+updated_at = ?6 AND id > ?7))
    ORDER BY +updated_at DESC, id LIMIT ?8
"""
_COUNT_PREFIX: Final = f"SELECT count(*) {_WITH_PREFIX}"
_COUNT: Final = "SELECT count(*) FROM $runs WHERE namespace = ?1 AND workflow = ?2 AND status = ?3"
_OLDEST: Final = """
    SELECT updated_at, id FROM $runs WHERE namespace = ?1 AND workflow = ?2 AND status = ?3 AND updated_at <= ?4
    ORDER BY updated_at LIMIT ?5
"""


def at_one_moment(db: Session, read: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a read of several statements gives; no commit of others comes between them."""
    connection = db.link.connection
    connection.execute("BEGIN")
    try:
        return read(db, *args, **kwargs)
    finally:
        if connection.in_transaction:  # SQLite ends it by itself after some errors
            connection.execute("ROLLBACK")


def journal(db: Session, run_id: str, after: int = 0) -> list[Entry]:
    """The entries above `after`, by seq."""
    return entries_from(db.all(_JOURNAL, run_id, after))


def items(db: Session, run_id: str, stream: str, after: int, limit: int) -> list[Item]:
    """Items of a stream above `after`, in order."""
    rows = db.all(_ITEMS, run_id, stream, after, max(limit, 0))
    return [Item(stream=stream, n=n, payload=payload) for n, payload in rows]


def load(db: Session, taken: Iterable[claims.Taken]) -> list[Claim]:
    """The claims for runs that were leased. To be called at one moment, after it."""
    return [_load(db, one) for one in taken]


def _load(db: Session, taken: claims.Taken) -> Claim:
    run_id = taken.lease.run_id
    return Claim(
        lease=taken.lease,
        run=taken.run,
        journal=journal(db, run_id),
        inbox=inbox.unconsumed(db, run_id),
        inbox_seq=inbox.last_seq(db, run_id),
        item_counts=dict(db.all(_STREAMS, run_id)),
    )


def after_prefix(prefix: str) -> str | bytes:
    """The least value above every text that begins with `prefix`. SQLite sorts text by its bytes, and blobs after text."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return b""
    last = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if last == 0xD800 else last)  # surrogates are no text


def list_runs(
    db: Session, prefix: str, status: Status | None, workflow: str | None, before: tuple[int, str] | None, limit: int
) -> list[RunInfo]:
    """Runs, last changed first, ties by id."""
    limit = max(limit, 0)
    if prefix:
        seen = before or (None, None)
        rows: Iterable[Any] = db.all(_LIST_PREFIX, prefix, after_prefix(prefix), status, workflow, *seen, limit)
    else:
        sources = [_newest(db, group, before) for group in _groups(db, status, workflow)]
        rows = islice(heapq.merge(*sources, key=lambda row: (-row[3], row[0])), limit)
    return [RunInfo.of(*row) for row in rows]


def _newest(db: Session, group: tuple[str, str], before: tuple[int, str] | None) -> Iterator[tuple[Any, ...]]:
    if before is None:
        return db.each(_NEWEST, *group)
    return db.each(_NEWEST_BEFORE, *group, *before)


def _groups(db: Session, status: str | None, workflow: str | None) -> list[tuple[str, str]]:
    workflows = [workflow] if workflow is not None else [name for (name,) in db.all(_WORKFLOWS)]
    statuses = [status] if status is not None else sorted(STATUSES)
    return [(name, one) for name in workflows for one in statuses]


def count(db: Session, prefix: str, status: Status | None, workflow: str | None) -> int:
    """How many runs there are."""
    if prefix:
        return _number(db.one(_COUNT_PREFIX, prefix, after_prefix(prefix), status, workflow))
    return sum(_number(db.one(_COUNT, *group)) for group in _groups(db, status, workflow))


def _number(row: tuple[Any, ...] | None) -> int:
    return 0 if row is None else int(row[0])


def due(db: Session, limit: int, owners: Owners, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed, longest due first; what a dead process held comes last."""
    at = clock(now)
    rows = heapq.merge(*(claims.due_in(db, group, at) for group in claims.groups(db)), key=lambda row: (row[0], row[1]))
    ids = [row[1] for row in islice(rows, max(limit, 0))]
    for owner in claims.gone_owners(db, owners):
        ids += claims.freed_by(db, owner, at)
    return ids[: max(limit, 0)]


def purge(db: Session, age: int, limit: int, now: int | None) -> int:
    """Delete runs that ended `age` microseconds ago or earlier, oldest first."""
    until = clock(now) - age
    ended = [group for status in sorted(ENDED) for group in _groups(db, status, None)]
    old = heapq.merge(*(db.all(_OLDEST, *group, until, max(limit, 0)) for group in ended))
    ids = [run_id for _, run_id in islice(old, max(limit, 0))]
    for run_id in ids:
        runs.delete(db, run_id)
    return len(ids)
