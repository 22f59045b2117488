"""Broken creation, broken claims, broken counting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from perdure.backends.base.leases import is_due
from perdure.backends.memory.store import MemoryStore
from perdure.model.journal import Entry
from perdure.model.records import Claim, Claims, Created, Lease, NewRun, Pulse, Schedule
from tests.contract.broken.table import breaks


@breaks("another_input_under_the_same_id_is_a_conflict")
@breaks("the_same_start_again_gives_the_run_that_is_there")
class LastCreateWins(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        await self.delete(run.id)
        return await super().create(run, **options)


@breaks("many_creators_make_one_run")
class LooksBeforeItCreates(LastCreateWins):
    async def create(self, run: NewRun, **options: Any) -> Created:
        found = await self.get(run.id)
        await asyncio.sleep(0)
        if found is None:
            return await super().create(run, **options)
        return Created(run=found, is_new=False)


@breaks("a_deleted_run_leaves_nothing")
@breaks("epochs_grow_over_a_deletion")
@breaks("an_epoch_is_at_least_the_time")
class EpochsCountFromOne(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        created = await super().create(run, **options)
        if created.claim is None:
            return created
        with self._lock() as namespace:
            namespace.runs[run.id].change(epoch=1)
            row = namespace.runs[run.id].row
        lease = msgspec.structs.replace(created.claim.lease, epoch=1)
        return Created(run=row, is_new=True, claim=msgspec.structs.replace(created.claim, lease=lease, run=row))


@breaks("many_workers_keep_to_the_limit")
@breaks("an_expired_lease_has_one_successor")
@breaks("no_run_is_given_to_two_callers")
class ChoosesThenMarks(MemoryStore):
    """Takes its pick, thinks, and leases what it picked, though others may have picked the same."""

    async def claim(self, limit: int, ttl: float, *which: Any, now: int | None = None, **options: Any) -> Claims:
        with self._lock() as namespace:
            before = {run_id: replace(run) for run_id, run in namespace.runs.items()}
        picked = await super().claim(limit, ttl, *which, now=now, **options)
        with self._lock() as namespace:
            namespace.runs.update(before)
        await asyncio.sleep(0)
        with self._lock() as namespace:
            claims = [namespace.runs[claim.run.id].grant_lease(ttl, now or 0) for claim in picked.claims]
        return Claims(claims=claims, next_wake_at=None, now=picked.now)


@breaks("one_of_many_acquires_one_run")
@breaks("acquire_refuses_a_leased_run")
@breaks("a_lease_is_alive_until_its_end")
class TakesLeasedRuns(MemoryStore):
    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        with self._lock() as namespace:
            return namespace.find(run_id).grant_lease(ttl, now or 0)


@breaks("runs_that_cannot_be_claimed_delay_no_others")
@breaks("a_full_queue_delays_no_other_run")
class LimitsBeforeItFilters(MemoryStore):
    async def claim(self, limit: int, ttl: float, *which: Any, now: int | None = None, **options: Any) -> Claims:
        with self._lock() as namespace:
            due = [run.row for run in namespace.claimable() if is_due(run.row, now or 0)]
            names = {row.id for row in sorted(due, key=lambda row: -row.priority)[:limit]}
            hidden, namespace.live = namespace.live, namespace.live & names
        try:
            return await super().claim(limit, ttl, *which, now=now, **options)
        finally:
            namespace.live = hidden


@breaks("a_lease_is_alive_until_its_end")
@breaks("a_run_is_due_at_once_or_at_its_start")
class GoesByItsOwnClock(MemoryStore):
    async def claim(self, limit: int, ttl: float, *which: Any, now: int | None = None, **options: Any) -> Claims:
        return await super().claim(limit, ttl, *which, **options)


@breaks("a_claim_has_the_time_of_the_store")
class ClaimsWithoutTime(MemoryStore):
    async def claim(self, *args: Any, now: int | None = None, **options: Any) -> Claims:
        claims = await super().claim(*args, now=now, **options)
        return msgspec.structs.replace(claims, now=now or 0)


@breaks("attempts_count_claims_without_progress")
class AttemptsOnlyGrow(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        pulse = await super().record(lease, entries, **options)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].claimed_length += len(entries)
        return pulse


@breaks("a_released_attempt_does_not_count")
class ReleaseCounts(MemoryStore):
    async def release(self, lease: Lease, **options: Any) -> None:
        row = await self.get(lease.run_id)
        await super().release(lease, **options)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].change(attempts=row.attempts if row else 0)


@breaks("firing_leaves_a_run_that_exists_alone")
@breaks("two_processes_fire_a_schedule_once")
@breaks("an_instant_can_be_passed_over")
class FiresTwice(MemoryStore):
    """Reads the schedule, thinks, and fires."""

    async def fire(self, schedule_id: str, *, run: NewRun | None, **options: Any) -> bool:
        known = {schedule.id: schedule for schedule in await self.schedules()}
        await asyncio.sleep(0)
        schedule: Schedule | None = known.get(schedule_id)
        if schedule is None or schedule.next_at != options["expected_at"]:
            return False
        await self.put_schedule(msgspec.structs.replace(schedule, next_at=options["next_at"]))
        return run is None or (await self.create(run, now=options["now"])).is_new


@breaks("a_schedule_fires_once_for_each_instant")
class FiresAlways(MemoryStore):
    async def fire(self, schedule_id: str, *, run: NewRun | None, **options: Any) -> bool:
        if run is not None:
            await self.create(run, now=options["now"])
        return True


@breaks("suspects_are_claimed_a_few_at_a_time")
class TakesAllSuspects(MemoryStore):
    async def claim(self, limit: int, ttl: float, *which: Any, suspects: int | None = None, **options: Any) -> Claims:
        return await super().claim(limit, ttl, *which, **options)


@breaks("suspects_delay_no_other_run")
class StopsAtASuspect(MemoryStore):
    """Picks as many as it may lease, and passes over suspects afterwards."""

    async def claim(self, limit: int, ttl: float, *which: Any, now: int | None = None, **options: Any) -> Claims:
        with self._lock() as namespace:
            due = [run.row for run in namespace.claimable() if is_due(run.row, now or 0)]
            first = {row.id for row in sorted(due, key=lambda row: (-row.priority, row.wake_at or 0, row.id))[:limit]}
            hidden, namespace.live = namespace.live, namespace.live & first
        try:
            return await super().claim(limit, ttl, *which, now=now, **options)
        finally:
            namespace.live = hidden


@breaks("only_a_run_that_lost_its_holders_is_a_suspect")
class SuspectsByAttemptsAlone(MemoryStore):
    async def claim(self, limit: int, ttl: float, *which: Any, suspects: int | None = None, **options: Any) -> Claims:
        with self._lock() as namespace:
            before = set(namespace.live)
            if suspects is not None:
                namespace.live = {run_id for run_id in before if namespace.runs[run_id].row.attempts < 2}
        try:
            return await super().claim(limit, ttl, *which, suspects=suspects, **options)
        finally:
            namespace.live = before
