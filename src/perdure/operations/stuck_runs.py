"""Which runs do not go on by themselves: those that met a problem, and those that no worker has claimed in time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import msgspec

from perdure.errors import SnapshotCorrupt
from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import RunInfo, RunRow, Status
from perdure.model.run_filter import RunFilter
from perdure.store import OperatorStore, Store, require
from perdure.worker.host import Host
from perdure.worker.worker import OVERDUE_AFTER
from perdure.worker.worker_registry import WorkerInfo, list_workers

_PAGE: Final = 1000
# Only runs in these keep a problem.
_WITH_PROBLEM: Final[tuple[Status, ...]] = ("pending", "running")


async def stuck_runs(host: Host, wanted: RunFilter, limit: int) -> list[RunInfo]:
    """Up to `limit` runs that have a problem, or have been due for more than a minute and were not claimed."""
    store, operators = host.store, require(host.store, "operators")
    found = await _runs_with_problem(store, wanted, limit)
    if len(found) < limit:
        at = (await store.claim(0, 1.0, (), now=host.clock.store_now())).now  # a claim of no run tells the store's time
        overdue = await _due_since(operators, at - OVERDUE_AFTER)
        queues = await _Queues.of(host) if overdue else _Queues()
        for run_id in overdue:
            row = None if run_id in found else await store.get(run_id)
            if row is not None and wanted.matches(row):
                found[run_id] = _overdue(row, at, queues.why_waiting(row.queue))
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


class _Queues(NamedTuple):
    """The queues that have limits, and the workers that are alive, as far as they are known."""

    limited: Collection[str] = ()
    workers: Collection[WorkerInfo] = ()

    @classmethod
    async def of(cls, host: Host) -> _Queues:
        limited = await require(host.store, "schedules").queue_limits() if "schedules" in host.store.capabilities else {}
        try:
            return cls(limited, [worker for worker in await list_workers(host) if worker.is_alive])
        except SnapshotCorrupt:  # `runtime.workers()` reports it
            return cls(limited)

    def why_waiting(self, queue: str) -> str:
        """Return why a run of this queue was not claimed, as the end of a sentence."""
        if self.workers and not any(worker.takes(queue) for worker in self.workers):
            return f"no worker takes its queue {queue!r}"
        return f"no worker has claimed it{f'; its queue {queue!r} has limits' if queue in self.limited else ''}"


def _overdue(row: RunRow, now: int, why: str) -> RunInfo:
    late = (now - (row.wake_at or row.updated_at)) // MICROSECOND
    problem = row.problem or f"due for {late} s, and {why}"
    return msgspec.structs.replace(RunInfo.of(row), problem=problem)
