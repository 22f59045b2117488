"""A run as plain JSON: `Snapshot` and its parts, how they are written, and how two become one.

Nothing in here interprets a value: what stands in the JSON stands in the object, tags (`{"$datetime": …}`) included. Every
part keeps the fields it does not know in `extra` and writes them back, and an instant that was read is written in its own
words as long as it is the same instant, so reading and writing changes nothing. `snapshot_validation` is the reader.

`from_dict` and `to_dict` copy, so a snapshot shares nothing with the dicts it came from or turned into. The trees inside a
`StepResult` are its own; change a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from perdure.errors import SnapshotFormatError
from perdure.plainjson import Problems, own_copy

FORMAT_VERSION: Final = 1
# What only we can say about a run or a step stands in a field of this name.
OURS: Final = "perdure"
# A snapshot, its steps, a step: what stands around a value.
AROUND_VALUES: Final = 3
# The cause of a failure of which none is known, in the words of the library that defined the format.
NO_CAUSE: Final[Mapping[str, Any]] = MappingProxyType(
    {"type": "thrown", "originalType": "undefined", "stringRepresentation": "undefined"}
)

ExecutionStatus: TypeAlias = Literal["running", "completed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """How a step came out: with a `value` when `ok`, otherwise with an `error` and what is known of its `cause`."""

    ok: bool
    value: Any = None
    error: Any = None
    cause: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ok and self.cause is None:
            object.__setattr__(self, "cause", dict(NO_CAUSE))

    def tree(self) -> dict[str, Any]:
        """The step's JSON, which shares its parts with this object."""
        shown = {"ok": True, "value": self.value} if self.ok else {"ok": False, "error": self.error, "cause": self.cause}
        return {**shown, **_present(meta=self.meta), **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How the run stood when the snapshot was taken."""

    status: ExecutionStatus
    last_updated: datetime
    completed_at: datetime | None = None
    current_step_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    # The instants as they were written where they came from: "Z" and "+00:00" are one instant and two texts.
    texts: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("last_updated", "completed_at"):
            at = getattr(self, name)
            if at is not None and at.utcoffset() is None:
                raise ValueError(f"{name} {at!r} has no time zone; pass an aware datetime, such as datetime.now(UTC)")

    def tree(self) -> dict[str, Any]:
        """The JSON of this part."""
        completed = None if self.completed_at is None else self._text("completedAt", self.completed_at)
        return {
            "status": self.status,
            "lastUpdated": self._text("lastUpdated", self.last_updated),
            **_present(completedAt=completed, currentStepId=self.current_step_id),
            **self.extra,
        }

    def _text(self, name: str, at: datetime) -> str:
        text = self.texts.get(name)
        return text if text is not None and datetime.fromisoformat(text) == at else iso_text(at)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWarning:
    """A part of a step's value that could not be stored and became null."""

    step_id: str
    path: str
    reason: str
    type: str = "lossy_value"
    extra: Mapping[str, Any] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """The JSON of this part."""
        return {"type": self.type, "stepId": self.step_id, "path": self.path, "reason": self.reason, **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run as a value: what its steps gave, in the order in which they were recorded, and how it stood."""

    steps: Mapping[str, StepResult]
    execution: Execution
    metadata: Mapping[str, Any] | None = None
    warnings: Sequence[LossWarning] = ()
    workflow_name: str | None = None
    # Fields of the document that this version does not know. An empty list of warnings is kept here too: it says nothing, but
    # it was there.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", MappingProxyType(dict(self.steps)))
        object.__setattr__(self, "warnings", tuple(self.warnings))
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))
        if self.metadata is not None:
            object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only views can be neither pickled nor copied; their contents can.
        metadata = None if self.metadata is None else dict(self.metadata)
        parts = (dict(self.steps), self.execution, metadata, self.warnings, self.workflow_name, dict(self.extra))
        return _rebuilt, parts

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Snapshot:
        """The snapshot that this JSON describes; `SnapshotFormatError` with everything that is wrong when it describes none."""
        from perdure.snapshot_validation import assert_valid_snapshot

        return assert_valid_snapshot(document)

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain JSON in format version 1, to be changed at will.

        `SnapshotFormatError` when a part that was put in by hand is no plain JSON.
        """
        tree = {
            "formatVersion": FORMAT_VERSION,
            **_present(workflowName=self.workflow_name),
            "steps": {key: step.tree() for key, step in self.steps.items()},
            "execution": self.execution.tree(),
            **_present(metadata=None if self.metadata is None else dict(self.metadata)),
            **self.extra,
        }
        if self.warnings:
            tree["warnings"] = [warning.tree() for warning in self.warnings]
        return checked(tree, around=AROUND_VALUES, what="the snapshot")


def _rebuilt(
    steps: dict[str, StepResult],
    execution: Execution,
    metadata: dict[str, Any] | None,
    warnings: tuple[LossWarning, ...],
    workflow_name: str | None,
    extra: dict[str, Any],
) -> Snapshot:
    return Snapshot(
        steps=steps, execution=execution, metadata=metadata, warnings=warnings, workflow_name=workflow_name, extra=extra
    )


def merge_snapshots(base: Snapshot, delta: Snapshot) -> Snapshot:
    """`base` brought up to date by `delta`: what `delta` has wins, what only `base` has stays.

    Steps keep the order of `base`, new ones follow. A step that `delta` recorded again leaves its old warnings behind. How the
    run stood is `delta`'s word alone.
    """
    kept = (warning for warning in base.warnings if warning.step_id not in delta.steps)
    return Snapshot(
        steps={**base.steps, **delta.steps},
        execution=delta.execution,
        metadata=_merged_metadata(base.metadata, delta.metadata),
        warnings=(*kept, *delta.warnings),
        workflow_name=base.workflow_name if delta.workflow_name is None else delta.workflow_name,
        extra={**base.extra, **delta.extra},
    )


def _merged_metadata(base: Mapping[str, Any] | None, delta: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if base is None or delta is None:
        only = delta if base is None else base
        return None if only is None else dict(only)
    merged = {**base, **delta}
    if OURS in base and OURS in delta:
        merged[OURS] = _merged_records(base[OURS], delta[OURS])
    return merged


def _merged_records(base: Any, delta: Any) -> Any:
    """What `delta` says of the run, with what both say of its journal."""
    lines = [each.get("journal") if isinstance(each, dict) else None for each in (base, delta)]
    journal = {seq: line for each in lines if isinstance(each, dict) for seq, line in each.items()}
    return {**delta, "journal": journal} if journal and isinstance(delta, dict) else delta


def checked(tree: dict[str, Any], *, around: int, what: str) -> dict[str, Any]:
    """A copy of a tree that is about to be written; `SnapshotFormatError` when it is no plain JSON."""
    problems = Problems()
    copy: dict[str, Any] = own_copy(tree, problems, around=around)
    if problems:
        raise SnapshotFormatError(problems.listed(), what)
    return copy


def iso_text(at: datetime) -> str:
    """The instant as JavaScript writes it: in UTC, to the millisecond unless it is finer."""
    try:
        at = at.astimezone(UTC)
    except OverflowError:  # within a day of the first or last instant there is, UTC may have no name for it
        return at.isoformat()
    text = at.isoformat(timespec="microseconds" if at.microsecond % 1000 else "milliseconds")
    return text.removesuffix("+00:00") + "Z"


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
