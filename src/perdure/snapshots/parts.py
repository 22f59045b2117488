"""The parts of a snapshot: the result of a step, the state of the run, and what could not be stored.

Nothing here interprets a value: the object holds what the JSON holds, tags (`{"$datetime": …}`) included. Every part keeps the
fields it does not know in `extra` and writes them back, and an instant that was read is written as the same text unless it was
changed, so reading and writing changes nothing. Do not change the trees inside a `StepResult`; change a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from perdure.errors import SnapshotFormatError
from perdure.snapshots.json_reader import Problems, copy_json

FORMAT_VERSION: Final = 1
# The levels around a value: a snapshot, its steps, a step.
AROUND_VALUES: Final = 3
# The cause of a failure whose cause is unknown, as the library that defined the format writes it.
NO_CAUSE: Final[Mapping[str, Any]] = MappingProxyType(
    {"type": "thrown", "originalType": "undefined", "stringRepresentation": "undefined"}
)

ExecutionStatus: TypeAlias = Literal["running", "completed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of a step: a `value` when `ok`, otherwise an `error` and what is known of its `cause`."""

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
        """The step's JSON; it shares its parts with this object."""
        shown = {"ok": True, "value": self.value} if self.ok else {"ok": False, "error": self.error, "cause": self.cause}
        return {**shown, **without_none(meta=self.meta), **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The state of the run when the snapshot was taken."""

    status: ExecutionStatus
    last_updated: datetime
    completed_at: datetime | None = None
    current_step_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    # The instants as they were written in the document that was read: "Z" and "+00:00" are one instant and two texts.
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
            **without_none(completedAt=completed, currentStepId=self.current_step_id),
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


def check_and_copy(tree: dict[str, Any], *, around: int, what: str) -> dict[str, Any]:
    """A copy of a tree that is about to be written; `SnapshotFormatError` when the tree is no plain JSON."""
    problems = Problems()
    copy: dict[str, Any] = copy_json(tree, problems, around=around)
    if problems:
        raise SnapshotFormatError(problems.errors(), what)
    return copy


def iso_text(at: datetime) -> str:
    """The instant as JavaScript writes it: in UTC, to the millisecond unless it is finer."""
    try:
        at = at.astimezone(UTC)
    except OverflowError:  # within a day of the first or last datetime, the same instant in UTC may be out of range
        return at.isoformat()
    text = at.isoformat(timespec="microseconds" if at.microsecond % 1000 else "milliseconds")
    return text.removesuffix("+00:00") + "Z"


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
