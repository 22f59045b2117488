"""Broken ways to keep whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.backends.memory.store import MemoryStore
from perdure.model.journal import Entry
from perdure.model.records import RunRow, Signal
from perdure.snapshots.snapshot import Snapshot
from tests.contract.broken.table import breaks


@breaks("what_was_saved_is_loaded_word_for_word")
class TellsItsOwnWords(MemoryStore):
    """Makes the snapshot from the rows, always."""

    async def load(self, run_id: str) -> Snapshot | None:
        loaded = await super().load(run_id)
        return None if loaded is None else Snapshot(steps=loaded.steps, execution=loaded.execution)


@breaks("a_run_goes_through_a_snapshot_unchanged")
class SavesNoInbox(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        await super().restore(run, entries, **options)


@breaks("a_run_goes_through_a_snapshot_unchanged")
class SavesOutcomesOnly(MemoryStore):
    """Keeps what is closed, and forgets what is open."""

    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        await super().restore(run, [entry for entry in entries if entry.phase == "close"], inbox, **options)


@breaks("an_ended_run_is_loaded_with_its_outcome")
class ForgetsOutcomes(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        await super().restore(msgspec.structs.replace(run, outcome=None), entries, inbox, **options)


@breaks("load_gives_a_saved_run_as_it_is_now")
class RepeatsWhatWasSaved(MemoryStore):
    """Gives what was saved for ever."""

    async def save(self, run_id: str, snapshot: Any) -> None:
        await super().save(run_id, snapshot)
        self.saved = {run_id: await super().load(run_id)}

    async def load(self, run_id: str) -> Snapshot | None:
        return (await super().load(run_id)) if run_id not in getattr(self, "saved", {}) else self.saved[run_id]


@breaks("save_replaces_the_whole_run")
class AddsToTheRun(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        before = {entry.seq: entry for entry in await self.journal(run.id)}
        await super().restore(run, list({**before, **{entry.seq: entry for entry in entries}}.values()), inbox, **options)


@breaks("save_is_refused_while_the_run_is_driven")
class SavesOverALease(MemoryStore):
    async def restore(self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), **options: Any) -> None:
        await self.delete(run.id)
        await super().restore(run, entries, inbox, **options)


@breaks("what_is_no_snapshot_is_not_saved")
class SavesNothingOfIt(MemoryStore):
    """Takes what is no snapshot for an empty one."""

    async def save(self, run_id: str, snapshot: Any) -> None:
        empty = {"formatVersion": 1, "steps": {}, "execution": {"status": "running", "lastUpdated": "2026-01-31T12:00:00Z"}}
        is_snapshot = not isinstance(snapshot, dict) or {"steps", "signature"} <= snapshot.keys()
        await super().save(run_id, snapshot if is_snapshot else empty)
