"""A closing entry of the journal as a `StepResult` of a snapshot, and as the value or error that the body gets.

The snapshot format is shared with other libraries and holds plain values and errors. What it has no fields for is in a field of
our own, so that a step that went through a snapshot is restored exactly:

    "perdure": {"kind": "sleep"}    it is no step but another construct
    "perdure": {"tagged": true}     the value has tags ({"$datetime": …}); without this, "$" in a value means nothing
    "perdure": {"stored": …}        the value as it is stored, where parts of it were lost
    "perdure": {"failure": …}       the failure as it is stored, which rebuilds the exception

A step that another library recorded is kept whole, as an entry of kind `foreign`: it fits every construct, its unknown fields
are written back, and its value is taken literally. `to_journal` is the way back into a journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from perdure.codec import Codec, Loss, load_error, tree_of
from perdure.codec.outcomes import Failure, load_failure
from perdure.codec.rebuilt_errors import RebuildReport
from perdure.codec.structure import check_structure
from perdure.errors import StepFailed
from perdure.model.approvals import Decision
from perdure.model.journal import Entry, Kind
from perdure.model.records import OWN_FIELD
from perdure.snapshots.json_reader import MAX_DEPTH
from perdure.snapshots.parts import NO_CAUSE, LossWarning, StepResult

RAISED: Final = "UNEXPECTED_ERROR"
TIMED_OUT: Final = "TIMEOUT"
_MAX_SHOWN: Final = 1_000
_MAX_CHAIN: Final = 20

CODEC: Final = Codec()
# A foreign entry holds a whole step, so its limits are those of a value plus what a step puts around one.
FOREIGN_CODEC: Final = Codec(max_bytes=CODEC.max_bytes + 2**20, max_depth=MAX_DEPTH + 2)


class StepDetails(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the shared format has no fields for, of a step that perdure recorded."""

    kind: Kind = "step"
    tagged: bool = False
    stored: msgspec.Raw = msgspec.Raw()
    failure: msgspec.Raw = msgspec.Raw()


NO_DETAILS: Final = StepDetails()
# What fails with an error that is recorded. Other constructs fail in one way only: their time is up.
FAILING_KINDS: Final[frozenset[Kind]] = frozenset({"step", "child"})
# Fields of `StepDetails` that are stored bytes in a journal and objects in a snapshot.
STORED_FIELDS: Final = ("stored", "failure")


class ResultWithWarnings(NamedTuple):
    """A step's result, and warnings about the parts of it that were lost."""

    result: StepResult
    warnings: list[LossWarning]


def read_result(entry: Entry) -> ResultWithWarnings:
    """The result that a closing entry records. Raises ValueError when it cannot be read."""
    if entry.kind == "foreign":
        return _read_foreign_result(entry)
    result, losses = read_own_result(entry)
    return ResultWithWarnings(result, [LossWarning(step_id=entry.key, path=loss.path, reason=loss.reason) for loss in losses])


def read_own_result(entry: Entry) -> tuple[StepResult, list[Loss]]:
    """The result that a closing entry of perdure's own records, and what was lost of it."""
    if entry.ok:
        return _read_success(entry)
    if entry.kind not in FAILING_KINDS:
        return _failure_result(TIMED_OUT, dict(NO_CAUSE), "result", StepDetails(kind=entry.kind)), []
    return _read_failure(entry.payload, entry.kind)


def _read_success(entry: Entry) -> tuple[StepResult, list[Loss]]:
    tree, losses = tree_of(entry.payload)
    stored = msgspec.Raw(entry.payload) if losses else msgspec.Raw()
    details = StepDetails(kind=entry.kind, tagged=not losses and b'"$' in entry.payload, stored=stored)
    return StepResult(ok=True, value=tree, extra=_extra(details)), losses


def _read_failure(payload: bytes, kind: Kind) -> tuple[StepResult, list[Loss]]:
    failure = msgspec.json.decode(payload, type=Failure)
    details = StepDetails(kind=kind, failure=msgspec.Raw(payload))
    if failure.origin == "throw":
        return _failure_result(RAISED, _exception_cause(msgspec.json.decode(failure.error)), "throw", details), []
    losses: list[Loss] = []
    if failure.is_exception:
        error = msgspec.json.decode(failure.error)
    else:
        error, losses = tree_of(bytes(failure.error))
    cause, lost = _cause_of(failure, error)
    shown = error["qualname"] if failure.is_exception else error
    losses = [*_prefix_paths(losses, "error"), *_prefix_paths(lost, "cause.value")]
    return _failure_result(shown, cause, "result", details), losses


