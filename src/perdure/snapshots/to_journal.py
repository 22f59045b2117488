"""A step of a snapshot as an entry of a journal.

Snapshots may come from anywhere, so nothing in one is trusted: what an entry cannot hold, or could not be read back, is refused
here, before a run starts with it.
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
from perdure.snapshots.json_reader import format_path
from perdure.snapshots.parts import OWN_FIELD, LossWarning, StepResult
from perdure.snapshots.step_results import CODEC, FOREIGN_CODEC, NO_DETAILS, STORED_FIELDS, StepDetails, read_own_result


def entry_for(key: str, result: StepResult, warnings: Iterable[LossWarning], seq: int, line: Mapping[str, Any]) -> Entry:
    """The entry that records this result. `line` has the other fields of the entry; it is empty for a foreign result.

    A result that perdure recorded becomes the same entry again. If it was edited since, the edited result counts, recorded as
    foreign if an entry of perdure's own could not hold it. `SnapshotFormatError` when no entry can.
    """
    details = _read_details(key, result)
    kind = _kind(result, details, line)
    if kind != "foreign":
        entry = Entry(seq=seq, key=key, **{**line, "kind": kind}, ok=result.ok, payload=_payload(key, result, details, kind))
        if _reads_back(entry, result):
            return entry
    return Entry(seq=seq, key=key, **{**line, "kind": "foreign"}, ok=result.ok, payload=_foreign_payload(key, result, warnings))


def _read_details(key: str, result: StepResult) -> StepDetails:
    tree = result.extra.get(OWN_FIELD, {})
    try:
        if not isinstance(tree, dict):
            raise msgspec.ValidationError("it must be an object")
        details = msgspec.convert({name: value for name, value in tree.items() if name not in STORED_FIELDS}, StepDetails)
        stored = {name: msgspec.Raw(msgspec.json.encode(tree[name])) for name in STORED_FIELDS if name in tree}
        return msgspec.structs.replace(details, **stored)
    except (msgspec.ValidationError, UnicodeError) as reason:
        raise _format_error((key, OWN_FIELD), f"cannot be read: {reason}") from None


def _kind(result: StepResult, details: StepDetails, line: Mapping[str, Any]) -> Kind:
    """The kind of the entry. Without details, only a plain value that has a journal line is perdure's own."""
    recorded: Kind = line.get("kind", "foreign")
    if details == NO_DETAILS or (line and recorded == "foreign"):
        return recorded if result.ok else "foreign"
    return details.kind if result.ok or details.kind != "step" or bytes(details.failure) else "foreign"


def _reads_back(entry: Entry, result: StepResult) -> bool:
    """Whether the entry reads back as this result."""
    same = read_own_result(entry)[0]
    return (same.value, same.error, same.cause, same.meta) == (result.value, result.error, result.cause, result.meta)


def _payload(key: str, result: StepResult, details: StepDetails, kind: Kind) -> bytes:
    if not result.ok:
        return _failure_payload(key, details) if kind == "step" else b"null"
    try:
        payload = _value_payload(result.value, details)
        if kind == "race" and msgspec.json.decode(payload, type=int) < 0:
            raise ValueError("a race is won by a branch, which counts from 0")
    except (ValueError, ValueNotStorable) as reason:
        raise _format_error((key, "value"), f"cannot be read: {reason}") from None
    return payload


def _value_payload(value: Any, details: StepDetails) -> bytes:
    stored = bytes(details.stored)
    if not details.tagged and not stored:
        return CODEC.dump(value)[0]
    # The stored form counts only if the value was not edited since.
    payload = stored if stored and tree_of(stored)[0] == value else msgspec.json.encode(value)
    check_structure(CODEC, payload)
    return payload


def _failure_payload(key: str, details: StepDetails) -> bytes:
    payload = bytes(details.failure)
    try:
        check_failure(payload, key)
    except ValueError as reason:
        raise _format_error((key, OWN_FIELD, "failure"), f"cannot be read: {reason}") from None
    return payload


def check_failure(payload: bytes, key: str) -> None:
    """Raise ValueError if no reader could read this as a stored failure, whatever classes it knows."""
    failure = msgspec.json.decode(payload, type=Failure)
    is_described = failure.origin == "throw" or failure.is_exception
    for part, is_exception in ((failure.error, is_described), (failure.cause, failure.has_exception_cause)):
        if is_exception:
            load_error(bytes(part), key)
        else:
            check_structure(CODEC, bytes(part))


def _foreign_payload(key: str, result: StepResult, warnings: Iterable[LossWarning]) -> bytes:
    lost = [{name: part for name, part in warning.tree().items() if name != "stepId"} for warning in warnings]
    try:
        return FOREIGN_CODEC.dump([result.tree(), lost])[0]
    except ValueNotStorable as reason:
        raise _format_error((key,), f"cannot be stored: {reason}") from None


def _format_error(path: tuple[str, ...], reason: str) -> SnapshotFormatError:
    return SnapshotFormatError([(format_path(("steps", *path)), reason)])
