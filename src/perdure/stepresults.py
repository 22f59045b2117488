"""A step in the journal as a `StepResult` of a snapshot, and back.

The shared format tells plain values and errors in plain words. What it has no words for stands beside them in a field of our own,
so that a step that went through a snapshot is what it was:

    "perdure": {"kind": "sleep"}    it is no step but another construct
    "perdure": {"tagged": true}     the value has tags ({"$datetime": …}); without this, "$" in a value means nothing
    "perdure": {"stored": …}        the value as it is stored, where parts of it were lost
    "perdure": {"failure": …}       the failure as it is stored, which rebuilds the exception

A step that came from elsewhere is kept as it was told, whole, under the kind `told`: it fits every construct, its fields that
nobody here knows are given back, and what it says is taken literally.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from perdure.codec import Codec, Loss, load_error, tree_of
from perdure.codec.structure import check_structure
from perdure.errors import SnapshotFormatError, StepFailed, ValueNotStorable
from perdure.journal import Entry, Kind
from perdure.outcomes import Failure, load_failure
from perdure.plainjson import MAX_DEPTH, shown_path
from perdure.snapshot import NO_CAUSE, OURS, LossWarning, StepResult

RAISED: Final = "UNEXPECTED_ERROR"
TIMED_OUT: Final = "TIMEOUT"
_MAX_SHOWN: Final = 1_000
_MAX_CHAIN: Final = 20

_codec: Final = Codec()
# A step as others told it has a value that may be as large and deep as any, and stands around that.
_told_codec: Final = Codec(max_bytes=_codec.max_bytes + 2**20, max_depth=MAX_DEPTH + 2)


class Mark(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the shared format cannot say about a step of ours."""

    kind: Kind = "step"
    tagged: bool = False
    stored: msgspec.Raw = msgspec.Raw()
    failure: msgspec.Raw = msgspec.Raw()


_NO_MARK: Final = Mark()
# Fields of a mark that are stored bytes, and objects in a snapshot.
_STORED: Final = ("stored", "failure")


class Told(NamedTuple):
    """A step's result, and warnings about the parts of it that were lost."""

    result: StepResult
    warnings: list[LossWarning]


def told(entry: Entry) -> Told:
    """The result that a closing entry records. Raises ValueError when it cannot be read."""
    if entry.kind == "told":
        return _as_told(entry)
    result, losses = _ours(entry)
    return Told(result, [LossWarning(step_id=entry.key, path=loss.path, reason=loss.reason) for loss in losses])


def _ours(entry: Entry) -> tuple[StepResult, list[Loss]]:
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
    if mark == _NO_MARK:
        return {}
    fields: dict[str, Any] = {"kind": mark.kind} if mark.kind != "step" else {}
    if mark.tagged:
        fields["tagged"] = True
    stored = {name: msgspec.json.decode(raw) for name in _STORED if bytes(raw := getattr(mark, name))}
    return {OURS: {**fields, **stored}}


def _as_told(entry: Entry) -> Told:
    tree, warnings = _told_codec.load(entry.payload)
    known = {name: tree.pop(name) for name in ("ok", "value", "error", "cause", "meta") if name in tree}
    # What does not belong to an outcome of this sort was an unknown field when it was read, and is one again.
    stray = ("error", "cause") if known["ok"] else ("value",)
    extra = {**tree, **{name: known.pop(name) for name in stray if name in known}}
    return Told(StepResult(**known, extra=extra), [_warning(entry.key, warning) for warning in warnings])


def _warning(key: str, tree: dict[str, Any]) -> LossWarning:
    known = {name: tree.pop(name) for name in ("type", "path", "reason")}
    return LossWarning(step_id=key, **known, extra=tree)


# The way back.


