"""Broken late inputs: runs that were restored without what they were started with."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec

from perdure.backends.memory.store import MemoryStore
from perdure.errors import RunConflict
from perdure.model.records import Claim, Created, NewRun, RunRow
from tests.contract.broken.table import breaks


@breaks("a_run_that_lacks_its_input_is_given_to_no_worker")
class RestoredRunsAreDueWithoutInput(MemoryStore):
    async def restore(self, run: RunRow, *rest: Any, **options: Any) -> None:
        await super().restore(run, *rest, **options)
        with self._lock_and_wake() as namespace:
            stored = namespace.runs[run.id]
            stored.change(status=run.status, wake_at=run.wake_at, waiting_for=run.waiting_for)


@breaks("a_run_that_lacks_its_input_is_given_to_no_worker")
class CancelMakesEverythingDue(MemoryStore):
    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        await super().cancel(run_id, now=now)
        with self._lock_and_wake() as namespace:
            namespace.runs[run_id].wake(now or 0)


@breaks("a_run_that_lacks_its_input_is_given_to_no_worker")
class ReopenMakesEverythingDue(MemoryStore):
    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        await super().reopen(run_id, drop, now=now)
        with self._lock_and_wake() as namespace:
            namespace.runs[run_id].wake(now or 0)


@breaks("a_run_that_lacks_its_input_is_given_to_no_worker")
class GivesWhateverIsNamed(MemoryStore):
    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        if due_only:
            return await super().acquire(run_id, ttl, now=now)
        with self._lock() as namespace:
            return namespace.find(run_id).grant_lease(ttl, now or 0)


@breaks("the_first_create_brings_a_restored_run_its_input")
@breaks("an_ended_run_takes_its_input_and_stays_ended")
class NoInputIsAnotherInput(MemoryStore):
    """A create after which something is not as promised, if it found a run that lacked its input."""

    async def create(self, run: NewRun, **options: Any) -> Created:
        found = await self.get(run.id)
        if found is None or not found.lacks_input:
            return await super().create(run, **options)
        return await self.bring(found, run, **options)

    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        raise RunConflict(run.id, "another input")

    def change(self, run_id: str, **columns: Any) -> Created:
        with self._lock_and_wake() as namespace:
            namespace.runs[run_id].change(**columns)
            return Created(run=namespace.runs[run_id].row, is_new=False)


@breaks("the_first_create_brings_a_restored_run_its_input")
class TakesTheSeedToo(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        await MemoryStore.create(self, run, **options)
        return self.change(run.id, seed=run.seed, metadata=run.metadata)


@breaks("the_first_create_brings_a_restored_run_its_input")
class TakesTheInputAlone(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        await MemoryStore.create(self, run, **options)
        kept = {name: getattr(found, name) for name in ("queue", "priority", "limit_key", "deadline")}
        return self.change(run.id, **kept)


@breaks("the_first_create_brings_a_restored_run_its_input")
class StartsAfresh(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        await self.delete(run.id)
        return await MemoryStore.create(self, run, **options)


@breaks("the_first_create_brings_a_restored_run_its_input")
class LeasesWhatItFound(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        created = await MemoryStore.create(self, run, **options)
        with self._lock() as namespace:
            claim = namespace.runs[run.id].grant_lease(options["ttl"] or 1, options["now"])
        return msgspec.structs.replace(created, claim=claim)


@breaks("a_run_with_its_input_is_due_at_once")
class WaitsForItsStartThoughCancelled(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        await MemoryStore.create(self, run, **options)
        return self.change(run.id, wake_at=run.start_at or options["now"])


@breaks("a_run_with_its_input_is_due_at_once")
@breaks("watch_is_woken_by_input")
class IsNeverDue(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        watchers, self._database.watchers = self._database.watchers, {}
        await MemoryStore.create(self, run, **options)
        self._database.watchers |= watchers
        with self._lock() as namespace:
            namespace.runs[run.id].change(wake_at=None)
            return Created(run=namespace.runs[run.id].row, is_new=False)


@breaks("a_restored_run_takes_the_input_of_its_own_workflow")
class TakesTheInputOfAnyWorkflow(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        self.change(run.id, workflow=run.workflow)
        return await MemoryStore.create(self, run, **options)


@breaks("a_restored_run_takes_the_input_of_its_own_workflow")
class NoWorkflowIsAnotherWorkflow(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        if found.workflow != run.workflow:
            raise RunConflict(run.id, "another workflow")
        return await MemoryStore.create(self, run, **options)


@breaks("a_restored_run_takes_its_input_once")
class TakesEveryInput(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        with self._lock() as namespace:
            if run.id in namespace.runs:
                namespace.runs[run.id].change(input_hash=b"")
        return await super().create(run, **options)


@breaks("an_ended_run_takes_its_input_and_stays_ended")
class InputMakesEverythingDue(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        await MemoryStore.create(self, run, **options)
        return self.change(run.id, status="pending", wake_at=options["now"])


@breaks("a_parent_can_bring_a_restored_child_its_input")
class LeavesOrphans(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        return await MemoryStore.create(self, msgspec.structs.replace(run, parent_id=None, parent_key=None), **options)


@breaks("a_parent_can_bring_a_restored_child_its_input")
class TakesAnotherParent(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        await MemoryStore.create(self, run, **options)
        return self.change(run.id, parent_id=run.parent_id, parent_key=run.parent_key)


@breaks("many_inputs_for_one_restored_run")
class LooksThenTakesTheInput(NoInputIsAnotherInput):
    async def bring(self, found: RunRow, run: NewRun, **options: Any) -> Created:
        await asyncio.sleep(0)
        with self._lock() as namespace:
            namespace.runs[run.id].row = found
        return await MemoryStore.create(self, run, **options)
