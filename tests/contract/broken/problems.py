"""Broken problems: lost, never cleared, counted as attempts, tried without a pause."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.backends.memory.store import MemoryStore
from perdure.model.records import NO_PROBLEM, Claim, Lease, RunInfo, RunRow, Signal
from perdure.model.run_filter import EVERY_RUN, RunFilter
from tests.contract.broken.table import breaks


@breaks("a_run_with_a_problem_is_pending_until_its_next_try")
class DueAtOnceAlways(MemoryStore):
    async def release(self, lease: Lease, *, wake_at: int | None = None, **options: Any) -> None:
        await super().release(lease, **options)


@breaks("a_run_that_goes_on_has_no_problem")
class SuspendsWithItsProblem(MemoryStore):
    async def suspend(self, lease: Lease, **options: Any) -> list[Signal]:
        row = await self.get(lease.run_id)
        arrived = await super().suspend(lease, **options)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].change(problem=None if row is None else row.problem)
        return arrived


@breaks("a_run_that_goes_on_has_no_problem")
@breaks("an_end_that_notifies_a_parent_clears_only_its_own_problem")
class EndsWithItsCount(MemoryStore):
    async def finish(self, lease: Lease, *given: Any, **options: Any) -> None:
        row = await self.get(lease.run_id)
        await super().finish(lease, *given, **options)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].change(problem_count=0 if row is None else row.problem_count)


@breaks("problems_in_a_row_are_counted")
class EveryProblemIsTheFirst(MemoryStore):
    async def acquire(self, run_id: str, ttl: float, **options: Any) -> Claim | None:
        with self._lock() as namespace:
            namespace.find(run_id).change(**NO_PROBLEM)
        return await super().acquire(run_id, ttl, **options)


@breaks("problems_count_no_attempts")
class ProblemsAreAttempts(MemoryStore):
    async def release(self, lease: Lease, *, problem: str | None = None, **options: Any) -> None:
        options["counts_attempt"] = problem is not None
        await super().release(lease, problem=problem, **options)


@breaks("a_failed_attempt_counts_when_it_is_released")
class NoReleaseCounts(MemoryStore):
    async def release(self, lease: Lease, *, counts_attempt: bool = False, **options: Any) -> None:
        await super().release(lease, **options)


@breaks("a_signal_or_a_cancel_makes_a_run_with_a_problem_due")
class SignalsWakeOnlyTheSuspended(MemoryStore):
    async def signal(self, run_id: str, name: str, payload: bytes, **options: Any) -> int:
        row = await self.get(run_id)
        seq = await super().signal(run_id, name, payload, **options)
        with self._lock() as namespace:
            if row is not None and row.status == "pending":
                namespace.runs[run_id].change(wake_at=row.wake_at)
        return seq


@breaks("a_run_that_does_not_fit_is_not_tried_without_a_pause")
class CancelledRunsSpin(MemoryStore):
    async def release(self, lease: Lease, *, now: int | None = None, **options: Any) -> None:
        await super().release(lease, now=now, **options)
        with self._lock() as namespace:
            run = namespace.runs[lease.run_id]
            if run.row.cancel_requested:
                run.change(wake_at=now)


@breaks("a_list_shows_problems")
class ListsNoProblems(MemoryStore):
    async def list(self, wanted: RunFilter = EVERY_RUN, **options: Any) -> list[RunInfo]:
        return [msgspec.structs.replace(line, problem=None) for line in await super().list(wanted, **options)]


@breaks("any_text_is_a_problem")
class CutsProblems(MemoryStore):
    async def release(self, lease: Lease, *, problem: str | None = None, **options: Any) -> None:
        await super().release(lease, problem=problem and problem[:255], **options)


@breaks("unhold_makes_a_run_with_a_problem_due")
class UnholdOnlyUnholds(MemoryStore):
    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        with self._lock_and_wake() as namespace:
            namespace.find(run_id).change(held=False)


@breaks("a_restored_run_keeps_its_problem")
class RestoresWithoutProblems(MemoryStore):
    async def restore(self, run: RunRow, *given: Any, **options: Any) -> None:
        await super().restore(run, *given, **options)
        with self._lock() as namespace:
            namespace.runs[run.id].change(**NO_PROBLEM)
