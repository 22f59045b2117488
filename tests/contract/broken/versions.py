"""Broken versions: ignored, changed, lost, or in the way of others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from perdure.backends.base.leases import is_due
from perdure.backends.memory.store import MemoryStore
from perdure.model.records import Claims, Created, NewRun, RunInfo, RunRow
from perdure.model.run_filter import EVERY_RUN, RunFilter
from tests.contract.broken.table import breaks


@breaks("claim_takes_only_the_versions_it_was_asked_for")
class ClaimsEveryVersion(MemoryStore):
    async def claim(self, limit: int, ttl: float, workflows: Collection[tuple[str, int]], *which: Any, **options: Any) -> Claims:
        names = {name for name, _ in workflows}
        with self._lock() as namespace:
            versions = {run.row.version for run in namespace.runs.values()}
        return await super().claim(limit, ttl, [(name, one) for name in names for one in versions], *which, **options)


@breaks("runs_of_other_versions_delay_no_others")
class LooksAtAPageOfDueRuns(MemoryStore):
    """Reads a hundred due runs of the workflow, and only then looks at their versions."""

    async def claim(self, limit: int, ttl: float, *which: Any, now: int | None = None, **options: Any) -> Claims:
        with self._lock() as namespace:
            due = [run.row for run in namespace.claimable() if is_due(run.row, now or 0)]
            page = {row.id for row in sorted(due, key=lambda row: -row.priority)[:100]}
            hidden, namespace.live = namespace.live, {one for one in namespace.live if one in page}
        try:
            return await super().claim(limit, ttl, *which, now=now, **options)
        finally:
            namespace.live = hidden


@breaks("a_run_stays_in_its_version")
class TheLastCreateSetsTheVersion(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        created = await super().create(run, **options)
        with self._lock() as namespace:
            namespace.runs[run.id].change(version=run.version)
            return Created(run=namespace.runs[run.id].row, is_new=created.is_new, claim=created.claim)


@breaks("a_list_shows_versions")
class ListsTheFirstVersion(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, **options: Any) -> list[RunInfo]:
        return [msgspec.structs.replace(line, version=1) for line in await super().list(wanted, **options)]


@breaks("a_fired_run_has_its_version")
class FiresTheFirstVersion(MemoryStore):
    async def fire(self, schedule_id: str, *, run: NewRun | None, **options: Any) -> bool:
        first = run if run is None else msgspec.structs.replace(run, version=1)
        return await super().fire(schedule_id, run=first, **options)


@breaks("a_restored_run_keeps_its_version")
class RestoresTheFirstVersion(MemoryStore):
    async def restore(self, run: RunRow, *given: Any, **options: Any) -> None:
        await super().restore(run, *given, **options)
        with self._lock() as namespace:
            namespace.runs[run.id].change(version=1)


@breaks("due_has_runs_of_every_version")
class DueInTheFirstVersion(MemoryStore):
    async def due(self, **options: Any) -> list[str]:
        with self._lock() as namespace:
            first = {run_id for run_id, run in namespace.runs.items() if run.row.version == 1}
        return [run_id for run_id in await super().due(**options) if run_id in first]
