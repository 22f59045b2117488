"""Broken fences and broken records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.memory.database import MemoryDatabase, Namespace
from perdure.backends.memory.store import MemoryStore
from perdure.errors import LeaseLost
from perdure.model.journal import Entry
from perdure.model.records import EndStatus, Item, Lease, Pulse, QueueLimits, RunRow, Signal
from tests.contract.broken.table import breaks

_JOURNALS: Final[WeakKeyDictionary[MemoryDatabase, dict[str, list[Entry]]]] = WeakKeyDictionary()


@breaks("a_lease_superseded_by_claim_cannot_write")
@breaks("a_lease_of_a_finished_run_cannot_write")
@breaks("a_lease_of_a_run_restored_and_taken_cannot_write")
class NoFencing(MemoryStore):
    def _find_leased(self, namespace: Namespace, lease: Lease) -> InMemoryRun:
        if lease.run_id not in namespace.runs:
            raise LeaseLost(lease.run_id, lease.epoch)
        return namespace.runs[lease.run_id]


@breaks("a_lease_with_another_token_cannot_write")
@breaks("a_lease_of_a_run_recreated_in_the_same_instant_cannot_write")
class TokenIgnored(NoFencing):
    def _find_leased(self, namespace: Namespace, lease: Lease) -> InMemoryRun:
        run = super()._find_leased(namespace, lease)
        if run.row.epoch != lease.epoch or run.token is None:
            raise LeaseLost(lease.run_id, lease.epoch)
        return run


@breaks("a_lease_of_a_run_restored_in_the_same_instant_cannot_write")
class EpochsAlone(NoFencing):
    def _find_leased(self, namespace: Namespace, lease: Lease) -> InMemoryRun:
        run = super()._find_leased(namespace, lease)
        if run.row.epoch != lease.epoch:
            raise LeaseLost(lease.run_id, lease.epoch)
        return run


@breaks("a_lease_with_a_higher_epoch_cannot_write")
@breaks("a_lease_with_a_lower_epoch_cannot_write")
class EpochIgnored(NoFencing):
    def _find_leased(self, namespace: Namespace, lease: Lease) -> InMemoryRun:
        run = super()._find_leased(namespace, lease)
        if run.token != lease.token:
            raise LeaseLost(lease.run_id, lease.epoch)
        return run


class _EndsPlainRunsQuickly(MemoryStore):
    """Has a way of its own to end a run without a parent, if nothing is consumed."""

    def _is_holder(self, row: RunRow, token: str | None, lease: Lease) -> bool:
        raise NotImplementedError

    async def finish(
        self, lease: Lease, status: EndStatus, outcome: bytes, *, consume: Sequence[int] = (), **options: Any
    ) -> None:
        with self._lock() as namespace:
            run = namespace.runs[lease.run_id]
            if run.row.parent_id is None and not consume and self._is_holder(run.row, run.token, lease):
                lease = msgspec.structs.replace(lease, epoch=run.row.epoch, token=run.token or "")
        await super().finish(lease, status, outcome, consume=consume, **options)


@breaks("a_stale_lease_cannot_end_a_plain_run")
class EndsPlainRunsByTheirEpoch(_EndsPlainRunsQuickly):
    def _is_holder(self, row: RunRow, token: str | None, lease: Lease) -> bool:
        return row.epoch == lease.epoch


@breaks("a_stale_lease_cannot_end_a_plain_run")
class EndsPlainRunsByTheirToken(_EndsPlainRunsQuickly):
    def _is_holder(self, row: RunRow, token: str | None, lease: Lease) -> bool:
        return token == lease.token


@breaks("a_lease_of_a_recreated_run_cannot_write")
class FencedByIdAndLeaseOnly(NoFencing):
    def _find_leased(self, namespace: Namespace, lease: Lease) -> InMemoryRun:
        run = super()._find_leased(namespace, lease)
        if run.token is None or run.row.epoch > lease.epoch + 10**9:
            raise LeaseLost(lease.run_id, lease.epoch)
        return run


@breaks("a_lease_superseded_by_acquire_cannot_write")
class RenewRevivesAStaleLease(MemoryStore):
    def _renew(self, namespace: Namespace, lease: Lease, until: int, running_steps: bytes | None, now: int) -> Pulse | None:
        if lease.run_id in namespace.live:
            run = namespace.runs[lease.run_id]
            run.token = lease.token
            run.change(epoch=lease.epoch)
        return super()._renew(namespace, lease, until, running_steps, now)


@breaks("a_renewal_keeps_the_running_steps_of_each_run")
class RunningStepsAreForgotten(MemoryStore):
    def _renew(self, namespace: Namespace, lease: Lease, until: int, running_steps: bytes | None, now: int) -> Pulse | None:
        return super()._renew(namespace, lease, until, None, now)


@breaks("running_steps_end_with_their_lease")
class RunningStepsOutliveTheLease(MemoryStore):
    async def release(self, lease: Lease, *, now: int | None = None, **options: Any) -> None:
        before = await self.get(lease.run_id)
        await super().release(lease, now=now, **options)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].change(running_steps=None if before is None else before.running_steps)


@breaks("a_lease_that_was_released_and_taken_cannot_write")
class ReleaseByAnybody(MemoryStore):
    async def release(self, lease: Lease, *, now: int | None = None, **_: Any) -> None:
        with self._lock_and_wake() as namespace:
            if lease.run_id in namespace.live:
                namespace.runs[lease.run_id].free(status="pending", wake_at=now)


@breaks("a_lease_of_a_suspended_run_cannot_write")
class ReportByAnybody(MemoryStore):
    async def report(self, lease: Lease, progress: bytes) -> None:
        with self._lock() as namespace:
            namespace.runs[lease.run_id].change(progress=progress)


@breaks("an_expired_lease_writes_until_it_is_taken_over")
class ExpiryIsTheFence(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        if options["now"] > lease.until:
            raise LeaseLost(lease.run_id, lease.epoch)
        return await super().record(lease, entries, **options)


@breaks("an_expired_lease_streams_until_it_is_taken_over")
class ExpiryEndsTheStreams(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        if options.get("items") and options["now"] > lease.until:
            raise LeaseLost(lease.run_id, lease.epoch)
        return await super().record(lease, entries, **options)


@breaks("what_a_new_holder_loaded_is_all_there_is")
class RecordChecksFirstAndWritesLater(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        with self._lock() as namespace:
            run = self._find_leased(namespace, lease)
        await asyncio.sleep(0)
        run.write(lease, entries, options.get("consume", ()), options.get("items", ()))
        return run.pulse()


@breaks("a_run_is_ended_or_taken_over_but_not_both")
class FinishChecksFirstAndWritesLater(MemoryStore):
    async def finish(self, lease: Lease, status: EndStatus, outcome: bytes, **options: Any) -> None:
        with self._lock() as namespace:
            run = self._find_leased(namespace, lease)
        await asyncio.sleep(0)
        run.free(status=status, outcome=outcome, wake_at=None)


@breaks("a_wait_closes_and_its_signal_is_consumed_together")
class ConsumesBeforeItRecords(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        with self._lock() as namespace:
            namespace.runs[lease.run_id].write(lease, (), options.get("consume", ()))
        return await super().record(lease, entries, **{**options, "consume": ()})


@breaks("what_is_recorded_is_never_overwritten")
class LastRecordWins(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        with self._lock() as namespace:
            run = self._find_leased(namespace, lease)
            run.entries.update({entry.seq: entry for entry in entries})
        return await super().record(lease, (), **options)


@breaks("an_item_is_never_overwritten")
class LastItemWins(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), *, items: Sequence[Item] = (), **options: Any) -> Pulse:
        with self._lock() as namespace:
            self._find_leased(namespace, lease).items.update({(item.stream, item.n): item for item in items})
        return await super().record(lease, entries, **options)


@breaks("a_record_has_one_entry_for_each_seq")
@breaks("a_record_has_one_item_for_each_number")
class LastOfARecordWins(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        items = {(item.stream, item.n): item for item in options.pop("items", ())}
        return await super().record(
            lease, list({entry.seq: entry for entry in entries}.values()), items=list(items.values()), **options
        )


@breaks("only_what_is_in_the_inbox_can_be_consumed")
@breaks("a_restored_inbox_is_consumed_like_any_other")
class ConsumesWhatIsNotThere(MemoryStore):
    """Takes every number up to the highest for one that is there."""

    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        there = {row.seq for row in await self.inbox(lease.run_id)}
        return await super().record(
            lease, entries, **{**options, "consume": [seq for seq in options.get("consume", ()) if seq in there]}
        )


@breaks("a_lost_reply_can_be_sent_again")
class RepetitionIsAConflict(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        seqs = {entry.seq for entry in await self.journal(lease.run_id)}
        if seqs & {entry.seq for entry in entries}:
            raise LeaseLost(lease.run_id, lease.epoch)
        return await super().record(lease, entries, **options)


@breaks("a_record_does_not_touch_the_row")
class RecordTouchesTheRow(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        with self._lock() as namespace:
            self._find_leased(namespace, lease).change(updated_at=options["now"])
        return await super().record(lease, entries, **options)


@breaks("payloads_are_opaque_bytes")
class SignalsAreText(MemoryStore):
    async def signal(self, run_id: str, name: str, payload: bytes, **options: Any) -> int:
        return await super().signal(run_id, name, payload.decode(errors="replace").encode(), **options)


@breaks("a_long_value_is_kept_or_refused_for_good")
class CutsLongPayloads(MemoryStore):
    async def record(self, lease: Lease, entries: Sequence[Entry] = (), **options: Any) -> Pulse:
        cut = [msgspec.structs.replace(entry, payload=entry.payload[: 1 << 20]) for entry in entries]
        return await super().record(lease, cut, **options)


@breaks("items_and_progress_are_opaque_bytes")
class ProgressIsText(MemoryStore):
    async def report(self, lease: Lease, progress: bytes) -> None:
        await super().report(lease, progress.decode(errors="replace").encode())


@breaks("what_was_returned_can_be_changed_afterwards")
class ReturnsItsOwnJournal(MemoryStore):
    async def journal(self, run_id: str, *, after: int = 0) -> list[Entry]:
        journals = _JOURNALS.setdefault(self._database, {})
        return journals.setdefault(run_id, await super().journal(run_id, after=after))


@breaks("returned_limits_can_be_changed_afterwards")
class ReturnsItsOwnLimits(MemoryStore):
    async def queue_limits(self) -> dict[str, QueueLimits]:
        with self._lock() as namespace:
            return namespace.limits


@breaks("what_was_passed_in_can_be_changed_afterwards")
class KeepsTheCallersLists(MemoryStore):
    async def suspend(self, lease: Lease, **options: Any) -> list[Signal]:
        arrived = await super().suspend(lease, **options)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].change(waiting_for=options.get("waiting_for", ()))
        return arrived
