"""A step of a snapshot as an entry of a journal.

Snapshots come from anywhere, so nothing in one is trusted: what an entry cannot say, or could not be read back, is refused here,
before a run begins with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from perdure.codec import load_error, tree_of
from perdure.codec.outcomes import Failure
from perdure.codec.structure import check_structure
from perdure.errors import SnapshotFormatError, ValueNotStorable
from perdure.model.journal import Entry, Kind
from perdure.snapshots.json_reader import shown_path
from perdure.snapshots.parts import OURS, LossWarning, StepResult
from perdure.snapshots.step_results import CODEC, NO_MARK, STORED, TOLD_CODEC, Mark, our_result


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
        mark = msgspec.convert({name: value for name, value in said.items() if name not in STORED}, Mark)
        stored = {name: msgspec.Raw(msgspec.json.encode(said[name])) for name in STORED if name in said}
        return msgspec.structs.replace(mark, **stored)
    except (msgspec.ValidationError, UnicodeError) as reason:
        raise _format_error((key, OURS), f"cannot be read: {reason}") from None


def _kind_of(result: StepResult, mark: Mark, line: Mapping[str, Any]) -> Kind:
    """What the step is recorded as. Without a mark of ours, only a plain value that the journal knows is ours."""
    recorded: Kind = line.get("kind", "told")
    if mark == NO_MARK or (line and recorded == "told"):
        return recorded if result.ok else "told"
    return mark.kind if result.ok or mark.kind != "step" or bytes(mark.failure) else "told"


def _says(entry: Entry, result: StepResult) -> bool:
    """Whether the entry tells this result in the same words."""
    same = our_result(entry)[0]
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
        return CODEC.dump(value)[0]
    # A value that somebody changed since is no longer what was stored.
    payload = stored if stored and tree_of(stored)[0] == value else msgspec.json.encode(value)
    check_structure(CODEC, payload)
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
            check_structure(CODEC, bytes(part))


def _told_payload(key: str, result: StepResult, warnings: Iterable[LossWarning]) -> bytes:
    lost = [{name: part for name, part in warning.tree().items() if name != "stepId"} for warning in warnings]
    try:
        return TOLD_CODEC.dump([result.tree(), lost])[0]
    except ValueNotStorable as reason:
        raise _format_error((key,), f"cannot be stored: {reason}") from None


def _format_error(path: tuple[str, ...], reason: str) -> SnapshotFormatError:
    return SnapshotFormatError([(shown_path(("steps", *path)), reason)])
