"""Reads the parts of a snapshot from an untrusted tree, and collects everything that is wrong with it.

`Fields` reads one JSON object: each method takes out one field, checks it, and notes a problem; the fields that are left are
unknown to this version. The functions below read the format with it. They get a copy (`copy_json`), so what they return may share
parts of the tree.

Where the format names a closed set on which behaviour depends (status, origin, the type of a cause), anything else is refused.
Nothing depends on the text of a warning, so any text is accepted there.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

from perdure.model.ids import MAX_ID_BYTES, check_id
from perdure.snapshots.json_reader import JsonPath, Problems, describe
from perdure.snapshots.parts import FORMAT_VERSION, Execution, LossWarning, StepResult

_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d([.,]\d+)?)?(Z|[+-]\d\d(:?\d\d(:?\d\d(\.\d+)?)?)?)", re.ASCII)
_MISSING: Final = object()
T = TypeVar("T")


class Fields:
    """One JSON object of a document. Every method takes out one field, and notes what is wrong with it."""

    __slots__ = ("_left", "_path", "_problems")

    def __init__(self, tree: dict[str, Any], path: JsonPath, problems: Problems) -> None:
        self._left = dict(tree)
        self._path = path
        self._problems = problems

    @classmethod
    def of(cls, tree: Any, path: JsonPath, problems: Problems) -> Fields | None:
        """The fields of an object; None, and a problem, when the tree is no object."""
        if type(tree) is dict:
            return cls(tree, path, problems)
        problems.add(path, f"must be an object, not {describe(tree)}")
        return None

    def value(self, name: str, *, optional: bool = False) -> Any:
        """The field of any type; None when it is missing."""
        value = self._take(name, optional=optional)
        return None if value is _MISSING else value

    def text(self, name: str, *, optional: bool = False) -> str | None:
        return self._take_typed(name, str, "text", optional=optional)

    def flag(self, name: str, *, optional: bool = False) -> bool | None:
        return self._take_typed(name, bool, "true or false", optional=optional)

    def mapping(self, name: str, *, optional: bool = False) -> dict[str, Any] | None:
        return self._take_typed(name, dict, "an object", optional=optional)

    def items(self, name: str, *, optional: bool = False) -> list[Any] | None:
        return self._take_typed(name, list, "a list", optional=optional)

    def choice(self, name: str, *choices: str) -> Any:
        """The field, which must be one of these texts."""
        value = self._take(name, optional=False)
        if value is _MISSING:
            return None
        if type(value) is str and value in choices:
            return value
        words = ", ".join(f'"{choice}"' for choice in choices)
        self._problems.add((*self._path, name), f"must be one of {words}, not {describe(value)}")
        return None

    def instant(self, name: str, *, optional: bool = False) -> tuple[datetime, str] | None:
        """An instant, and the text it was written as."""
        text = self.text(name, optional=optional)
        if text is None:
            return None
        try:
            if len(text) <= 80 and _INSTANT.fullmatch(text):
                return datetime.fromisoformat(text), text
        except ValueError:
            pass
        reason = f'must be an instant with its offset, such as "2026-01-31T12:00:00.000Z", not {describe(text)}'
        self._problems.add((*self._path, name), reason)
        return None

    def version(self, name: str, what: str) -> bool:
        """Whether the document can be read: False for a later version, of which nothing else can be checked."""
        value = self._take(name, optional=False)
        if value is _MISSING or (type(value) is int and value == FORMAT_VERSION):
            return True
        if type(value) is int and value > FORMAT_VERSION:
            reason = f"says {what} version {value}, which a newer perdure wrote; this one reads version {FORMAT_VERSION}"
            self._problems.add((*self._path, name), reason)
            return False
        self._problems.add((*self._path, name), f"must be the integer {FORMAT_VERSION}, not {describe(value)}")
        return True

    def rest(self) -> dict[str, Any]:
        """The fields that were not taken out."""
        return self._left

    def _take_typed(self, name: str, kind: type[T], words: str, *, optional: bool) -> T | None:
        value = self._take(name, optional=optional)
        if value is _MISSING:
            return None
        if type(value) is kind:
            return value
        self._problems.add((*self._path, name), f"must be {words}, not {describe(value)}")
        return None

    def _take(self, name: str, *, optional: bool) -> Any:
        value = self._left.pop(name, _MISSING)
        if value is _MISSING and not optional:
            self._problems.add((*self._path, name), "is missing")
        return value


def _read_steps(tree: dict[str, Any] | None, problems: Problems) -> dict[str, StepResult]:
    read = ((key, read_step(key, step, ("steps", key), problems)) for key, step in (tree or {}).items())
    return {key: step for key, step in read if step is not None}


def read_step(key: Any, tree: Any, path: JsonPath, problems: Problems, *, may_lack_value: bool = False) -> StepResult | None:
    """The result recorded under `key`. With `may_lack_value`, a value that JavaScript left out as undefined is null."""
    check_step_key(key, path, problems)
    fields = Fields.of(tree, path, problems)
    if fields is None or (ok := fields.flag("ok")) is None:
        return None
    meta = fields.mapping("meta", optional=True)
    if ok:
        return StepResult(ok=True, value=fields.value("value", optional=may_lack_value), meta=meta, extra=fields.rest())
    error = fields.value("error", optional=may_lack_value)
    cause = fields.mapping("cause")
    check_cause(cause, (*path, "cause"), problems)
    if meta is not None:
        Fields(meta, (*path, "meta"), problems).choice("origin", "result", "throw")
    return StepResult(ok=False, error=error, cause=cause, meta=meta, extra=fields.rest())


def check_step_key(key: Any, path: JsonPath, problems: Problems) -> None:
    """Note a problem when no run could have recorded anything under `key`."""
    try:
        check_id(key, "key")
    except (TypeError, ValueError):
        reason = f"is no key: that is text of 1 to {MAX_ID_BYTES} UTF-8 bytes without NUL and lone surrogates"
        problems.add(path, reason)


def check_cause(cause: Any, path: JsonPath, problems: Problems) -> None:
    """Note what is wrong with a cause and the causes below it. For None the problem has been noted already."""
    while cause is not None:
        fields = Fields.of(cause, path, problems)
        if fields is None:
            return
        kind = fields.choice("type", "error", "thrown")
        if kind == "error":
            fields.text("name")
            fields.text("message")
            fields.text("stack", optional=True)
        elif kind == "thrown":
            fields.text("stringRepresentation")
            fields.text("originalType", optional=True)
            fields.flag("truncated", optional=True)
        path = (*path, "cause")
        cause = fields.mapping("cause", optional=True) if kind == "error" else None


def _read_execution(tree: Any, problems: Problems) -> Execution | None:
    fields = Fields.of(tree, ("execution",), problems)
    if fields is None:
        return None
    status = fields.choice("status", "running", "completed", "failed")
    updated = fields.instant("lastUpdated")
    completed = fields.instant("completedAt", optional=True)
    current = fields.text("currentStepId", optional=True)
    if updated is None:
        return None
    return Execution(
        status=status,
        last_updated=updated[0],
        completed_at=completed[0] if completed else None,
        current_step_id=current,
        extra=fields.rest(),
        texts={"lastUpdated": updated[1], **({"completedAt": completed[1]} if completed else {})},
    )


def _read_warning(tree: Any, index: int, problems: Problems) -> LossWarning | None:
    fields = Fields.of(tree, ("warnings", index), problems)
    if fields is None:
        return None
    kind, step_id, path, reason = (fields.text(name) for name in ("type", "stepId", "path", "reason"))
    if kind is None or step_id is None or path is None or reason is None:
        return None
    return LossWarning(step_id=step_id, path=path, reason=reason, type=kind, extra=fields.rest())


class SnapshotParts(NamedTuple):
    """The parts of a snapshot, by the names of its fields."""

    steps: dict[str, StepResult]
    execution: Execution
    metadata: dict[str, Any] | None
    warnings: list[LossWarning]
    workflow_name: str | None
    extra: dict[str, Any]


def read_parts(tree: Any, problems: Problems) -> SnapshotParts | None:
    """The parts of a snapshot. When problems were found the result is meaningless."""
    fields = Fields.of(tree, (), problems)
    if fields is None or not fields.version("formatVersion", "snapshot format"):
        return None
    name = fields.text("workflowName", optional=True)
    steps = _read_steps(fields.mapping("steps"), problems)
    execution = _read_execution(fields.value("execution"), problems)
    metadata = fields.mapping("metadata", optional=True)
    warnings = fields.items("warnings", optional=True)
    extra = fields.rest() if warnings != [] else {**fields.rest(), "warnings": []}
    read_warnings = [_read_warning(warning, index, problems) for index, warning in enumerate(warnings or ())]
    if problems or execution is None:
        return None
    return SnapshotParts(
        steps=steps,
        execution=execution,
        metadata=metadata,
        warnings=[warning for warning in read_warnings if warning is not None],
        workflow_name=name,
        extra=extra,
    )
