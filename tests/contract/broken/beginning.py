"""Broken beginnings: journals that a run is created with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.backends.memory.store import MemoryStore
from perdure.model.journal import Entry
from perdure.model.records import Created, NewRun, Signal
from tests.contract.broken.table import breaks


@breaks("a_run_is_created_with_an_input")
class CreatesWithoutAnInput(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        return await super().create(msgspec.structs.replace(run, input_hash=run.input_hash or b"none"), **options)


@breaks("a_run_may_begin_with_a_journal")
class ForgetsTheJournal(MemoryStore):
    async def create(self, run: NewRun, *, entries: Sequence[Entry] = (), **options: Any) -> Created:
        return await super().create(run, **options)


@breaks("a_run_may_begin_with_an_inbox")
class ForgetsTheInbox(MemoryStore):
    async def create(self, run: NewRun, *, inbox: Sequence[Signal] = (), **options: Any) -> Created:
        return await super().create(run, **options)


@breaks("a_run_may_begin_with_an_inbox")
class CountsTheInboxAnew(MemoryStore):
    async def create(self, run: NewRun, *, inbox: Sequence[Signal] = (), **options: Any) -> Created:
        renumbered = [msgspec.structs.replace(row, seq=seq) for seq, row in enumerate(sorted(inbox, key=lambda row: row.seq), 1)]
        return await super().create(run, inbox=renumbered, **options)


@breaks("a_run_may_begin_with_a_journal")
class StampsTheJournal(MemoryStore):
    """Takes the entries for its own and gives them the epoch of the new run."""

    async def create(self, run: NewRun, *, entries: Sequence[Entry] = (), **options: Any) -> Created:
        stamped = [msgspec.structs.replace(entry, epoch=options["now"]) for entry in entries]
        return await super().create(run, entries=stamped, **options)


@breaks("a_run_may_begin_with_a_journal")
class GivesAnEmptyClaim(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        created = await super().create(run, **options)
        if created.claim is None:
            return created
        return msgspec.structs.replace(created, claim=msgspec.structs.replace(created.claim, journal=[]))


@breaks("what_a_run_begins_with_is_no_progress")
class TakesTheBeginningForProgress(MemoryStore):
    async def create(self, run: NewRun, **options: Any) -> Created:
        created = await super().create(run, **options)
        with self._lock() as namespace:
            namespace.runs[run.id].claimed_length = 0
        return created


@breaks("a_run_that_was_begun_elsewhere_keeps_its_beginning")
class BeginsNow(MemoryStore):
    async def create(self, run: NewRun, *, created_at: int | None = None, **options: Any) -> Created:
        return await super().create(run, **options)


@breaks("a_run_that_was_begun_elsewhere_keeps_its_beginning")
class IsDueSinceItsBeginning(MemoryStore):
    async def create(self, run: NewRun, *, created_at: int | None = None, **options: Any) -> Created:
        return await super().create(run, **{**options, "now": options["now"] if created_at is None else created_at})


@breaks("a_run_that_exists_keeps_its_own_journal")
class AddsToWhatIsThere(MemoryStore):
    async def create(self, run: NewRun, *, entries: Sequence[Entry] = (), **options: Any) -> Created:
        created = await super().create(run, entries=entries, **options)
        with self._lock() as namespace:
            for entry in entries:
                namespace.runs[run.id].entries.setdefault(entry.seq, entry)
        return created


@breaks("a_journal_to_begin_with_has_each_seq_once")
class LastOfAJournalWins(MemoryStore):
    async def create(self, run: NewRun, *, entries: Sequence[Entry] = (), **options: Any) -> Created:
        kept = {entry.seq: entry for entry in entries if entry.seq > 0}
        return await super().create(run, entries=list(kept.values()), **options)


@breaks("a_run_and_its_first_journal_appear_together")
@breaks("one_of_many_creators_gives_the_journal")
class CreatesAndThenRecords(MemoryStore):
    async def create(self, run: NewRun, *, entries: Sequence[Entry] = (), **options: Any) -> Created:
        created = await super().create(run, **options)
        await asyncio.sleep(0)
        with self._lock() as namespace:
            namespace.runs[run.id].entries.update({entry.seq: entry for entry in entries})
        return created
