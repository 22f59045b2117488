"""A snapshot or a resume state as the beginning of a run.

Whatever was given is read in full, checked against the workflow and turned into journal entries before anything is written and
before any code of the user's runs: a run begins with all of it, or not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from perdure.codec.outcomes import failed_keys_of
from perdure.errors import OnChange, SnapshotFormatError, SnapshotMismatch
from perdure.model.journal import Entry, Kind
from perdure.model.records import NewRun, Signal, encoded_metadata, is_changed
from perdure.snapshots.json_reader import Problems, described, shown_path
from perdure.snapshots.parts import OURS, LossWarning, StepResult
from perdure.snapshots.resume_state import ResumeState, dump_state, parse_state
from perdure.snapshots.run_metadata import Instant, Line, RunRecord, record_in
from perdure.snapshots.snapshot import Snapshot, assert_valid_snapshot, raw_tree
from perdure.snapshots.to_journal import entry_for
from perdure.snapshots.view import OF_RUN

State: TypeAlias = Snapshot | ResumeState | dict[str, Any] | str | bytes | None
GivenState: TypeAlias = State | Callable[[], State | Awaitable[State]]


class _Waiting(msgspec.Struct, frozen=True):
    """What the open entry of a wait may remember."""

    deadline: Instant | None


class _Trying(msgspec.Struct, frozen=True):
    """What the open entry of a retried step may remember."""

    at: Instant
    error: msgspec.Raw


# What an open entry of each kind remembers. That of a step may also be null: the intent to run it at most once.
_REMEMBERED: Final[Mapping[Kind, type[_Waiting | _Trying]]] = {
    "step": _Trying,
    "sleep": _Waiting,
    "signal": _Waiting,
    "timeout": _Waiting,
}


class Arguments(NamedTuple):
    """The arguments of a run, as its body gets them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Beginning(NamedTuple):
    """What a run begins with. `arguments` are what `new.input` would be read as, if that is known."""

    new: NewRun
    entries: Sequence[Entry] = ()
    inbox: Sequence[Signal] = ()
    created_at: int | None = None
    arguments: Arguments | None = None


def is_state_given(options: Mapping[str, Any]) -> bool:
    """Whether a run is to begin with what others recorded."""
    return "snapshot" in options or "resume_state" in options


async def given_state(options: Mapping[str, Any]) -> Snapshot | ResumeState | None:
    """The state that `snapshot=` or `resume_state=` gives for this run, read in full; None to start afresh."""
    if "snapshot" in options and "resume_state" in options:
        raise TypeError("snapshot= and resume_state= are two names for one option; pass one of them")
    given = options.get("snapshot", options.get("resume_state"))
    if callable(given):
        given = given()
        if inspect.isawaitable(given):
            given = await given
    return None if given is None else read_state(given)


def read_state(given: Any) -> Snapshot | ResumeState:
    """The state, whichever of the known shapes it has. Raises `SnapshotFormatError`."""
    if isinstance(given, ResumeState | Snapshot):
        _check_made(given.steps)
    if isinstance(given, ResumeState):
        return parse_state(dump_state(given))
    problems = Problems()
    tree = raw_tree(given, problems)
    if problems:
        raise SnapshotFormatError(problems.listed())
    is_state = isinstance(tree, dict) and "formatVersion" not in tree and not tree.keys().isdisjoint({"version", "kind"})
    return parse_state(tree) if is_state else assert_valid_snapshot(tree)


def _check_made(steps: Mapping[Any, Any]) -> None:
    """Refuse what somebody put together from other things than results."""
    problems = Problems()
    for key, step in steps.items():
        if not isinstance(step, StepResult):
            problems.add(("steps", str(key)), f"must be a StepResult, not {described(step)}")
    if problems:
        raise SnapshotFormatError(problems.listed())


def begun(new: NewRun, state: Snapshot | ResumeState, on_change: OnChange, *, without_failed: bool, is_named: bool) -> Beginning:
    """The beginning of the run `new` from this state. Raises `SnapshotMismatch` when the state belongs to another workflow.

    It has the definition hash of the code that recorded the state, so that whoever drives it sees whether that has changed.
    """
    metadata = dict(state.metadata or {})
    record = record_in(metadata)
    left_out = failed_keys(state, record) if without_failed else ()
    entries = entries_of({key: step for key, step in state.steps.items() if key not in left_out}, losses_of(state), record)
    if isinstance(state, Snapshot):
        new = _checked(new, state, on_change)
    new = msgspec.structs.replace(new, metadata=_merged(new.metadata, metadata, is_named=is_named))
    if record is None:
        return Beginning(new, entries)
    return Beginning(msgspec.structs.replace(new, seed=record.seed), entries, inbox_of(record), record.created_at)


