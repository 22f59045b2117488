"""A run as a snapshot: a view of its row and its journal at one moment.

A `View` refers to the journal that the drive goes on appending to, and remembers its length, so making one costs nothing; the
snapshot is computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

import msgspec

from perdure.errors import SnapshotCorrupt
from perdure.model.durations import moment
from perdure.model.journal import Entry, count_undone, entries_in_force
from perdure.model.records import ENDED, OWN_FIELD, RunRow, Signal, Status, encode_users_metadata
from perdure.snapshots.parts import Execution, ExecutionStatus, LossWarning, StepResult
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.run_metadata import RunMetadata
from perdure.snapshots.snapshot import Snapshot
from perdure.snapshots.step_results import read_result

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
# The fields of a snapshot's metadata that describe the run itself; the rest is the user's.
RUN_FIELDS: Final = frozenset({"workflowId", "definitionHash", "input", OWN_FIELD})


class Selection(NamedTuple):
    """Which of a run's steps a snapshot has: those of one outcome, after the key `since`, at most `limit`, oldest first."""

    include: Include = "all"
    limit: int | None = None
    since: str | None = None

    def check(self) -> Selection:
        """This selection; ValueError when it is not possible."""
        if self.include not in get_args(Include):
            raise ValueError(f"include is one of {', '.join(get_args(Include))}, not {self.include!r}")
        if self.limit is not None and (isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 0):
            raise ValueError(f"limit must be a whole number of at least 0, not {self.limit!r}")
        return self

    @property
    def is_open_ended(self) -> bool:
        """Whether the snapshot has everything after `since`."""
        return self.include == "all" and self.limit is None

    def choose(self, entries: Sequence[Entry], run_id: str) -> list[Entry]:
        """The selected closing entries among those in force. Raises ValueError when the key `since` is not recorded."""
        start = 0
        if self.since is not None:
            found = [index for index, entry in enumerate(entries) if entry.key == self.since and entry.phase == "close"]
            if not found:
                raise ValueError(f"since={self.since!r}: run {run_id!r} has recorded nothing under that key")
            start = found[0] + 1
        chosen = [entry for entry in entries[start:] if entry.phase == "close" and self.include in ("all", _outcome(entry))]
        return chosen[: self.limit]


def _outcome(entry: Entry) -> Include:
    return "completed" if entry.ok else "failed"


@dataclass(frozen=True, slots=True)
class View:
    """A run at one moment: its row, and the first `length` entries of its journal."""

    row: RunRow
    journal: Sequence[Entry]
    length: int
    inbox: Sequence[Signal] = ()

    def entries(self) -> list[Entry]:
        """The entries in force. Raises `SnapshotCorrupt`."""
        try:
            return entries_in_force(self.journal[: self.length])
        except ValueError as reason:
            raise SnapshotCorrupt(self.row.id, "the journal", str(reason)) from reason

    def snapshot(self, selection: Selection = Selection(), metadata: Mapping[str, Any] | None = None) -> Snapshot:  # noqa: B008 - immutable
        """The run as a snapshot; `metadata` is added to its own. Raises `SnapshotCorrupt`."""
        entries = self._results()
        chosen = selection.choose(entries, self.row.id)
        steps, warnings = _steps(self.row.id, chosen)
        undone = count_undone(self.journal[: self.length])
        run_metadata = RunMetadata.of(self.row, _entries_to_include(entries, chosen, selection), undone)
        if selection.is_open_ended:
            run_metadata = run_metadata.with_state(self.row, self.inbox)
        return Snapshot(
            steps=steps,
            execution=_execution(self.row, entries),
            metadata={**_metadata(self.row), **_check_metadata(metadata), OWN_FIELD: run_metadata.tree()},
            warnings=warnings,
            workflow_name=self.row.workflow or None,
        )

    def _results(self) -> list[Entry]:
        """The entries in force without the one that says where the run was cancelled: it is no step, and a new run is not."""
        return [entry for entry in self.entries() if entry.kind != "cancel"]

    def resume_state(self) -> ResumeState:
        """The results of the run's steps, and the user's own metadata."""
        steps, _ = _steps(self.row.id, Selection().choose(self._results(), self.row.id))
        return ResumeState(dict(steps), user_metadata(self.row))


class RunReader(Protocol):
    """What is needed of a store to read a run."""

    async def get(self, run_id: str) -> RunRow | None: ...
    async def journal(self, run_id: str) -> list[Entry]: ...
    async def inbox(self, run_id: str) -> list[Signal]: ...


async def load_view(store: RunReader, run_id: str) -> View | None:
    """The run as a store has it, or None.

    Row, journal and inbox are three reads. Between them the run's driver may consume a signal into the journal, or suspend the
    run with another wait: then the reads do not belong to one moment, and are repeated.
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


def _entries_to_include(entries: list[Entry], chosen: list[Entry], selection: Selection) -> list[Entry]:
    """The entries whose lines the snapshot has: those of the chosen steps, and open ones if it has everything after `since`."""
    keys = {entry.key for entry in chosen}
    closed = {entry.key for entry in entries if entry.phase == "close"}
    # An entry without a key says what is owed on a replay, and of what is imported nothing is.
    return [
        entry for entry in entries if entry.key in keys or (selection.is_open_ended and entry.key and entry.key not in closed)
    ]


def _steps(run_id: str, entries: Iterable[Entry]) -> tuple[dict[str, StepResult], list[LossWarning]]:
    steps: dict[str, StepResult] = {}
    warnings: list[LossWarning] = []
    for entry in entries:
        try:
            steps[entry.key], lost = read_result(entry)
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
    of_run: dict[str, Any] = {"workflowId": row.id}
    if row.definition_hash is not None:
        of_run["definitionHash"] = row.definition_hash
    try:
        if row.input_hash:
            of_run["input"] = msgspec.json.decode(row.input)
        return {**of_run, **user_metadata(row)}
    except (ValueError, msgspec.MsgspecError) as reason:
        raise SnapshotCorrupt(row.id, "the input or the metadata", str(reason)) from reason


def user_metadata(row: RunRow) -> dict[str, Any]:
    """The metadata that the user stored with the run, or that came with the snapshot it was started from."""
    kept: dict[str, Any] = msgspec.json.decode(row.metadata)
    return {name: value for name, value in kept.items() if name != OWN_FIELD}


def _check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    encode_users_metadata(dict(metadata) if isinstance(metadata, Mapping) else metadata)
    return dict(metadata)
