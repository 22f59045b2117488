"""A step in the journal, as a `StepResult` of a snapshot and as what it gives the body.

The shared format tells plain values and errors in plain words. What it has no words for stands beside them in a field of our own,
so that a step that went through a snapshot is what it was:

    "perdure": {"kind": "sleep"}    it is no step but another construct
    "perdure": {"tagged": true}     the value has tags ({"$datetime": …}); without this, "$" in a value means nothing
    "perdure": {"stored": …}        the value as it is stored, where parts of it were lost
    "perdure": {"failure": …}       the failure as it is stored, which rebuilds the exception

A step that came from elsewhere is kept as it was told, whole, under the kind `told`: it fits every construct, its fields that
nobody here knows are given back, and what it says is taken literally. `stepentries` is the way back into a journal.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from perdure.codec import Codec, Loss, tree_of
from perdure.codec.outcomes import Failure, load_failure
from perdure.errors import StepFailed
from perdure.model.journal import Entry, Kind
from perdure.snapshots.json_reader import MAX_DEPTH
from perdure.snapshots.parts import NO_CAUSE, OURS, LossWarning, StepResult

RAISED: Final = "UNEXPECTED_ERROR"
TIMED_OUT: Final = "TIMEOUT"
_MAX_SHOWN: Final = 1_000
_MAX_CHAIN: Final = 20

CODEC: Final = Codec()
# A step as others told it has a value that may be as large and deep as any, and stands around that.
TOLD_CODEC: Final = Codec(max_bytes=CODEC.max_bytes + 2**20, max_depth=MAX_DEPTH + 2)


class Mark(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the shared format cannot say about a step of ours."""

    kind: Kind = "step"
    tagged: bool = False
    stored: msgspec.Raw = msgspec.Raw()
    failure: msgspec.Raw = msgspec.Raw()


NO_MARK: Final = Mark()
# Fields of a mark that are stored bytes, and objects in a snapshot.
STORED: Final = ("stored", "failure")


class Told(NamedTuple):
    """A step's result, and warnings about the parts of it that were lost."""

    result: StepResult
    warnings: list[LossWarning]


def told(entry: Entry) -> Told:
    """The result that a closing entry records. Raises ValueError when it cannot be read."""
    if entry.kind == "told":
        return _as_told(entry)
    result, losses = our_result(entry)
    return Told(result, [LossWarning(step_id=entry.key, path=loss.path, reason=loss.reason) for loss in losses])


def our_result(entry: Entry) -> tuple[StepResult, list[Loss]]:
    """The result that a closing entry of ours records, and what was lost of it."""
    if entry.ok:
        return _success(entry)
    if entry.kind != "step":
        return _failure(TIMED_OUT, dict(NO_CAUSE), "result", Mark(kind=entry.kind)), []
    return _of_failure(entry.payload)


def _success(entry: Entry) -> tuple[StepResult, list[Loss]]:
    tree, losses = tree_of(entry.payload)
    stored = msgspec.Raw(entry.payload) if losses else msgspec.Raw()
    mark = Mark(kind=entry.kind, tagged=not losses and b'"$' in entry.payload, stored=stored)
    return StepResult(ok=True, value=tree, extra=_extra(mark)), losses


def _of_failure(payload: bytes) -> tuple[StepResult, list[Loss]]:
    failure = msgspec.json.decode(payload, type=Failure)
    mark = Mark(failure=msgspec.Raw(payload))
    if failure.origin == "throw":
        return _failure(RAISED, _described(msgspec.json.decode(failure.error)), "throw", mark), []
    losses: list[Loss] = []
    if failure.is_exception:
        error = msgspec.json.decode(failure.error)
    else:
        error, losses = tree_of(bytes(failure.error))
    cause, lost = _cause_of(failure, error)
    shown = error["qualname"] if failure.is_exception else error
    return _failure(shown, cause, "result", mark), [*_moved(losses, "error"), *_moved(lost, "cause.value")]


