"""Lost wake-ups, broken signals and broken ends."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.memory.database import Namespace
from perdure.backends.memory.store import MemoryStore
from perdure.errors import PersistenceError
from perdure.model.records import Lease, Schedule, Signal
from tests.contract.broken.table import breaks


@breaks("no_cancel_is_lost_between_request_and_sleep")
@breaks("no_child_outcome_is_lost_between_inbox_and_sleep")
@breaks("no_signal_is_lost_between_inbox_and_sleep")
class SleepyStore(MemoryStore):
    """Looks into the inbox, thinks, and goes to sleep whatever has come meanwhile."""

    async def suspend(self, lease: Lease, **options: Any) -> list[Signal]:
        arrived = [row for row in await self.inbox(lease.run_id) if row.address in options.get("waiting_for", ())]
        row = await self.get(lease.run_id)
        await asyncio.sleep(0)
        if arrived or row is None:
            return arrived
        with self._lock_and_wake() as namespace:
            run = self._find_leased(namespace, lease)
            wake_at = options["now"] if row.cancel_requested else options["wake_at"]
            run.free(status="suspended", wake_at=wake_at, waiting_for=tuple(options["waiting_for"]))
        return []


@breaks("a_signal_that_is_there_keeps_the_run_awake")
class SuspendsAnyway(MemoryStore):
    async def suspend(self, lease: Lease, **options: Any) -> list[Signal]:
        arrived = [row for row in await self.inbox(lease.run_id) if row.address in options.get("waiting_for", ())]
        await super().suspend(lease, **{**options, "waiting_for": ()})
        return arrived


@breaks("a_cancel_request_keeps_a_run_from_sleeping")
class SleepsThroughACancel(MemoryStore):
    async def suspend(self, lease: Lease, **options: Any) -> list[Signal]:
        with self._lock() as namespace:
            run = self._find_leased(namespace, lease)
            requested = run.row.cancel_requested
            run.change(cancel_requested=False)
        arrived = await super().suspend(lease, **options)
        with self._lock():
            run.change(cancel_requested=requested)
        return arrived


@breaks("a_signal_after_the_end_is_refused")
@breaks("many_senders_with_one_dedupe_make_one_row")
@breaks("a_repeated_dedupe_is_the_first_signal_again")
class SignalsTheDead(MemoryStore):
    async def signal(self, run_id: str, name: str, payload: bytes, **options: Any) -> int:
        with self._lock_and_wake() as namespace:
            return namespace.find(run_id).deliver(name, payload, **options)


@breaks("signals_are_kept_in_order_of_arrival")
class LastInFirstOut(MemoryStore):
    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        return (await super().inbox(run_id, after=after))[::-1]


@breaks("no_verb_gives_a_consumed_row")
class TakesEmptyTextForNobody(MemoryStore):
    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        return [msgspec.structs.replace(row, consumed_by="") for row in await super().inbox(run_id, after=after)]


@breaks("a_signal_wakes_the_run_that_waits_for_it")
class AnySignalWakes(MemoryStore):
    async def signal(self, run_id: str, name: str, payload: bytes, **options: Any) -> int:
        seq = await super().signal(run_id, name, payload, **options)
        with self._lock_and_wake() as namespace:
            namespace.runs[run_id].wake(options["now"])
        return seq


@breaks("a_finished_child_notifies_its_parent")
@breaks("many_children_notify_one_parent")
class FinishForgetsTheParent(MemoryStore):
    def _notify_parent(self, namespace: Namespace, child: InMemoryRun, now: int) -> None:
        child.change(parent_notified=True)


@breaks("a_finished_child_notifies_its_parent")
class TellsTheParentWithoutWakingIt(MemoryStore):
    def _notify_parent(self, namespace: Namespace, child: InMemoryRun, now: int) -> None:
        parent = namespace.runs.get(child.row.parent_id or "")
        wake_at = None if parent is None else parent.row.wake_at
        super()._notify_parent(namespace, child, now)
        if parent is not None:
            parent.change(wake_at=wake_at)


@breaks("a_child_has_ended_when_its_parent_is_told")
class TellsTheParentFirst(MemoryStore):
    async def finish(self, lease: Lease, *end: Any, **options: Any) -> None:
        with self._lock() as namespace:
            run = self._find_leased(namespace, lease)
            parent = namespace.runs.get(run.row.parent_id or "")
            if parent is not None and run.row.parent_key is not None:
                parent.deliver(run.row.parent_key, end[1], "child", now=options["now"])
                run.change(parent_id=None)
        for _ in range(3):
            await asyncio.sleep(0)
        await super().finish(lease, *end, **options)


@breaks("a_parent_may_wait_for_a_thousand_children")
class WaitsForFewNames(MemoryStore):
    async def suspend(self, lease: Lease, *, waiting_for: Collection[Any] = (), **options: Any) -> list[Signal]:
        return await super().suspend(lease, waiting_for=list(waiting_for)[:500], **options)


@breaks("a_child_without_a_parent_key_notifies_no_parent")
class InsistsOnAKey(MemoryStore):
    def _notify_parent(self, namespace: Namespace, child: InMemoryRun, now: int) -> None:
        if child.row.parent_id is not None and child.row.parent_key is None:
            raise PersistenceError(child.row.id, "an inbox row must have a name")
        super()._notify_parent(namespace, child, now)


@breaks("only_an_unsuccessful_end_can_be_reopened")
class ReopensEverything(MemoryStore):
    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        with self._lock() as namespace:
            namespace.find(run_id).change(status="failed")
        await super().reopen(run_id, drop, now=now)


@breaks("a_failed_run_can_be_reopened")
class ReopenErasesHistory(MemoryStore):
    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        await super().reopen(run_id, drop, now=now)
        with self._lock() as namespace:
            run = namespace.runs[run_id]
            run.entries = {seq: entry for seq, entry in run.entries.items() if entry.key not in drop}


@breaks("cancel_makes_an_unheld_run_due")
class CancelOnlyMarks(MemoryStore):
    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        with self._lock() as namespace:
            namespace.find(run_id).change(cancel_requested=True)


@breaks("cancel_leaves_the_lease_of_a_driven_run")
@breaks("calls_from_outside_do_not_disturb_the_holder")
class CancelTakesTheLease(MemoryStore):
    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        with self._lock_and_wake() as namespace:
            namespace.find(run_id).free(cancel_requested=True, status="pending", wake_at=now)


@breaks("a_held_run_waits_for_its_operator")
@breaks("only_a_known_run_can_be_held")
class HoldsNothing(MemoryStore):
    async def hold(self, run_id: str) -> None:
        with self._lock():
            pass


@breaks("purge_takes_these_statuses_and_this_workflow")
class PurgesOfAnyStatus(MemoryStore):
    async def purge(self, older_than: float, *, workflow: str | None = None, **options: Any) -> int:
        options.pop("status", None)
        return await super().purge(older_than, workflow=workflow, **options)


@breaks("purge_takes_these_statuses_and_this_workflow")
class PurgesOfAnyWorkflow(MemoryStore):
    async def purge(self, older_than: float, *, workflow: str | None = None, **options: Any) -> int:
        return await super().purge(older_than, **options)


@breaks("purge_leaves_a_run_that_was_reopened")
class PurgesByCreation(MemoryStore):
    async def purge(self, older_than: float, *, now: int | None = None, **options: Any) -> int:
        with self._lock() as namespace:
            for run in namespace.runs.values():
                run.row = msgspec.structs.replace(run.row, updated_at=run.row.created_at)
        return await super().purge(older_than, now=now, **options)


@breaks("purge_leaves_the_children_of_a_live_run")
class PurgesChildren(MemoryStore):
    async def purge(self, older_than: float, **options: Any) -> int:
        with self._lock() as namespace:
            for run in namespace.runs.values():
                run.row = msgspec.structs.replace(run.row, parent_id=None)
        return await super().purge(older_than, **options)


@breaks("purge_leaves_the_children_of_a_live_run")
class LimitsBeforeItLooksAtParents(MemoryStore):
    async def purge(self, older_than: float, *, limit: int = 1000, **options: Any) -> int:
        with self._lock() as namespace:
            oldest = sorted((run.row.updated_at, run.row.id) for run in namespace.runs.values() if run.row.ended)[:limit]
            has_child = any(namespace.runs[run_id].row.parent_id in namespace.live for _, run_id in oldest)
        return 0 if has_child else await super().purge(older_than, limit=limit, **options)


@breaks("purge_deletes_only_old_ended_runs")
@breaks("purge_takes_the_oldest_first")
class PurgesEverything(MemoryStore):
    async def purge(self, older_than: float, **options: Any) -> int:
        with self._lock() as namespace:
            count = len(namespace.runs)
            namespace.runs.clear()
            namespace.live.clear()
            return count


@breaks("watch_is_woken_by_create")
@breaks("watch_is_woken_by_signal")
class HearsNothing(MemoryStore):
    async def watch(self, timeout: float, *, items: bool = False) -> None:
        await asyncio.sleep(timeout)


@breaks("watch_returns_at_the_latest_after_its_timeout")
class NeverWaits(MemoryStore):
    async def watch(self, timeout: float, *, items: bool = False) -> None:
        with self._lock():
            pass


@breaks("closing_a_store_ends_its_watches")
class LeavesItsWatchersWaiting(MemoryStore):
    async def close(self) -> None:
        self._closed = True


@breaks("watch_is_woken_by_signal")
@breaks("watch_works_across_event_loops")
class WakesNoWatcher(MemoryStore):
    @contextmanager
    def _lock_and_wake(self) -> Iterator[Namespace]:
        with self._lock() as namespace:
            yield namespace


@breaks("watch_is_woken_by_put_schedule")
class SchedulesQuietly(MemoryStore):
    async def put_schedule(self, schedule: Schedule) -> None:
        with self._lock() as namespace:
            namespace.schedules[schedule.id] = schedule
