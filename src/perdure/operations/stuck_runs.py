"""Which runs do not go on by themselves.

They have met a problem, no worker has claimed them in time, or their worker gives no sign of life but renews its leases: the
renewals come from a thread of their own, so its event loop is blocked.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from perdure.errors import SnapshotCorrupt
from perdure.model.durations import MICROSECOND, instant
from perdure.model.records import RunInfo, RunRow, Status
from perdure.model.run_filter import RunFilter
from perdure.operations.describe_run import worker_of
from perdure.store import OperatorStore, Store, require
from perdure.worker.host import Host
from perdure.worker.worker import OVERDUE_AFTER
from perdure.worker.worker_registry import LONGEST_PAUSE, SILENT_AFTER_PAUSES, WorkerInfo, list_workers

_PAGE: Final = 1000
# After how long without a sign of life every worker is silent.
_SILENCE: Final = round(SILENT_AFTER_PAUSES * LONGEST_PAUSE * MICROSECOND)
# Only runs in these keep a problem.
_WITH_PROBLEM: Final[tuple[Status, ...]] = ("pending", "running")


async def stuck_runs(host: Host, wanted: RunFilter, limit: int) -> list[RunInfo]:
    """Return up to `limit` runs that have a problem, were not claimed in more than a minute, or whose worker is blocked."""
    store, operators = host.store, require(host.store, "operators")
    found = await _runs_with_problem(store, wanted, limit)
    if len(found) < limit:
        at = (await store.claim(0, 1.0, (), now=host.clock.store_now())).now  # a claim of no run tells the store's time
        workers = await _registered(host)
        queues = _Queues(workers, await _limited_queues(store))
        for run_id in await _due_since(operators, at - OVERDUE_AFTER):
            row = None if run_id in found else await store.get(run_id)
            if row is not None and wanted.matches(row):
                found[run_id] = _overdue(row, at, queues.why_waiting(row.queue))
            if len(found) >= limit:
                break
        for info in await _runs_of_silent_workers(store, wanted, _silent(workers), at) if len(found) < limit else ():
            found.setdefault(info.id, info)
    return list(found.values())[:limit]


async def _runs_of_silent_workers(store: Store, wanted: RunFilter, silent: Mapping[str, datetime], at: int) -> list[RunInfo]:
    """Return the runs whose leases are renewed by workers that give no other sign of life.

    `silent` says when each of them gave the last one, by its name.
    """
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


async def _registered(host: Host) -> Sequence[WorkerInfo]:
    """Return the workers on the store; none if a row of the registry is damaged, which `runtime.workers()` reports."""
    try:
        return await list_workers(host)
    except SnapshotCorrupt:
        return ()


async def _limited_queues(store: Store) -> Collection[str]:
    return await require(store, "schedules").queue_limits() if "schedules" in store.capabilities else ()


class _Queues(NamedTuple):
    """The workers, as far as they are known, and the queues that have limits."""

    workers: Sequence[WorkerInfo]
    limited: Collection[str]

    def why_waiting(self, queue: str) -> str:
        """Return why a run of this queue was not claimed, as the end of a sentence."""
        alive = [worker for worker in self.workers if worker.is_alive]
        if alive and not any(worker.takes(queue) for worker in alive):
            return f"no worker takes its queue {queue!r}"
        return f"no worker has claimed it{f'; its queue {queue!r} has limits' if queue in self.limited else ''}"


def _silent(workers: Sequence[WorkerInfo]) -> dict[str, datetime]:
    """Return when the workers that are silent were last seen, by what a lease says of its holder.

    Leases name a process, so a process that has another worker, or has one again, is left out.
    """
    alive = {name for worker in workers if not worker.is_silent for name in _names(worker)}
    seen = {name: worker.seen_at for worker in sorted(workers, key=lambda each: each.seen_at) for name in _names(worker)}
    return {name: at for name, at in seen.items() if name not in alive}


def _names(worker: WorkerInfo) -> tuple[str, ...]:
    return (worker.name, f"process {worker.pid}") if worker.host == socket.gethostname() else (worker.name,)


def _overdue(row: RunRow, now: int, why: str) -> RunInfo:
    late = (now - (row.wake_at or row.updated_at)) // MICROSECOND
    lost = ""
    if row.status == "running":
        lost = f"its worker {worker_of(row)} has not renewed its lease, and may be dead or blocked; "
    problem = row.problem or f"{lost}due for {late} s, and {why}"
    return msgspec.structs.replace(RunInfo.of(row), problem=problem)