def _prefix_paths(losses: list[Loss], to: str) -> list[Loss]:
    return [Loss(to + loss.path.removeprefix("value"), loss.reason) for loss in losses]


def _failure_result(error: Any, cause: dict[str, Any], origin: str, details: StepDetails) -> StepResult:
    return StepResult(ok=False, error=error, cause=cause, meta={"origin": origin}, extra=_extra(details))


def _cause_of(failure: Failure, error: Any) -> tuple[dict[str, Any], list[Loss]]:
    """The cause of an `Err`: the one it names, the exception inside it, or the error itself."""
    if failure.has_exception_cause:
        return _exception_cause(msgspec.json.decode(failure.cause)), []
    if bytes(failure.cause) != b"null":
        cause, losses = tree_of(bytes(failure.cause))
        return _value_cause(cause), losses
    return _exception_cause(error) if failure.is_exception else _value_cause(error), []


def _exception_cause(error: Any, depth: int = 0) -> dict[str, Any]:
    """A recorded exception as a cause."""
    cause = error.get("cause") or (None if error.get("suppress_context") else error.get("context"))
    tree = {"type": "error", "name": error["qualname"], "message": error["message"]}
    if error.get("traceback"):
        tree["stack"] = error["traceback"]
    if cause is not None and depth < _MAX_CHAIN:
        tree["cause"] = _exception_cause(cause, depth + 1)
    return tree


def _value_cause(value: Any) -> dict[str, Any]:
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


def _extra(details: StepDetails) -> dict[str, Any]:
    if details == NO_DETAILS:
        return {}
    fields: dict[str, Any] = {"kind": details.kind} if details.kind != "step" else {}
    if details.tagged:
        fields["tagged"] = True
    stored = {name: msgspec.json.decode(raw) for name in STORED_FIELDS if bytes(raw := getattr(details, name))}
    return {OWN_FIELD: {**fields, **stored}}


def _read_foreign_result(entry: Entry) -> ResultWithWarnings:
    tree, warnings = FOREIGN_CODEC.load(entry.payload)
    known = {name: tree.pop(name) for name in ("ok", "value", "error", "cause", "meta") if name in tree}
    # Fields that do not belong to this sort of outcome were unknown fields when the document was read, and stay such.
    stray = ("error", "cause") if known["ok"] else ("value",)
    extra = {**tree, **{name: known.pop(name) for name in stray if name in known}}
    return ResultWithWarnings(StepResult(**known, extra=extra), [_read_warning(entry.key, warning) for warning in warnings])


def _read_warning(key: str, tree: dict[str, Any]) -> LossWarning:
    known = {name: tree.pop(name) for name in ("type", "path", "reason")}
    return LossWarning(step_id=key, **known, extra=tree)


def load_value(codec: Codec, entry: Entry, hint: Any) -> Any:
    """The value of a step that succeeded. Raises ValueError.

    A foreign value is converted to what the annotation says where it fits, because other libraries know nothing of our classes.
    """
    if entry.kind != "foreign":
        return codec.load(entry.payload, hint)
    value = _read_foreign_result(entry).result.value
    try:
        return codec.conform(value, hint)
    except ValueError:
        return value


def load_decision(codec: Codec, entry: Entry) -> Decision:
    """What the close entry of an approval records. Raises ValueError."""
    stored = entry.payload if entry.kind != "foreign" else codec.dump(load_value(codec, entry, Any))[0]
    return msgspec.json.decode(stored, type=Decision)


def load_error_of(
    codec: Codec,
    entry: Entry,
    key: str,
    hint: Any,
    modules: Sequence[str] = (),
    report: RebuildReport | None = None,
) -> Exception:
    """The exception that a failed step raises. Raises ValueError.

    A foreign failure never becomes the Python exception that happens to have the same name.
    """
    if entry.kind != "foreign":
        return load_failure(codec, entry.payload, key, hint, modules, report)
    result = _read_foreign_result(entry).result
    cause = result.cause or NO_CAUSE
    if (result.meta or {}).get("origin") != "throw":
        return StepFailed(key, result.error)
    if cause["type"] == "error":
        return StepFailed(key, cause["name"], cause["message"])
    return StepFailed(key, result.error, cause["stringRepresentation"])


def check_failure(payload: bytes, key: str) -> None:
    """Raise ValueError if no reader could read this as a stored failure, whatever classes it knows."""
    failure = msgspec.json.decode(payload, type=Failure)
    is_described = failure.origin == "throw" or failure.is_exception
    for part, is_exception in ((failure.error, is_described), (failure.cause, failure.has_exception_cause)):
        if is_exception:
            load_error(bytes(part), key)
        else:
            check_structure(CODEC, bytes(part))
