"""The columns of a run that a snapshot does not have, and that a store which holds only snapshots needs.

They stand in the snapshot's metadata, next to what is needed to resume the run. A snapshot that comes from elsewhere has none of
them, and then the run is like one that was started without any options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.errors import SnapshotFormatError
from perdure.model.records import OWN_FIELD, RunRow, Signal, deadline_in_force
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.run_metadata import Instant
from perdure.snapshots.snapshot import Snapshot


class RowColumns(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The columns of a run's row that no snapshot has."""

    queue: str = "default"
    priority: int = 0
    limit_key: str | None = None
    start_at: Instant | None = None
    deadline: Instant | None = None
    parent_id: str | None = None
    parent_key: str | None = None
    parent_notified: bool = False
    progress: bytes | None = None
    held: bool = False
    attempts: int = 0
    problem: str | None = None
    problem_at: Instant | None = None
    problem_count: int = 0
    updated_at: Instant | None = None


class ExtraColumns(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Everything of a run that is saved in addition to its snapshot."""

    columns: RowColumns = RowColumns()
    # How long the journal was when the run was last claimed.
    claimed_length: int = 0
    # Name and dedupe of the signals that were consumed: one that is repeated is not a new one.
    delivered: list[tuple[str, str]] = []

    @classmethod
    def of(cls, run: InMemoryRun) -> ExtraColumns:
        """What a snapshot of this run lacks."""
        columns = RowColumns(**{name: getattr(run.row, name) for name in RowColumns.__struct_fields__})
        # A snapshot has no drop entries, by which a retry moves the deadline.
        columns = msgspec.structs.replace(columns, deadline=deadline_in_force(run.row, run.entries.values()))
        consumed = [one for one in run.inbox.values() if one.consumed_by is not None]
        return cls(columns, run.claimed_length, [(one.name, one.dedupe) for one in consumed if one.dedupe is not None])

    @classmethod
    def read(cls, state: Snapshot | ResumeState) -> ExtraColumns:
        """What stands in the metadata of the state. Raises `SnapshotFormatError`."""
        ours = (state.metadata or {}).get(OWN_FIELD)
        try:
            return msgspec.convert(ours if isinstance(ours, dict) else {}, cls)
        except msgspec.ValidationError as reason:
            raise SnapshotFormatError([(f"$.metadata.{OWN_FIELD}", f"cannot be read: {reason}")]) from None

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with these columns in its metadata."""
        metadata = dict(snapshot.metadata or {})
        ours: dict[str, Any] = {**metadata.get(OWN_FIELD, {}), **msgspec.json.decode(msgspec.json.encode(self))}
        return replace(snapshot, metadata={**metadata, OWN_FIELD: ours})

    def consumed_signals(self) -> list[Signal]:
        """The signals that were consumed, without their payloads."""
        return [
            Signal(seq=seq, name=name, payload=b"null", dedupe=dedupe, consumed_by="before")
            for seq, (name, dedupe) in enumerate(self.delivered, 1)
        ]

    def apply_to(self, row: RunRow) -> RunRow:
        """The row with these columns."""
        columns = msgspec.structs.asdict(self.columns)
        return msgspec.structs.replace(row, **{**columns, "updated_at": self.columns.updated_at or row.updated_at})


def number_after(consumed: Sequence[Signal], inbox: Sequence[Signal]) -> list[Signal]:
    """The inbox rows with seqs that follow those of the consumed signals."""
    return [msgspec.structs.replace(signal, seq=signal.seq + len(consumed)) for signal in inbox]
