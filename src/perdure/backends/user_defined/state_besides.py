"""What a kept state says of its run besides what a snapshot says: nobody else needs it, but a store that holds only states does.

It stands in the snapshot's metadata beside what is needed to go on. A snapshot that comes from elsewhere has none of it, and then
the run is like one that was started without any options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.errors import SnapshotFormatError
from perdure.model.records import RunRow, Signal
from perdure.snapshots.parts import OWN_FIELD
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.run_metadata import Instant
from perdure.snapshots.snapshot import Snapshot


class Columns(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
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
    updated_at: Instant | None = None


class Besides(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Everything that is kept besides."""

    columns: Columns = Columns()
    # How long the journal was when the run was last claimed.
    claimed_length: int = 0
    # Name and dedupe of the signals that were consumed: when one of them is repeated it is not a new one.
    delivered: list[tuple[str, str]] = []

    @classmethod
    def of(cls, run: InMemoryRun) -> Besides:
        columns = Columns(**{name: getattr(run.row, name) for name in Columns.__struct_fields__})
        gone = [(one.name, one.dedupe) for one in run.inbox.values() if one.consumed_by is not None and one.dedupe is not None]
        return cls(columns, run.claimed_length, gone)

    @classmethod
    def in_state(cls, state: Snapshot | ResumeState) -> Besides:
        """What the state says. Raises `SnapshotFormatError`."""
        told = (state.metadata or {}).get(OWN_FIELD)
        try:
            return msgspec.convert(told if isinstance(told, dict) else {}, cls)
        except msgspec.ValidationError as reason:
            raise SnapshotFormatError([(f"$.metadata.{OWN_FIELD}", f"cannot be read: {reason}")]) from None

    def added_to(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot, saying this too."""
        metadata = dict(snapshot.metadata or {})
        ours: dict[str, Any] = {**metadata.get(OWN_FIELD, {}), **msgspec.json.decode(msgspec.json.encode(self))}
        return replace(snapshot, metadata={**metadata, OWN_FIELD: ours})

    def consumed(self) -> list[Signal]:
        """The signals that were consumed, without what they said."""
        return [
            Signal(seq=seq, name=name, payload=b"null", dedupe=dedupe, consumed_by="before")
            for seq, (name, dedupe) in enumerate(self.delivered, 1)
        ]

    def put_back(self, row: RunRow) -> RunRow:
        """The row with these columns."""
        columns = msgspec.structs.asdict(self.columns)
        return msgspec.structs.replace(row, **{**columns, "updated_at": self.columns.updated_at or row.updated_at})


def after(delivered: Sequence[Signal], inbox: Sequence[Signal]) -> list[Signal]:
    """The inbox numbered after what was delivered."""
    return [msgspec.structs.replace(signal, seq=signal.seq + len(delivered)) for signal in inbox]
