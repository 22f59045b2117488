"""Which runs do not go on by themselves.

They have met a problem, no worker has claimed them in time, or their worker gives no sign of life but renews its leases: the
renewals come from a thread of their own, so its event loop is blocked.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import RunInfo, RunRow, Status
from perdure.model.run_filter import RunFilter
from perdure.operations.describe_run import worker_of
from perdure.store import OperatorStore, Store, require
from perdure.worker.worker_registry import LONGEST_PAUSE, SILENT_AFTER_PAUSES, WorkerInfo

# A run that has been due for longer should have been claimed: workers look every few seconds.
_OVERDUE_AFTER: Final = 60 * MICROSECOND
_PAGE: Final = 1000
# After how long without a sign of life every worker is silent.
_SILENCE: Final = round(SILENT_AFTER_PAUSES * LONGEST_PAUSE * MICROSECOND)
# Only runs in these keep a problem.
_WITH_PROBLEM: Final[tuple[Status, ...]] = ("pending", "running")


async def stuck_runs(
    store: Store, workers: Sequence[WorkerInfo], wanted: RunFilter, limit: int, now: int | None
) -> list[RunInfo]:
    """Up to `limit` runs that have a problem, were not claimed in more than a minute, or whose worker is blocked."""
    silent = _silent(workers)
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
        for info in await _runs_of_silent_workers(store, wanted, silent, at) if len(found) < limit else ():
            found.setdefault(info.id, info)
    return list(found.values())[:limit]


async def _runs_of_silent_workers(store: Store, wanted: RunFilter, silent: Mapping[str, datetime], at: int) -> list[RunInfo]:
    """The runs whose leases are renewed by workers of which nothing else is seen. `silent` has when that was, by their names."""
    found: list[RunInfo] = []
    if not silent or "running" not in wanted.statuses:
        return found
    for info in await store.list(msgspec.structs.replace(wanted, status=("running",)), limit=_PAGE):
        row = await store.get(info.id)
        worker = None if row is None else worker_of(row)
        seen_at = None if worker is None else silent.get(worker)
        if row is None or seen_at is None or row.lease_until is None or row.lease_until <= at:
            continue
        if row.updated_at > instant(seen_at) + _SILENCE:  # otherwise it may have died after its last renewal
            late = (at - instant(seen_at)) // MICROSECOND
            problem = f"its worker {worker} gave no sign of life for {late} s, but renews its lease: its event loop is blocked"
            found.append(msgspec.structs.replace(info, problem=row.problem or problem))
    return found


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


def _silent(workers: Sequence[WorkerInfo]) -> dict[str, datetime]:
    """When the workers that are silent were last seen, by what a lease says of its holder.

    Leases name a process, so a process that has another worker, or has one again, is left out.
    """
    alive = {name for worker in workers if not worker.is_silent for name in _names(worker)}
    seen = {name: worker.seen_at for worker in sorted(workers, key=lambda each: each.seen_at) for name in _names(worker)}
    return {name: at for name, at in seen.items() if name not in alive}


def _names(worker: WorkerInfo) -> tuple[str, ...]:
    return (worker.name, f"process {worker.pid}") if worker.host == socket.gethostname() else (worker.name,)


def _overdue(row: RunRow, now: int, *, is_limited: bool) -> RunInfo:
    late = (now - (row.wake_at or row.updated_at)) // MICROSECOND
    why = f"; its queue {row.queue!r} has limits" if is_limited else ""
    lost = (
        f"its worker {worker_of(row)} has not renewed its lease, and may be dead or blocked; " if row.status == "running" else ""
    )
    problem = row.problem or f"{lost}due for {late} s, and no worker has claimed it{why}"
    return msgspec.structs.replace(RunInfo.of(row), problem=problem)
