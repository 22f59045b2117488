"""Resume state: the results of a run's steps, without the run itself, from which another run can go on.

    dump_state   ResumeState → {"version": 1, "entries": {key: {"result": …, "meta"?: …}}, "metadata"?}
    parse_state  that, {"kind": "ResumeState", "steps": [[key, result], …]}, or a snapshot → ResumeState

Steps are the same `StepResult` as in a snapshot, whichever of these shapes they were read from; `resume_v1` reads and writes the
entries of the first. `StatePersistence` keeps states in any `KeyValueStore`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from perdure.errors import SnapshotFormatError
from perdure.snapshots.json_reader import Problems, copy_json, describe, write_text
from perdure.snapshots.parts import AROUND_VALUES, Execution, ExecutionStatus, StepResult, check_and_copy
from perdure.snapshots.resume_v1 import read_entry, write_entry
from perdure.snapshots.run_metadata import read_run_metadata
from perdure.snapshots.snapshot import Snapshot, raw_tree, read_snapshot
from perdure.snapshots.validation import Fields, read_step

_WHAT: Final = "the resume state"
# The levels around a value: the document, its entries, an entry, its result.
_AROUND_VALUES: Final = 4
# Unknown fields of these names in another shape are dropped, because `dump_state` writes its own.
_OF_WRITTEN_FORM: Final = frozenset({"version", "entries"})


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The results of a run's steps by key, in the order in which they were recorded, and the caller's own metadata."""

    steps: dict[str, StepResult] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    # Fields of the document that this version does not know.
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> ResumeState:
        """The steps and metadata of a snapshot, without the state of the run."""
        return cls(dict(snapshot.steps), dict(snapshot.metadata or {}))

    def to_snapshot(
        self, *, status: ExecutionStatus = "running", last_updated: datetime | None = None, workflow_name: str | None = None
    ) -> Snapshot:
        """A snapshot with these steps and this metadata, taken now unless `last_updated` says when."""
        at = last_updated or datetime.now(UTC)
        ended_at = None if status == "running" else at
        current = next(reversed(self.steps), None)
        execution = Execution(status=status, last_updated=at, completed_at=ended_at, current_step_id=current)
        return Snapshot(steps=self.steps, execution=execution, metadata=self.metadata or None, workflow_name=workflow_name)


def dump_state(state: ResumeState | Snapshot | dict[str, Any] | str | bytes, /, **metadata: Any) -> str:
    """The state as JSON text that `parse_state` and the TypeScript library read; `metadata` is added to the state's own.

    A dict or JSON text of any shape that `parse_state` reads will do too. `SnapshotFormatError` when it is none, a part of it is
    no plain JSON, or the metadata has something of its own under "perdure".
    """
    if isinstance(state, Snapshot):
        state = ResumeState.from_snapshot(state)
    elif not isinstance(state, ResumeState):
        state = parse_state(state)
    try:
        return write_text(check_and_copy(_tree(state, metadata), around=_AROUND_VALUES, what=_WHAT))
    except RecursionError:
        raise SnapshotFormatError([("$", "is nested too deeply for the stack that is left")], _WHAT) from None


def _tree(state: ResumeState, metadata: dict[str, Any]) -> dict[str, Any]:
    entries = {key: write_entry(step) for key, step in state.steps.items()}
    merged = {**state.metadata, **metadata}
    read_run_metadata(merged)  # or no run could go on from what is saved
    return {**state.extra, "version": 1, "entries": entries, **({"metadata": merged} if merged else {})}


def parse_state(document: str | bytes | dict[str, Any]) -> ResumeState:
    """The state in a JSON text or dict of any of the three shapes; `SnapshotFormatError` when it is none of them."""
    problems = Problems()
    raw = raw_tree(document, problems)
    is_snapshot = isinstance(raw, dict) and "formatVersion" in raw
    tree = copy_json(raw, problems, around=AROUND_VALUES if is_snapshot else _AROUND_VALUES)
    state = None if tree is None and problems else _read_state(tree, problems)
    if state is None or problems:
        raise SnapshotFormatError(problems.errors(), _WHAT)
    return state


def _read_state(tree: Any, problems: Problems) -> ResumeState | None:
    if type(tree) is dict and "formatVersion" in tree:
        snapshot = read_snapshot(tree, problems)
        return None if snapshot is None else ResumeState.from_snapshot(snapshot)
    fields = Fields.of(tree, (), problems)
    if fields is None:
        return None
    if "kind" in tree:
        return _read_pairs(fields, problems)
    if "version" in tree:
        return _read_entries(fields, problems)
    problems.add((), 'has neither "version", nor "kind", nor "formatVersion", so it is no state of any known shape')
    return None


def _read_entries(fields: Fields, problems: Problems) -> ResumeState | None:
    if not fields.version("version", "resume state"):
        return None
    entries = fields.mapping("entries") or {}
    read = {key: read_entry(key, entry, ("entries", key), problems) for key, entry in entries.items()}
    return _state(read, fields)


def _read_pairs(fields: Fields, problems: Problems) -> ResumeState:
    fields.choice("kind", "ResumeState")
    read: dict[str, StepResult | None] = {}
    for index, pair in enumerate(fields.items("steps") or ()):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str:
            problems.add(("steps", index), f"must be a list of a key and its result, not {describe(pair)}")
        elif pair[0] in read:
            problems.add(("steps", index, 0), "is a key that an earlier step has")
        else:
            read[pair[0]] = read_step(pair[0], pair[1], ("steps", index, 1), problems, may_lack_value=True)
    return _state(read, fields)


def _state(read: dict[str, StepResult | None], fields: Fields) -> ResumeState:
    metadata = fields.mapping("metadata", optional=True) or {}
    extra = {name: kept for name, kept in fields.rest().items() if name not in _OF_WRITTEN_FORM}
    return ResumeState({key: step for key, step in read.items() if step is not None}, metadata, extra)
