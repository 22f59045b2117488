"""Broken generations: not counted or counted unasked, the first input forgotten, too much or too little kept of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, ClassVar

import msgspec

from perdure.backends.memory.store import MemoryStore
from perdure.model.records import Created, Lease, NewInput, NewRun, Signal
from tests.contract.broken.table import breaks


@breaks("a_reopened_run_stays_in_its_generation")
class EveryReopeningIsAGeneration(MemoryStore):
    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        await super().reopen(run_id, drop, now=now)
        with self._lock() as namespace:
            run = namespace.runs[run_id]
            run.change(generation=run.row.generation + 1)


@breaks("create_compares_with_the_first_input")
class ForgetsTheFirstInput(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        return await super().create(msgspec.structs.replace(run, first_input_hash=None), **options)


@breaks("create_compares_with_the_first_input")
class ComparesWithThePresentInput(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        with self._lock() as namespace:
            found = namespace.runs.get(run.id)
            first = None if found is None else found.row.first_input_hash
            if found is not None:
                found.change(first_input_hash=None)
        try:
            return await super().create(run, **options)
        finally:
            if found is not None:
                found.change(first_input_hash=first)


@breaks("a_run_can_start_over")
@breaks("a_journal_begins_anew")
class KeepsTheJournal(MemoryStore):
    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        with self._lock() as namespace:
            entries = dict(namespace.runs[lease.run_id].entries)
        await super().continue_as(lease, new, now=now)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].entries = entries


@breaks("a_journal_begins_anew")
class LeavesTheEndOfALongJournal(MemoryStore):
    """Forgets that the journal has parts elsewhere."""

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        with self._lock() as namespace:
            left = {seq: one for seq, one in namespace.runs[lease.run_id].entries.items() if seq > 200}
        await super().continue_as(lease, new, now=now)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].entries = left


class _Changed(MemoryStore):
    """A store in which a run that starts over is changed once more."""

    columns: ClassVar[dict[str, Any]] = {}

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        await super().continue_as(lease, new, now=now)
        with self._lock_and_wake() as namespace:
            namespace.runs[lease.run_id].change(**self.columns)


@breaks("a_run_can_start_over")
@breaks("a_new_start_counts_attempts_anew")
class StartsOverWithItsAttempts(_Changed):
    columns: ClassVar[dict[str, Any]] = {"attempts": 2}


@breaks("a_run_can_start_over")
class StartsOverWithItsProblem(_Changed):
    columns: ClassVar[dict[str, Any]] = {"problem": "broken"}


@breaks("a_run_that_started_over_is_claimed")
class StartsOverInItsSleep(_Changed):
    columns: ClassVar[dict[str, Any]] = {"status": "suspended", "wake_at": None}


@breaks("the_first_input_stays_the_first")
class TheLastInputIsTheFirst(MemoryStore):
    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        with self._lock() as namespace:
            before = namespace.runs[lease.run_id].row.input_hash
        await super().continue_as(lease, new, now=now)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].change(first_input_hash=before)


@breaks("the_first_input_stays_the_first")
class OneGenerationForAll(_Changed):
    columns: ClassVar[dict[str, Any]] = {"generation": 1}


@breaks("a_new_start_keeps_requests")
class ForgetsToCancel(_Changed):
    columns: ClassVar[dict[str, Any]] = {"cancel_requested": False}


@breaks("a_run_can_start_over")
@breaks("a_parent_waits_for_the_last")
class LosesItsParent(_Changed):
    columns: ClassVar[dict[str, Any]] = {"parent_id": None, "parent_key": None}


@breaks("a_parent_waits_for_the_last")
class TellsItsParentOfEachStart(MemoryStore):
    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        await super().continue_as(lease, new, now=now)
        with self._lock_and_wake() as namespace:
            run = namespace.runs[lease.run_id]
            if run.row.parent_id is not None:
                run.change(outcome=b"1")
                self._notify_parent(namespace, run, now or 0)
                run.change(outcome=None)


class _OtherInbox(MemoryStore):
    """A store in which a run that starts over has another inbox."""

    def kept(self, row: Signal) -> Signal | None:
        raise NotImplementedError

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        with self._lock() as namespace:
            before = dict(namespace.runs[lease.run_id].inbox)
        await super().continue_as(lease, new, now=now)
        with self._lock() as namespace:
            kept = {seq: self.kept(row) for seq, row in before.items()}
            namespace.runs[lease.run_id].inbox = {seq: row for seq, row in kept.items() if row is not None}


@breaks("signals_outlast_a_new_start")
class EmptiesTheInbox(_OtherInbox):
    def kept(self, row: Signal) -> Signal | None:
        return None


@breaks("signals_outlast_a_new_start")
class DeliversSignalsAgain(_OtherInbox):
    def kept(self, row: Signal) -> Signal | None:
        return msgspec.structs.replace(row, consumed_by=None)


@breaks("signals_outlast_a_new_start")
@breaks("a_run_that_started_over_can_wait")
class ForgetsConsumedSignals(_OtherInbox):
    """Gives their seqs again, and does not know a signal that is repeated."""

    def kept(self, row: Signal) -> Signal | None:
        return row if row.consumed_by is None else None


@breaks("streams_outlast_a_new_start")
class EmptiesTheStreams(MemoryStore):
    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        await super().continue_as(lease, new, now=now)
        with self._lock() as namespace:
            namespace.runs[lease.run_id].items = {}


@breaks("a_run_starts_over_or_is_taken_over_but_not_both")
class ChecksTheLeaseTooEarly(MemoryStore):
    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        with self._lock() as namespace:
            self._find_leased(namespace, lease)
        await asyncio.sleep(0)
        with self._lock_and_wake() as namespace:
            run = namespace.find(lease.run_id)
            token, row = run.token, run.row
            run.continue_as(new, now or 0)
            if row.epoch != lease.epoch:
                run.token = token