def entry_for(key: str, result: StepResult, warnings: Iterable[LossWarning], seq: int, line: Mapping[str, Any]) -> Entry:
    """The entry that records this result. `line` has what is known of it besides, empty when it came from elsewhere.

    What we recorded ourselves is recorded again as it was, unless somebody has said something else about it since: then that is
    what counts. `SnapshotFormatError` when no entry can say it.
    """
    mark = _mark_of(key, result)
    kind = _kind_of(result, mark, line)
    if kind != "told":
        entry = Entry(seq=seq, key=key, **{**line, "kind": kind}, ok=result.ok, payload=_payload(key, result, mark, kind))
        if _says(entry, result):
            return entry
    return Entry(seq=seq, key=key, **{**line, "kind": "told"}, ok=result.ok, payload=_told_payload(key, result, warnings))


def _mark_of(key: str, result: StepResult) -> Mark:
    said = result.extra.get(OURS, {})
    try:
        if not isinstance(said, dict):
            raise msgspec.ValidationError("it must be an object")
        mark = msgspec.convert({name: value for name, value in said.items() if name not in _STORED}, Mark)
        stored = {name: msgspec.Raw(msgspec.json.encode(said[name])) for name in _STORED if name in said}
        return msgspec.structs.replace(mark, **stored)
    except (msgspec.ValidationError, UnicodeError) as reason:
        raise _format_error((key, OURS), f"cannot be read: {reason}") from None


def _kind_of(result: StepResult, mark: Mark, line: Mapping[str, Any]) -> Kind:
    """What the step is recorded as. Without a mark of ours, only a plain value that the journal knows is ours."""
    recorded: Kind = line.get("kind", "told")
    if mark == _NO_MARK or (line and recorded == "told"):
        return recorded if result.ok else "told"
    return mark.kind if result.ok or mark.kind != "step" or bytes(mark.failure) else "told"


def _says(entry: Entry, result: StepResult) -> bool:
    """Whether the entry tells this result in the same words."""
    same = _ours(entry)[0]
    return (same.value, same.error, same.cause, same.meta) == (result.value, result.error, result.cause, result.meta)


def _payload(key: str, result: StepResult, mark: Mark, kind: Kind) -> bytes:
    if not result.ok:
        return _failure_payload(key, mark) if kind == "step" else b"null"
    try:
        payload = _value_payload(result.value, mark)
        if kind == "race" and msgspec.json.decode(payload, type=int) < 0:
            raise ValueError("a race is won by a branch, which counts from 0")
    except (ValueError, ValueNotStorable) as reason:
        raise _format_error((key, "value"), f"cannot be read: {reason}") from None
    return payload


def _value_payload(value: Any, mark: Mark) -> bytes:
    stored = bytes(mark.stored)
    if not mark.tagged and not stored:
        return _codec.dump(value)[0]
    # A value that somebody changed since is no longer what was stored.
    payload = stored if stored and tree_of(stored)[0] == value else msgspec.json.encode(value)
    check_structure(_codec, payload)
    return payload


def _failure_payload(key: str, mark: Mark) -> bytes:
    payload = bytes(mark.failure)
    try:
        check_failure(payload, key)
    except ValueError as reason:
        raise _format_error((key, OURS, "failure"), f"cannot be read: {reason}") from None
    return payload


def check_failure(payload: bytes, key: str) -> None:
    """Raise ValueError if this cannot be a stored failure, whatever classes the reader knows."""
    failure = msgspec.json.decode(payload, type=Failure)
    is_described = failure.origin == "throw" or failure.is_exception
    for part, is_exception in ((failure.error, is_described), (failure.cause, failure.has_exception_cause)):
        if is_exception:
            load_error(bytes(part), key)
        else:
            check_structure(_codec, bytes(part))


def _told_payload(key: str, result: StepResult, warnings: Iterable[LossWarning]) -> bytes:
    lost = [{name: part for name, part in warning.tree().items() if name != "stepId"} for warning in warnings]
    try:
        return _told_codec.dump([result.tree(), lost])[0]
    except ValueNotStorable as reason:
        raise _format_error((key,), f"cannot be stored: {reason}") from None


def _format_error(path: tuple[str, ...], reason: str) -> SnapshotFormatError:
    return SnapshotFormatError([(shown_path(("steps", *path)), reason)])


# What a recorded step gives the body.


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
