"""The steps of a snapshot as the journal of a run that goes on from it.

Snapshots may come from anywhere, so nothing in one is trusted: what an entry cannot hold, or could not be read back, is refused
here, before a run starts with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any, Final

import msgspec

from perdure.codec import tree_of
from perdure.codec.structure import check_structure
from perdure.errors import SnapshotFormatError, ValueNotStorable
from perdure.model.approvals import Decision
from perdure.model.ids import check_id
from perdure.model.journal import CancelPoint, Entry, Intent, Kind, OpenChild, drop_entry, name_kind
from perdure.model.records import OWN_FIELD, Signal
from perdure.snapshots.json_reader import format_path
from perdure.snapshots.parts import LossWarning, StepResult
from perdure.snapshots.run_metadata import Instant, JournalLine, RunMetadata
from perdure.snapshots.step_results import (
    CODEC,
    FAILING_KINDS,
    FOREIGN_CODEC,
    NO_DETAILS,
    STORED_FIELDS,
    StepDetails,
    check_failure,
    read_own_result,
)


class _OpenWaitPayload(msgspec.Struct, frozen=True):
    """The payload that the open entry of a wait may have."""

    deadline: Instant | None


class _OpenRetryPayload(msgspec.Struct, frozen=True, tag="retry"):
    """The payload that the open entry of a retried step may have."""

    at: Instant
    error: msgspec.Raw


class _OpenApprovalPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """The payload that the open entry of an approval may have."""

    deadline: Instant | None
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    payload: msgspec.Raw
    assignees: tuple[str, ...] = ()
    type: str | None = None

    def __post_init__(self) -> None:
        check_structure(CODEC, bytes(self.payload))


# The payload of an open entry of each kind.
_OPEN_PAYLOADS: Final[Mapping[Kind, Any]] = {
    "step": _OpenRetryPayload | Intent,
    "sleep": _OpenWaitPayload,
    "signal": _OpenWaitPayload,
    "approval": _OpenApprovalPayload,
    "timeout": _OpenWaitPayload,
    "timer": _OpenWaitPayload,
    "child": OpenChild,
}


# What the value of a closed entry has to be, of kinds that no step has.
_PAYLOADS: Final[Mapping[Kind, Any]] = {"approval": Decision, "cancel": CancelPoint}


def journal_entries(
    steps: Mapping[str, StepResult], losses: Mapping[str, list[LossWarning]], run_metadata: RunMetadata | None
) -> list[Entry]:
    """The journal of these steps: first those that the run's metadata has, in its order, then the others in the order given.

    Lines of the metadata about a step that is not among these are ignored: that step has not happened.
    """
    lines = [] if run_metadata is None else _lines_in_force(run_metadata, steps)
    recorded = {line.key for line in lines if line.phase == "close"}
    entries = [] if run_metadata is None else _undone_before(run_metadata)
    try:
        for line in lines:
            if line.phase == "open":
                entries.append(_open_entry(line, len(entries) + 1))
            elif line.phase == "cancel":
                entries.append(Entry(seq=len(entries) + 1, key=line.key, phase="cancel", **line.fields()))
            else:
                step, lost = steps[line.key], losses.get(line.key, ())
                entries.append(entry_for(line.key, step, lost, len(entries) + 1, line.fields()))
        for key, step in steps.items():
            if key not in recorded:
                entries.append(entry_for(key, step, losses.get(key, ()), len(entries) + 1, {}))
    except RecursionError:
        raise SnapshotFormatError([("$.steps", "are nested too deeply for the stack that is left")]) from None
    _check_kinds(entries)
    return entries


def _undone_before(run_metadata: RunMetadata) -> list[Entry]:
    """Return the entry that says how often each step was undone, if one was."""
    keys = [key for key, times in run_metadata.undone.items() for _ in range(times)]
    return [drop_entry(1, keys, run_metadata.created_at, 0)] if keys else []


def _lines_in_force(run_metadata: RunMetadata, steps: Mapping[str, StepResult]) -> list[JournalLine]:
    """The lines that apply to these steps, in order."""
    try:
        ordered = [run_metadata.journal[seq] for seq in sorted(run_metadata.journal, key=int)]
    except ValueError as reason:
        raise _journal_error(str(reason)) from None
    by_key: dict[str, list[tuple[int, JournalLine]]] = {}
    for index, line in enumerate(ordered):
        known = by_key.setdefault(line.key, [])
        if known and known[-1][1].phase == "close":
            known.clear()  # two snapshots were merged, and in the later one this key was dropped to run again
        known.append((index, line))
    kept = [each for key, known in by_key.items() if key in steps or not _is_closed(known) for each in known]
    return [line for _, line in sorted(kept, key=itemgetter(0))]


def _is_closed(lines: list[tuple[int, JournalLine]]) -> bool:
    return lines[-1][1].phase == "close"


def _check_kinds(entries: list[Entry]) -> None:
    """Refuse a key that was opened as one kind and closed as another."""
    kinds: dict[str, Kind] = {}
    for entry in entries:
        if entry.kind != "foreign" and kinds.setdefault(entry.key, entry.kind) != entry.kind:
            raise _journal_error(f"{entry.key!r} is recorded as {name_kind(kinds[entry.key])} and as {name_kind(entry.kind)}")


def _open_entry(line: JournalLine, seq: int) -> Entry:
    payload = msgspec.json.encode(line.payload)
    if line.kind not in _OPEN_PAYLOADS:
        raise _journal_error(f"{line.key!r} is open, which a {line.kind} never is")
    try:
        opened = msgspec.json.decode(payload, type=_OPEN_PAYLOADS[line.kind])
        if isinstance(opened, OpenChild):
            check_id(opened.id, "the id of a child")
        payload = msgspec.json.encode(opened)
    except (msgspec.MsgspecError, ValueError) as reason:
        raise _journal_error(f"what {line.key!r} waits for: {reason}") from None
    return Entry(seq=seq, key=line.key, phase="open", payload=payload, **line.fields())


def _journal_error(reason: str) -> SnapshotFormatError:
    return SnapshotFormatError([(format_path(("metadata", OWN_FIELD, "journal")), f"cannot be read: {reason}")])


def inbox_signals(run_metadata: RunMetadata | None) -> list[Signal]:
    """The signals that are not consumed yet."""
    lines = [] if run_metadata is None else run_metadata.inbox
    return [
        Signal(seq=seq, kind=line.kind, name=line.name, payload=bytes(line.payload), dedupe=line.dedupe)
        for seq, line in enumerate(lines, 1)
    ]


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
    return details.kind if result.ok or details.kind not in FAILING_KINDS or bytes(details.failure) else "foreign"


def _reads_back(entry: Entry, result: StepResult) -> bool:
    """Whether the entry reads back as this result."""
    same = read_own_result(entry)[0]
    return (same.value, same.error, same.cause, same.meta) == (result.value, result.error, result.cause, result.meta)


def _payload(key: str, result: StepResult, details: StepDetails, kind: Kind) -> bytes:
    if not result.ok:
        return _failure_payload(key, details) if kind in FAILING_KINDS else b"null"
    try:
        payload = _value_payload(result.value, details)
        if kind == "race":
            raise ValueError("which coroutines end first is not recorded, so no step is a race")
        if kind in _PAYLOADS:
            msgspec.json.decode(payload, type=_PAYLOADS[kind])
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


def _foreign_payload(key: str, result: StepResult, warnings: Iterable[LossWarning]) -> bytes:
    lost = [{name: part for name, part in warning.tree().items() if name != "stepId"} for warning in warnings]
    try:
        return FOREIGN_CODEC.dump([result.tree(), lost])[0]
    except ValueNotStorable as reason:
        raise _format_error((key,), f"cannot be stored: {reason}") from None


def _format_error(path: tuple[str, ...], reason: str) -> SnapshotFormatError:
    return SnapshotFormatError([(format_path(("steps", *path)), reason)])
