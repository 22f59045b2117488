"""Which runs do not go on by themselves: those that met a problem, and those that no worker has claimed in time."""

from __future__ import annotations

from typing import Final

import msgspec

from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import RunInfo, RunRow, Status
from perdure.model.run_filter import RunFilter
from perdure.store import OperatorStore, Store, require

# A run that has been due for longer should have been claimed: workers look every few seconds.
_OVERDUE_AFTER: Final = 60 * MICROSECOND
_PAGE: Final = 1000
# Only runs in these keep a problem.
_WITH_PROBLEM: Final[tuple[Status, ...]] = ("pending", "running")


async def stuck_runs(store: Store, wanted: RunFilter, limit: int, now: int | None) -> list[RunInfo]:
    """Up to `limit` runs that have a problem, or have been due for more than a minute and were not claimed."""
    operators = require(store, "operators")
    found = await _runs_with_problem(store, wanted, limit)
    if len(found) < limit:
        limited = await require(store, "schedules").queue_limits() if "schedules" in store.capabilities else {}
        at = (await store.claim(0, 1.0, (), now=now)).now  # a claim of no run tells the store's time
        for run_id in await _due_since(operators, at - _OVERDUE_AFTER):
            row = None if run_id in found else await store.get(run_id)
            if row is not None and wanted.matches(row):
                found[run_id] = _overdue(row, at, is_limited=row.queue in limited)
            if len(found) >= limit:
                break
    return list(found.values())


async def _runs_with_problem(store: Store, wanted: RunFilter, limit: int) -> dict[str, RunInfo]:
    found: dict[str, RunInfo] = {}
    statuses = tuple(status for status in _WITH_PROBLEM if status in wanted.statuses)
    if not statuses:
        return found
    with_problem, before = msgspec.structs.replace(wanted, status=statuses), None
    while page := await store.list(with_problem, before=before, limit=_PAGE):
        found |= {info.id: info for info in page if info.problem is not None}
        if len(page) < _PAGE or len(found) >= limit:
            break
        before = instant(page[-1].updated_at), page[-1].id
    return dict(list(found.items())[:limit])


async def _due_since(store: OperatorStore, at: int) -> list[str]:
    """The ids of all runs that were due at `at` and still are."""
    count = _PAGE
    while len(ids := await store.due(now=at, limit=count)) == count:
        count *= 4
    return list(ids)


def _overdue(row: RunRow, now: int, *, is_limited: bool) -> RunInfo:
    late = (now - (row.wake_at or row.updated_at)) // MICROSECOND
    why = f"; its queue {row.queue!r} has limits" if is_limited else ""
    problem = row.problem or f"due for {late} s, and no worker has claimed it{why}"
    return msgspec.structs.replace(RunInfo.of(row), problem=problem)
