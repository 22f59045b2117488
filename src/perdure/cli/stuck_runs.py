"""Which runs do not go on by themselves: those that met a problem, and those that no worker has claimed in time."""

from __future__ import annotations

from typing import Final

from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import RunInfo, RunRow, Status, check_positive
from perdure.store import OperatorStore, Store, require

# A run that has been due for longer should have been claimed: workers look every few seconds.
_OVERDUE_AFTER: Final = 60 * MICROSECOND
_PAGE: Final = 1000
# Only runs in these keep a problem.
_WITH_PROBLEM: Final[tuple[Status, ...]] = ("pending", "running")


async def stuck_runs(store: Store, *, workflow: str | None, status: Status | None, prefix: str, limit: int) -> list[RunInfo]:
    """Up to `limit` runs that have a problem, or have been due for more than a minute and were not claimed."""
    operators = require(store, "operators")
    check_positive(limit, "limit")
    found: dict[str, RunInfo] = {}
    for each in _WITH_PROBLEM:
        if status in (None, each):
            await _add_problems(store, found, workflow=workflow, status=each, prefix=prefix, limit=limit)
    limited = await require(store, "schedules").queue_limits() if "schedules" in store.capabilities else {}
    now = (await store.claim(0, 1.0, ())).now  # a claim of no run tells the store's time
    for run_id in await _due_since(operators, now - _OVERDUE_AFTER):
        if len(found) >= limit:
            break
        row = await store.get(run_id)
        if row is not None and run_id.startswith(prefix) and workflow in (None, row.workflow) and status in (None, row.status):
            found.setdefault(run_id, _overdue(row, now, is_limited=row.queue in limited))
    return list(found.values())


async def _add_problems(
    store: Store, found: dict[str, RunInfo], *, workflow: str | None, status: Status, prefix: str, limit: int
) -> None:
    before: tuple[int, str] | None = None
    while page := await store.list(prefix=prefix, status=status, workflow=workflow, before=before, limit=_PAGE):
        for info in page:
            if info.problem is not None and len(found) < limit:
                found[info.id] = info
        if len(page) < _PAGE or len(found) >= limit:
            return
        before = instant(page[-1].updated_at), page[-1].id


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
    return RunInfo.of(row.id, row.workflow, row.version, row.status, row.updated_at, problem)
