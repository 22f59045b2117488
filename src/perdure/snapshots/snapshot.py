"""A run as plain JSON: `Snapshot`, how it is written, validated and read, and how two are merged.

`from_dict` and `to_dict` copy, so a snapshot shares nothing with the dicts it came from or turned into. `parts` has the classes
it is made of, `validation` reads them from untrusted documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perdure.errors import FormatProblem, SnapshotFormatError
from perdure.model.records import OWN_FIELD
from perdure.snapshots.json_reader import Problems, copy_json, read_text
from perdure.snapshots.parts import (
    AROUND_VALUES,
    FORMAT_VERSION,
    Execution,
    LossWarning,
    StepResult,
    check_and_copy,
    without_none,
)
from perdure.snapshots.validation import read_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run as a value: the results of its steps, in the order in which they were recorded, and its state."""

    steps: Mapping[str, StepResult]
    execution: Execution
    metadata: Mapping[str, Any] | None = None
    warnings: Sequence[LossWarning] = ()
    workflow_name: str | None = None
    # Fields of the document that this version does not know. An empty list of warnings is kept here too, so that it is written
    # back.
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
        return _rebuild, parts

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Snapshot:
        """The snapshot that this JSON describes; otherwise `SnapshotFormatError` with everything that is wrong."""
        return assert_valid_snapshot(document)

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain JSON in format version 1: a copy that the caller may change.

        `SnapshotFormatError` when the snapshot was built with a part that is no plain JSON.
        """
        tree = {
            "formatVersion": FORMAT_VERSION,
            **without_none(workflowName=self.workflow_name),
            "steps": {key: step.tree() for key, step in self.steps.items()},
            "execution": self.execution.tree(),
            **without_none(metadata=None if self.metadata is None else dict(self.metadata)),
            **self.extra,
        }
        if self.warnings:
            tree["warnings"] = [warning.tree() for warning in self.warnings]
        return check_and_copy(tree, around=AROUND_VALUES, what="the snapshot")


def _rebuild(
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


def merge_snapshots(base: Snapshot | dict[str, Any] | str | bytes, delta: Snapshot | dict[str, Any] | str | bytes) -> Snapshot:
    """`base` updated by `delta`: what `delta` has wins, what only `base` has stays. Either may be its dict or JSON text.

    Steps keep the order of `base`, new ones follow. The warnings of a step that `delta` has too are those of `delta`. The state
    of the run comes from `delta` alone. `SnapshotFormatError` when one of them is no snapshot.
    """
    base, delta = (each if isinstance(each, Snapshot) else assert_valid_snapshot(each) for each in (base, delta))
    kept = (warning for warning in base.warnings if warning.step_id not in delta.steps)
    return Snapshot(
        steps={**base.steps, **delta.steps},
        execution=delta.execution,
        metadata=_merge_metadata(base.metadata, delta.metadata),
        warnings=(*kept, *delta.warnings),
        workflow_name=base.workflow_name if delta.workflow_name is None else delta.workflow_name,
        extra={**base.extra, **delta.extra},
    )


def _merge_metadata(base: Mapping[str, Any] | None, delta: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if base is None or delta is None:
        only = delta if base is None else base
        return None if only is None else dict(only)
    merged = {**base, **delta}
    if OWN_FIELD in base and OWN_FIELD in delta:
        merged[OWN_FIELD] = _merge_run_metadata(base[OWN_FIELD], delta[OWN_FIELD])
    return merged


def _merge_run_metadata(base: Any, delta: Any) -> Any:
    """The run's metadata of `delta`, with the journals of both."""
    lines = [each.get("journal") if isinstance(each, dict) else None for each in (base, delta)]
    journal = {seq: line for each in lines if isinstance(each, dict) for seq, line in each.items()}
    return {**delta, "journal": journal} if journal and isinstance(delta, dict) else delta


@dataclass(frozen=True, slots=True)
class Validation:
    """Whether a document is a snapshot: `snapshot` if it is, otherwise `errors`, each with its path."""

    valid: bool
    snapshot: Snapshot | None
    errors: tuple[FormatProblem, ...]


def looks_like_snapshot(value: Any) -> bool:
    """Whether this is a `Snapshot`, or a dict with the outline of one. Cheap; it may still be invalid."""
    if type(value) is not dict:
        return type(value) is Snapshot
    has_version = type(value.get("formatVersion")) is int
    return has_version and type(value.get("steps")) is dict and type(value.get("execution")) is dict


def validate_snapshot(value: Any) -> Validation:
    """Everything that is wrong with a snapshot, or the snapshot. `value` is its dict, its JSON text, or a `Snapshot`."""
    problems = Problems()
    tree = copy_json(raw_tree(value, problems), problems, around=AROUND_VALUES)
    snapshot = None if tree is None and problems else read_snapshot(tree, problems)
    errors = problems.errors()
    return Validation(not errors, None if errors else snapshot, errors)


def assert_valid_snapshot(value: Any) -> Snapshot:
    """The snapshot; otherwise `SnapshotFormatError` with everything that is wrong."""
    validation = validate_snapshot(value)
    if validation.snapshot is None:
        raise SnapshotFormatError(validation.errors)
    return validation.snapshot


def raw_tree(value: Any, problems: Problems) -> Any:
    """The tree of a document, for `copy_json`. None, and a problem, when there is none."""
    if isinstance(value, str | bytes):
        return read_text(value, problems)
    if type(value) is not Snapshot:
        return value
    try:
        return value.to_dict()
    except SnapshotFormatError as error:
        problems.extend(error.errors)
        return None


def read_snapshot(tree: Any, problems: Problems) -> Snapshot | None:
    """The snapshot of a tree. When problems were found the result is meaningless."""
    parts = read_parts(tree, problems)
    return None if parts is None else Snapshot(**parts._asdict())
