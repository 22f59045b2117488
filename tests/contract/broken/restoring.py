"""Broken restores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.memory.database import Namespace
from perdure.backends.memory.store import MemoryStore
from perdure.errors import LeaseHeld
from perdure.model.journal import Entry
from perdure.model.records import RunRow, Signal
from tests.contract.broken.table import breaks


@breaks("a_restored_run_is_there_as_it_was_given")
@breaks("a_restored_journal_is_no_progress")
class RestoresAttempts(MemoryStore):
    """A restore after which something is not as promised."""

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        with self._lock() as namespace:
            known = namespace.runs.get(run.id)
            before = None if known is None else replace(known)
        await super().restore(run, entries, inbox, now=now)
        with self._lock() as namespace:
            self.spoil(namespace, namespace.runs[run.id], run, before)

    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(attempts=given.attempts)


@breaks("a_restored_run_is_there_as_it_was_given")
@breaks("restored_runs_are_listed_counted_and_purged_like_others")
class RestoresWhenItWasChanged(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(updated_at=given.updated_at)


@breaks("a_restored_pending_run_is_due_when_it_says")
class RestoredRunsAreDueNow(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if stored.row.wake_at is not None:
            stored.change(wake_at=stored.row.updated_at)


@breaks("a_restored_pending_run_is_due_when_it_says")
class RestoresRunsThatAreNeverDue(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(wake_at=given.wake_at)


@breaks("a_restored_running_run_is_pending")
class RestoresLeases(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(status=given.status, lease_owner=given.lease_owner, lease_until=given.lease_until)


@breaks("a_restored_suspended_run_wakes_as_before")
class RestoreForgetsWhatARunWaitsFor(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(waiting_for=())


@breaks("a_restored_suspended_run_wakes_as_before")
class RestoreWakesTheSleeping(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if stored.row.status == "suspended":
            stored.change(status="pending", wake_at=stored.row.updated_at)


@breaks("a_restored_run_does_not_sleep_through_what_it_waits_for")
class RestoresTheGivenSleep(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if stored.row.status == "suspended":
            stored.change(wake_at=given.wake_at)


@breaks("a_restored_run_that_has_ended_stays_so")
class RestoresEndsThatAreDue(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        namespace.live.add(given.id)
        stored.change(wake_at=given.wake_at)


@breaks("a_restored_run_that_has_ended_stays_so")
class RestoresEndsWithoutTheirOutcome(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(outcome=None)


@breaks("restoring_replaces_everything_of_the_run")
class RestoreKeepsTheOldEntries(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if before is not None:
            stored.entries = {**before.entries, **stored.entries}


@breaks("restoring_replaces_everything_of_the_run")
class RestoreKeepsTheOldInbox(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if before is not None:
            stored.inbox = {**before.inbox, **stored.inbox}


@breaks("restoring_replaces_everything_of_the_run")
class RestoreKeepsTheOldItems(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if before is not None:
            stored.items = before.items


@breaks("restoring_replaces_everything_of_the_run")
class RestoreKeepsTheOldColumns(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if before is not None:
            stored.change(outcome=given.outcome or before.row.outcome, progress=given.progress or before.row.progress)


@breaks("restoring_leaves_other_runs_alone")
class RestoreFoldsIds(MemoryStore):
    async def restore(self, run: RunRow, *rest: Any, **options: Any) -> None:
        await super().restore(msgspec.structs.replace(run, id=run.id.lower()), *rest, **options)


@breaks("restored_payloads_are_opaque_bytes")
class RestoredPayloadsAreText(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(seed=given.seed.decode(errors="replace").encode())


@breaks("a_restored_run_goes_on_after_its_journal")
class RestoreStampsEntries(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.entries = {seq: msgspec.structs.replace(entry, epoch=stored.row.epoch) for seq, entry in stored.entries.items()}


@breaks("a_restored_run_goes_on_after_its_journal")
class RestoreClosesGapsInTheJournal(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], *rest: Any, **options: Any) -> None:
        close = [msgspec.structs.replace(entry, seq=seq) for seq, entry in enumerate(entries, 1)]
        await super().restore(run, close, *rest, **options)


@breaks("a_restored_inbox_is_consumed_like_any_other")
@breaks("a_restored_run_is_there_as_it_was_given")
class RestoreNumbersTheInboxAnew(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        ordered = sorted(inbox, key=lambda row: row.seq)
        await super().restore(
            run, entries, [msgspec.structs.replace(row, seq=seq) for seq, row in enumerate(ordered, 1)], **options
        )


@breaks("a_live_lease_keeps_a_run_from_being_restored")
class RestoresUnderALiveLease(MemoryStore):
    async def restore(self, run: RunRow, *rest: Any, **options: Any) -> None:
        with self._lock() as namespace:
            if run.id in namespace.runs:
                namespace.runs[run.id].change(lease_until=None)
        await super().restore(run, *rest, **options)


@breaks("a_live_lease_keeps_a_run_from_being_restored")
class RestoresNothingThatWasEverLeased(MemoryStore):
    async def restore(self, run: RunRow, *rest: Any, **options: Any) -> None:
        known = await self.get(run.id)
        if known is not None and known.status == "running":
            raise LeaseHeld(run.id, "a worker, once")
        await super().restore(run, *rest, **options)


@breaks("a_live_lease_keeps_a_run_from_being_restored")
class RestoreWipesBeforeItRefuses(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], *rest: Any, **options: Any) -> None:
        with self._lock() as namespace:
            if run.id in namespace.runs:
                namespace.runs[run.id].entries.clear()
        await super().restore(run, entries, *rest, **options)


@breaks("a_lease_of_a_restored_run_cannot_write")
@breaks("a_live_lease_keeps_a_run_from_being_restored")
class RestoreLeavesTheOldHolder(RestoresAttempts):
    """The row is replaced, but the columns by which writes are fenced are not."""

    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if before is not None:
            stored.token = before.token
            stored.change(epoch=before.row.epoch)


@breaks("epochs_grow_over_a_restore")
@breaks("a_restored_run_is_there_as_it_was_given")
class RestoresTheGivenEpoch(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(epoch=given.epoch)


@breaks("epochs_grow_over_a_restore")
class RestoresUnderTheEpochOfTheClock(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(epoch=stored.row.updated_at)


@breaks("a_hold_outlasts_a_restore")
class RestoresTheGivenHold(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(held=given.held)


@breaks("a_hold_outlasts_a_restore")
class RestoreForgetsTheGivenHold(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(held=before is not None and before.row.held)


@breaks("a_restore_that_contradicts_itself_is_refused")
class LastOfARestoreWins(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        kept = {entry.seq: entry for entry in entries if entry.seq > 0}
        await super().restore(run, list(kept.values()), inbox, **options)


@breaks("a_restore_that_contradicts_itself_is_refused")
class RestoresWhatWasConsumed(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        await super().restore(run, entries, [msgspec.structs.replace(row, consumed_by=None) for row in inbox], **options)


@breaks("a_restored_child_notifies_its_parent_when_it_ends_here")
class RestoreTellsTheParent(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if stored.row.ended:
            self._notify_parent(namespace, stored, stored.row.updated_at)


@breaks("a_restored_child_notifies_its_parent_when_it_ends_here")
class RestoreForgetsTheParent(RestoresAttempts):
    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        stored.change(parent_id=None, parent_key=None)


@breaks("restored_runs_are_listed_counted_and_purged_like_others")
class RestoreLeavesTheDeadDead(RestoresAttempts):
    """What says which runs may come due is not kept up to date."""

    def spoil(self, namespace: Namespace, stored: InMemoryRun, given: RunRow, before: InMemoryRun | None) -> None:
        if before is not None and before.row.ended:
            namespace.live.discard(given.id)


@breaks("a_run_is_restored_or_taken_but_not_both")
@breaks("a_stale_worker_adds_nothing_to_a_restored_run")
class RestoresTheRowBeforeTheRest(MemoryStore):
    """The new row is there first, and the journal follows."""

    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        with self._lock() as namespace:
            known = namespace.runs.get(run.id)
            before = None if known is None else replace(known)
        await super().restore(run, (), (), **options)
        with self._lock() as namespace:
            stored = namespace.runs[run.id]
            if before is not None:
                stored.token, stored.entries = before.token, before.entries
                stored.change(epoch=before.row.epoch)
        await asyncio.sleep(0)
        with self._lock() as namespace:
            namespace.runs[run.id].entries.update({entry.seq: entry for entry in entries})
            namespace.runs[run.id].inbox.update({row.seq: row for row in inbox})


@breaks("of_many_restores_one_is_there_whole")
class RestoresPieceByPiece(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        await super().restore(run, entries, (), **options)
        for row in inbox:
            await asyncio.sleep(0)
            with self._lock() as namespace:
                namespace.runs[run.id].inbox[row.seq] = row


@breaks("watch_is_woken_by_restore")
class RestoresQuietly(MemoryStore):
    async def restore(self, *what: Any, **options: Any) -> None:
        watchers, self._database.watchers = self._database.watchers, {}
        await super().restore(*what, **options)
        self._database.watchers |= watchers


@breaks("a_run_is_purged_or_reopened_but_not_both")
class PurgesWhatItSawAsOld(MemoryStore):
    """Looks for old runs, and deletes them although they have changed since, if they have ended again."""

    async def purge(self, older_than: float, *, now: int | None = None, **options: Any) -> int:
        last = (now or 0) - round(older_than * 1_000_000)
        with self._lock() as namespace:
            old = [run.row.id for run in namespace.runs.values() if run.row.ended and run.row.updated_at <= last]
        await asyncio.sleep(0)
        with self._lock() as namespace:
            chosen = [run_id for run_id in old if run_id in namespace.runs and namespace.runs[run_id].row.ended]
            for run_id in chosen:
                namespace.remove(run_id)
        return len(chosen)