def _checked(new: NewRun, state: Snapshot, on_change: OnChange) -> NewRun:
    if state.workflow_name is not None and state.workflow_name != new.workflow:
        reason = f"the snapshot is of workflow {state.workflow_name!r}, and this is {new.workflow!r}"
        raise SnapshotMismatch(new.id, reason)
    recorded = (state.metadata or {}).get("definitionHash")
    if not isinstance(recorded, str) or not is_changed(recorded, new.definition_hash):
        return new
    if on_change == "error":
        raise SnapshotMismatch(new.id, f"the code of {new.workflow!r} has changed since the snapshot was taken")
    return msgspec.structs.replace(new, definition_hash=recorded)


def _merged(given: bytes, restored: dict[str, Any], *, is_named: bool) -> bytes:
    """The metadata of a run that goes on from a snapshot: what came with that, and what was given now."""
    # A run without a name of its own keeps the one under which the snapshot knows it.
    left_out = OF_RUN if is_named else OF_RUN - {"workflowId"}
    kept = {name: value for name, value in restored.items() if name not in left_out}
    try:
        return encoded_metadata({**kept, **msgspec.json.decode(given)})
    except (TypeError, RecursionError) as reason:
        raise SnapshotFormatError([("$.metadata", f"cannot be stored: {reason}")]) from None


def failed_keys(state: Snapshot | ResumeState, record: RunRecord | None) -> set[str]:
    """The keys to leave out so that what failed is tried again: those that ended the run, or all if that is not known."""
    failed = {key for key, step in state.steps.items() if not step.ok}
    outcome = None if record is None else record.outcome_bytes()
    known = None if outcome is None else failed_keys_of(outcome)
    return failed if known is None else failed & known


def losses_of(state: Snapshot | ResumeState) -> dict[str, list[LossWarning]]:
    """What the state says was lost, by step."""
    losses: dict[str, list[LossWarning]] = {}
    for warning in state.warnings if isinstance(state, Snapshot) else ():
        losses.setdefault(warning.step_id, []).append(warning)
    return losses


def entries_of(steps: Mapping[str, StepResult], losses: Mapping[str, list[LossWarning]], record: RunRecord | None) -> list[Entry]:
    """The journal of these steps: as the record has it, and then, in the order in which they are told, those it does not know.

    A step that is not among them has not happened, so that whatever the record says about it counts for nothing.
    """
    lines = [] if record is None else _lines(record, steps)
    recorded = {line.key for line in lines if line.phase == "close"}
    entries: list[Entry] = []
    try:
        for line in lines:
            if line.phase == "open":
                entries.append(_opened(line, len(entries) + 1))
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


def _lines(record: RunRecord, steps: Mapping[str, StepResult]) -> list[Line]:
    """The lines that count, in order."""
    try:
        ordered = [record.journal[seq] for seq in sorted(record.journal, key=int)]
    except ValueError as reason:
        raise _unreadable(str(reason)) from None
    by_key: dict[str, list[tuple[int, Line]]] = {}
    for index, line in enumerate(ordered):
        known = by_key.setdefault(line.key, [])
        if known and known[-1][1].phase == "close":
            known.clear()  # it was set aside to be tried again, in the later of two snapshots that were merged
        known.append((index, line))
    kept = [each for key, known in by_key.items() if key in steps or not _is_closed(known) for each in known]
    return [line for _, line in sorted(kept, key=itemgetter(0))]


def _is_closed(lines: list[tuple[int, Line]]) -> bool:
    return lines[-1][1].phase == "close"


def _check_kinds(entries: list[Entry]) -> None:
    """Refuse a key that was opened as one thing and closed as another."""
    kinds: dict[str, Kind] = {}
    for entry in entries:
        if entry.kind != "told" and kinds.setdefault(entry.key, entry.kind) != entry.kind:
            raise _unreadable(f"{entry.key!r} is recorded as a {kinds[entry.key]} and as a {entry.kind}")


def _opened(line: Line, seq: int) -> Entry:
    payload = msgspec.json.encode(line.payload)
    if line.kind not in _REMEMBERED:
        raise _unreadable(f"{line.key!r} is open, which a {line.kind} never is")
    try:
        if line.kind != "step" or payload != b"null":
            payload = msgspec.json.encode(msgspec.json.decode(payload, type=_REMEMBERED[line.kind]))
    except msgspec.MsgspecError as reason:
        raise _unreadable(f"what {line.key!r} waits for: {reason}") from None
    return Entry(seq=seq, key=line.key, phase="open", payload=payload, **line.fields())


def _unreadable(reason: str) -> SnapshotFormatError:
    return SnapshotFormatError([(shown_path(("metadata", OURS, "journal")), f"cannot be read: {reason}")])


def inbox_of(record: RunRecord | None) -> list[Signal]:
    """The signals that wait to be consumed."""
    lines = [] if record is None else record.inbox
    return [
        Signal(seq=seq, kind=line.kind, name=line.name, payload=bytes(line.payload), dedupe=line.dedupe)
        for seq, line in enumerate(lines, 1)
    ]