def _moved(losses: list[Loss], to: str) -> list[Loss]:
    return [Loss(to + loss.path.removeprefix("value"), loss.reason) for loss in losses]


def _failure(error: Any, cause: dict[str, Any], origin: str, mark: Mark) -> StepResult:
    return StepResult(ok=False, error=error, cause=cause, meta={"origin": origin}, extra=_extra(mark))


def _cause_of(failure: Failure, error: Any) -> tuple[dict[str, Any], list[Loss]]:
    """What an `Err` was caused by: the cause it names, the exception inside it, or the error itself."""
    if failure.has_exception_cause:
        return _described(msgspec.json.decode(failure.cause)), []
    if bytes(failure.cause) != b"null":
        cause, losses = tree_of(bytes(failure.cause))
        return _thrown(cause), losses
    return _described(error) if failure.is_exception else _thrown(error), []


def _described(error: Any, depth: int = 0) -> dict[str, Any]:
    """A recorded exception as a cause."""
    cause = error.get("cause") or (None if error.get("suppress_context") else error.get("context"))
    described = {"type": "error", "name": error["qualname"], "message": error["message"]}
    if error.get("traceback"):
        described["stack"] = error["traceback"]
    if cause is not None and depth < _MAX_CHAIN:
        described["cause"] = _described(cause, depth + 1)
    return described


def _thrown(value: Any) -> dict[str, Any]:
    """A value that is no exception, as a cause."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    thrown = {
        "type": "thrown",
        "originalType": _javascript_type(value),
        "value": value,
        "stringRepresentation": text[:_MAX_SHOWN],
    }
    return {**thrown, "truncated": True} if len(text) > _MAX_SHOWN else thrown


def _javascript_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number" if isinstance(value, int | float) else "object"


def _extra(mark: Mark) -> dict[str, Any]:
    if mark == NO_MARK:
        return {}
    fields: dict[str, Any] = {"kind": mark.kind} if mark.kind != "step" else {}
    if mark.tagged:
        fields["tagged"] = True
    stored = {name: msgspec.json.decode(raw) for name in STORED if bytes(raw := getattr(mark, name))}
    return {OURS: {**fields, **stored}}


def _as_told(entry: Entry) -> Told:
    tree, warnings = TOLD_CODEC.load(entry.payload)
    known = {name: tree.pop(name) for name in ("ok", "value", "error", "cause", "meta") if name in tree}
    # What does not belong to an outcome of this sort was an unknown field when it was read, and is one again.
    stray = ("error", "cause") if known["ok"] else ("value",)
    extra = {**tree, **{name: known.pop(name) for name in stray if name in known}}
    return Told(StepResult(**known, extra=extra), [_warning(entry.key, warning) for warning in warnings])


def _warning(key: str, tree: dict[str, Any]) -> LossWarning:
    known = {name: tree.pop(name) for name in ("type", "path", "reason")}
    return LossWarning(step_id=key, **known, extra=tree)


def load_value(codec: Codec, entry: Entry, hint: Any) -> Any:
    """The value of a step that went well. Raises ValueError.

    What others told is made what the annotation says where it fits: they know nothing of our classes.
    """
    if entry.kind != "told":
        return codec.load(entry.payload, hint)
    value = _as_told(entry).result.value
    try:
        return codec.conform(value, hint)
    except ValueError:
        return value


def load_error_of(codec: Codec, entry: Entry, key: str, hint: Any) -> Exception:
    """What a step that failed raises. Raises ValueError.

    What others told is never the Python exception that happens to have the same name.
    """
    if entry.kind != "told":
        return load_failure(codec, entry.payload, key, hint)
    result = _as_told(entry).result
    cause = result.cause or NO_CAUSE
    if (result.meta or {}).get("origin") != "throw":
        return StepFailed(key, result.error)
    if cause["type"] == "error":
        return StepFailed(key, cause["name"], cause["message"])
    return StepFailed(key, result.error, cause["stringRepresentation"])
