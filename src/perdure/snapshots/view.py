"""A run as a snapshot: a view of its row and its journal, cut at one moment.

A `View` holds the journal that its drive goes on appending to, and how long it was, so that making one costs nothing; the
snapshot is worked out when somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

import msgspec

from perdure.errors import SnapshotCorrupt
from perdure.model.durations import moment
from perdure.model.journal import Entry, in_force
from perdure.model.records import ENDED, RunRow, Signal, Status, encoded_metadata
from perdure.snapshots.parts import OURS, Execution, ExecutionStatus, LossWarning, StepResult
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.run_metadata import RunRecord
from perdure.snapshots.snapshot import Snapshot
from perdure.snapshots.step_results import told

Include: TypeAlias = Literal["all", "completed", "failed"]

_STATUSES: Final[Mapping[Status, ExecutionStatus]] = {
    "pending": "running",
    "running": "running",
    "suspended": "running",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "failed",
    "dead": "failed",
}
# What a snapshot's metadata says of the run itself; the rest is the user's.
OF_RUN: Final = frozenset({"workflowId", "definitionHash", "input", OURS})


class Selection(NamedTuple):
    """Which of a run's steps are told: of this sort, after the key `since`, and at most `limit`, oldest first."""

    include: Include = "all"
    limit: int | None = None
    since: str | None = None

    def checked(self) -> Selection:
        """This, if it makes sense."""
        if self.include not in get_args(Include):
            raise ValueError(f"include is one of {', '.join(get_args(Include))}, not {self.include!r}")
        if self.limit is not None and (isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0):
            raise ValueError(f"limit must be a whole number of at least 0, not {self.limit!r}")
        return self

    @property
    def is_open_ended(self) -> bool:
        """Whether everything after `since` is told."""
        return self.include == "all" and self.limit is None

    def of(self, entries: Sequence[Entry], run_id: str) -> list[Entry]:
        """The closing entries that are told, among those in force. Raises ValueError when there is no `since`."""
        start = 0
        if self.since is not None:
            found = [index for index, entry in enumerate(entries) if entry.key == self.since and entry.phase == "close"]
            if not found:
                raise ValueError(f"since={self.since!r}: run {run_id!r} has recorded nothing under that key")
            start = found[0] + 1
        told_of = [entry for entry in entries[start:] if entry.phase == "close" and self.include in ("all", _sort(entry))]
        return told_of[: self.limit]


def _sort(entry: Entry) -> Include:
    return "completed" if entry.ok else "failed"


@dataclass(frozen=True, slots=True)
class View:
    """A run at one moment: its row, and so much of its journal."""

    row: RunRow
    journal: Sequence[Entry]
    length: int
    inbox: Sequence[Signal] = ()

    def entries(self) -> list[Entry]:
        """The entries in force. Raises `SnapshotCorrupt`."""
        try:
            return in_force(self.journal[: self.length])
        except ValueError as reason:
            raise SnapshotCorrupt(self.row.id, "the journal", str(reason)) from reason

    def snapshot(self, selection: Selection = Selection(), metadata: Mapping[str, Any] | None = None) -> Snapshot:  # noqa: B008 - immutable
        """The run as a snapshot; `metadata` is added to its own. Raises `SnapshotCorrupt`."""
        entries = self.entries()
        chosen = selection.of(entries, self.row.id)
        steps, warnings = _steps(self.row.id, chosen)
        record = RunRecord.of(self.row, _recorded(entries, chosen, selection))
        if selection.is_open_ended:
            record = record.whole(self.row, self.inbox)
        return Snapshot(
            steps=steps,
            execution=_execution(self.row, entries),
            metadata={**_metadata(self.row), **_json(metadata), OURS: record.tree()},
            warnings=warnings,
            workflow_name=self.row.workflow or None,
        )

    def resume_state(self) -> ResumeState:
        """The results of the run's steps, and the user's own metadata."""
        steps, _ = _steps(self.row.id, Selection().of(self.entries(), self.row.id))
        return ResumeState(dict(steps), users_metadata(self.row))


class Readable(Protocol):
    """What is needed of a store to look at a run."""

    async def get(self, run_id: str) -> RunRow | None: ...
    async def journal(self, run_id: str) -> list[Entry]: ...
    async def inbox(self, run_id: str) -> list[Signal]: ...


async def stored_view(store: Readable, run_id: str) -> View | None:
    """The run as a store has it, or None.

    Row, journal and inbox are three reads. Whoever drives the run meanwhile may take a signal from the inbox into the journal, or
    leave it waiting for something else: then what was read belongs to no one moment, and is read again.
    """
    while (row := await store.get(run_id)) is not None:
        waiting = await store.inbox(run_id)
        journal = await store.journal(run_id)
        inbox = await store.inbox(run_id)
        now = await store.get(run_id)
        is_same = now is not None and (now.epoch, now.status) == (row.epoch, row.status)
        if is_same and {signal.seq for signal in waiting} <= {signal.seq for signal in inbox}:
            return View(row, journal, len(journal), inbox)
    return None


def _recorded(entries: list[Entry], chosen: list[Entry], selection: Selection) -> list[Entry]:
    """Whose lines go into the snapshot: those of the steps told, and what is still open if all after `since` are told."""
    told_of = {entry.key for entry in chosen}
    closed = {entry.key for entry in entries if entry.phase == "close"}
    return [entry for entry in entries if entry.key in told_of or (selection.is_open_ended and entry.key not in closed)]


def _steps(run_id: str, entries: Iterable[Entry]) -> tuple[dict[str, StepResult], list[LossWarning]]:
    steps: dict[str, StepResult] = {}
    warnings: list[LossWarning] = []
    for entry in entries:
        try:
            steps[entry.key], lost = told(entry)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as reason:
            raise SnapshotCorrupt(run_id, f"the record of {entry.key!r}", str(reason)) from reason
        warnings += lost
    return steps, warnings


def _execution(row: RunRow, entries: list[Entry]) -> Execution:
    closed = [entry for entry in entries if entry.phase == "close"]
    updated_at = max((row.updated_at, *(entry.ended_at for entry in closed[-1:])))
    return Execution(
        status=_STATUSES[row.status],
        last_updated=moment(updated_at),
        completed_at=moment(row.updated_at) if row.status in ENDED else None,
        current_step_id=closed[-1].key if closed else None,
    )


def _metadata(row: RunRow) -> dict[str, Any]:
    told_of_run: dict[str, Any] = {"workflowId": row.id}
    if row.definition_hash is not None:
        told_of_run["definitionHash"] = row.definition_hash
    if row.input_hash:
        told_of_run["input"] = msgspec.json.decode(row.input)
    return {**told_of_run, **users_metadata(row)}


def users_metadata(row: RunRow) -> dict[str, Any]:
    """What the user stored with the run, or came with the snapshot it was begun from."""
    kept: dict[str, Any] = msgspec.json.decode(row.metadata)
    return {name: value for name, value in kept.items() if name != OURS}


def _json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    encoded_metadata(dict(metadata) if isinstance(metadata, Mapping) else metadata)
    return dict(metadata)
