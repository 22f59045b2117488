"""Broken queue limits and rates."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from perdure.backends.memory.store import MemoryStore
from perdure.model.records import Claim, Claims, Created, Lease, NewRun, QueueLimits, Signal
from tests.contract.broken.table import breaks


@breaks("no_more_runs_are_claimed_than_the_queue_allows")
@breaks("each_limit_key_has_its_own_limit")
@breaks("both_limits_hold_together")
@breaks("leases_from_before_the_limit_count")
@breaks("a_rate_lets_runs_start_evenly")
class NoQueueLimits(MemoryStore):
    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        with self._lock():
            pass


@breaks("create_gives_no_lease_in_a_limited_queue")
class LeasesWhatItCreates(MemoryStore):
    """The lease that `create` gives was not limited once."""

    async def create(self, run: NewRun, *, ttl: float | None = None, **options: Any) -> Created:
        created = await super().create(run, ttl=ttl, **options)
        if created.claim is not None or ttl is None or not created.is_new:
            return created
        with self._lock() as namespace:
            claim = namespace.runs[run.id].grant_lease(ttl, options["now"])
        return Created(run=claim.run, is_new=True, claim=claim)


@breaks("acquire_keeps_to_the_limits")
@breaks("acquire_spends_the_rate")
@breaks("many_acquires_keep_to_the_limit")
class AcquiresWithoutLimits(MemoryStore):
    """The lease that `acquire` gives was not limited once."""

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        with self._lock() as namespace:
            run = namespace.find(run_id)
            return run.grant_lease(ttl, now or 0) if run.can_acquire(now or 0, due_only=due_only) else None


@breaks("many_acquires_keep_to_the_limit")
class CountsThenAcquires(MemoryStore):
    """Counts, thinks, and leases although others may have done so since."""

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        with self._lock() as namespace:
            row = namespace.find(run_id).row
            has_room = namespace.queue_counter(now or 0).has_room(row.queue, row.limit_key)
        await asyncio.sleep(0)
        with self._lock() as namespace:
            return namespace.find(run_id).grant_lease(ttl, now or 0) if has_room else None


@breaks("a_rate_holds_back_first_leases_alone")
@breaks("a_slow_queue_delays_no_other_run")
class RateForEveryLease(MemoryStore):
    """Every lease counts as a start."""

    async def claim(self, *args: Any, now: int | None = None, **options: Any) -> Claims:
        with self._lock() as namespace:
            rows = {run_id: run.row for run_id, run in namespace.runs.items()}
            for run_id in namespace.live:
                namespace.runs[run_id].change(epoch=0)
        claims = await super().claim(*args, now=now, **options)
        with self._lock() as namespace:
            for run_id in rows.keys() - {claim.run.id for claim in claims.claims}:
                namespace.runs[run_id].change(epoch=rows[run_id].epoch)
        return claims


@breaks("a_rate_lets_runs_start_evenly")
@breaks("many_workers_keep_to_the_rate")
class RateForEachProcess(MemoryStore):
    """Every handle knows its own starts only, as a limiter in the process does."""

    async def claim(self, *args: Any, now: int | None = None, **options: Any) -> Claims:
        own: dict[str, int] = self.__dict__.setdefault("_own_starts", {})
        with self._lock() as namespace:
            namespace.last_starts = own
        return await super().claim(*args, now=now, **options)


@breaks("a_rate_lets_runs_start_evenly")
class SavesUpStarts(MemoryStore):
    """After a pause as many runs start as could have started during it."""

    async def claim(self, limit: int, ttl: float, *which: Any, now: int | None = None, **options: Any) -> Claims:
        claims = await super().claim(limit, ttl, *which, now=now, **options)
        with self._lock() as namespace:
            for queue, last_start in namespace.last_starts.items():
                namespace.last_starts[queue] = min(last_start, (now or 0) - 1)
        return claims


@breaks("a_rate_is_spent_by_starts_alone")
class SpendsTheRateInVain(MemoryStore):
    """Spends the rate for the first due run, which then has no room."""

    async def claim(self, *args: Any, now: int | None = None, **options: Any) -> Claims:
        claims = await super().claim(*args, now=now, **options)
        with self._lock() as namespace:
            namespace.last_starts.update(dict.fromkeys(namespace.limits, now or 0))
        return claims


@breaks("a_claim_says_when_the_rate_lets_the_next_run_start")
class ForgetsWhatItHeldBack(MemoryStore):
    async def claim(self, *args: Any, **options: Any) -> Claims:
        claims = await super().claim(*args, **options)
        with self._lock() as namespace:
            leased = [run.row.lease_until for run in namespace.runs.values() if run.row.lease_until is not None]
        return msgspec.structs.replace(claims, next_wake_at=min(leased, default=None))


@breaks("setting_a_rate_again_does_not_reset_it")
class EveryWorkerResetsTheRate(MemoryStore):
    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        await super().limit_queue(queue, QueueLimits())
        await super().limit_queue(queue, limits)


@breaks("a_rate_does_not_hold_back_a_restored_run")
class RestoredRunsStartAgain(MemoryStore):
    async def restore(self, run: Any, *args: Any, **options: Any) -> None:
        await super().restore(run, *args, **options)
        with self._lock() as namespace:
            namespace.runs[run.id].change(epoch=0)


@breaks("a_limit_can_be_lifted")
class KeepsEmptyLimits(MemoryStore):
    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        with self._lock_and_wake() as namespace:
            namespace.limits[queue] = limits


@breaks("watch_is_woken_by_new_limits")
class LimitsInSilence(MemoryStore):
    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        with self._lock() as namespace:
            namespace.limits[queue] = limits


@breaks("watch_is_woken_by_room_in_a_limited_queue")
class WakesForDueRunsAlone(MemoryStore):
    """A run that waits for a signal is not due: but it has made room."""

    async def suspend(self, lease: Lease, *, wake_at: int | None, **options: Any) -> list[Signal]:
        if wake_at is not None:
            return await super().suspend(lease, wake_at=wake_at, **options)
        with self._lock() as namespace:
            self._find_leased(namespace, lease).suspend(wake_at, options["waiting_for"], options.get("now") or 0)
        return []
