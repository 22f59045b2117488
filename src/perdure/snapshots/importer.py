"""Starts a run from a snapshot or a resume state (`snapshot=`, `resume_state=`).

The state is read in full, checked against the workflow and turned into journal entries before anything is written and before any
code of the user runs: a run starts with all of it, or not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from perdure.codec.outcomes import failed_keys_of
from perdure.errors import OnChange, SnapshotFormatError, SnapshotMismatch
from perdure.model.journal import Entry, undone_keys
from perdure.model.records import NewRun, Signal, encode_metadata, is_changed
from perdure.snapshots.consistent_view import RUN_FIELDS
from perdure.snapshots.json_reader import Problems, describe
from perdure.snapshots.parts import LossWarning, StepResult
from perdure.snapshots.resume_state import ResumeState, dump_state, parse_state
from perdure.snapshots.run_metadata import RunMetadata, read_run_metadata
from perdure.snapshots.snapshot import Snapshot, assert_valid_snapshot, raw_tree
from perdure.snapshots.to_journal import inbox_signals, journal_entries

State: TypeAlias = Snapshot | ResumeState | dict[str, Any] | str | bytes | None
StateSource: TypeAlias = State | Callable[[], State | Awaitable[State]]


class Arguments(NamedTuple):
    """The arguments of a run, as its body gets them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RunStart(NamedTuple):
    """What a run starts with. `arguments` are the decoded `new.input`, if the caller has them."""

    new: NewRun
    entries: Sequence[Entry] = ()
    inbox: Sequence[Signal] = ()
    created_at: int | None = None
    arguments: Arguments | None = None


def has_state(*levels: Mapping[str, Any]) -> bool:
    """Whether the options say where the state comes from, so that the caller keeps it elsewhere."""
    return any("snapshot" in options or "resume_state" in options for options in levels)


def given_state(*levels: Mapping[str, Any]) -> Any:
    """Return what `snapshot=` or `resume_state=` was given: a state, a function that loads one, or None."""
    given: Any = None
    for options in levels:
        if "snapshot" in options:
            given = options["snapshot"]
        elif "resume_state" in options:
            given = options["resume_state"]
    return given


async def resolve_state(*levels: Mapping[str, Any]) -> Snapshot | ResumeState | None:
    """The state that `snapshot=` or `resume_state=` names, called and awaited if need be, and read in full; None for no state.

    The levels of options go from the farthest to the nearest, which wins.
    """
    given = given_state(*levels)
    if given is not None and callable(given):
        given = given()
        if inspect.isawaitable(given):
            given = await given
    return None if given is None else read_state(given)


def read_state(given: Any) -> Snapshot | ResumeState:
    """The state in a document of any known shape. Raises `SnapshotFormatError`."""
    if isinstance(given, ResumeState | Snapshot):
        _check_results(given.steps)
    if isinstance(given, ResumeState):
        return parse_state(dump_state(given))
    problems = Problems()
    tree = raw_tree(given, problems)
    if problems:
        raise SnapshotFormatError(problems.errors())
    is_state = isinstance(tree, dict) and "formatVersion" not in tree and not tree.keys().isdisjoint({"version", "kind"})
    return parse_state(tree) if is_state else assert_valid_snapshot(tree)


def _check_results(steps: Mapping[Any, Any]) -> None:
    """Refuse a state object that was built from something else than results."""
    problems = Problems()
    for key, step in steps.items():
        if not isinstance(step, StepResult):
            problems.add(("steps", str(key)), f"must be a StepResult, not {describe(step)}")
    if problems:
        raise SnapshotFormatError(problems.errors())


def import_state(
    new: NewRun, state: Snapshot | ResumeState, on_change: OnChange, *, without_failed: bool = False, is_named: bool = False
) -> RunStart:
    """The run `new` with this state as its journal. Raises `SnapshotMismatch` when the state belongs to another workflow.

    The run gets the definition hash of the code that recorded the state, so its driver can detect that the code has changed.
    """
    metadata = dict(state.metadata or {})
    run_metadata = read_run_metadata(metadata)
    steps: Mapping[str, StepResult] = state.steps
    if without_failed:
        steps, run_metadata = _without_failed(state, run_metadata)
    entries = journal_entries(steps, losses_by_step(state), run_metadata)
    if isinstance(state, Snapshot):
        new = _match_workflow(new, state, on_change)
    new = msgspec.structs.replace(new, metadata=_merge_metadata(new.metadata, metadata, is_named=is_named))
    if run_metadata is None:
        return RunStart(new, entries)
    new = msgspec.structs.replace(_with_generation(new, run_metadata, metadata), seed=run_metadata.seed)
    return RunStart(new, entries, inbox_signals(run_metadata), run_metadata.created_at)


def _without_failed(
    state: Snapshot | ResumeState, run_metadata: RunMetadata | None
) -> tuple[dict[str, StepResult], RunMetadata | None]:
    """Return the steps and the metadata without what a retry sets aside."""
    lines = () if run_metadata is None else {line.key for line in run_metadata.journal.values()}
    undone = undone_keys({*state.steps, *lines}, {key for key, step in state.steps.items() if step.ok})
    left_out = failed_keys(state, run_metadata) | undone
    steps = {key: step for key, step in state.steps.items() if key not in left_out}
    return steps, None if run_metadata is None else run_metadata.without(left_out, undone)


def _with_generation(new: NewRun, run_metadata: RunMetadata, metadata: Mapping[str, Any]) -> NewRun:
    """The run in the generation of the snapshot. One that had started over goes on with the input of that generation."""
    if run_metadata.first_input_hash is None or "input" not in metadata:
        return msgspec.structs.replace(new, generation=run_metadata.generation)
    return msgspec.structs.replace(
        new,
        input=msgspec.json.encode(metadata["input"]),
        input_hash=run_metadata.input_hash,
        generation=run_metadata.generation,
        first_input_hash=new.input_hash,
        continued_at=run_metadata.continued_at,
    )


def _match_workflow(new: NewRun, state: Snapshot, on_change: OnChange) -> NewRun:
    """The run with the recorded definition hash. Raises `SnapshotMismatch` for another workflow, or changed code with "error"."""
    if state.workflow_name is not None and state.workflow_name != new.workflow:
        reason = f"the snapshot is of workflow {state.workflow_name!r}, and this is {new.workflow!r}"
        raise SnapshotMismatch(new.id, reason)
    recorded = (state.metadata or {}).get("definitionHash")
    if not isinstance(recorded, str) or not is_changed(recorded, new.definition_hash):
        return new
    if on_change == "error":
        raise SnapshotMismatch(new.id, f"the code of {new.workflow!r} has changed since the snapshot was taken")
    return msgspec.structs.replace(new, definition_hash=recorded)


def _merge_metadata(given: bytes, restored: dict[str, Any], *, is_named: bool) -> bytes:
    """The metadata of a run that goes on from a snapshot: that of the snapshot, overridden by what was passed now."""
    # A run that was started without an id keeps the one in the snapshot.
    left_out = RUN_FIELDS if is_named else RUN_FIELDS - {"workflowId"}
    kept = {name: value for name, value in restored.items() if name not in left_out}
    try:
        return encode_metadata({**kept, **msgspec.json.decode(given)})
    except (TypeError, RecursionError) as reason:
        raise SnapshotFormatError([("$.metadata", f"cannot be stored: {reason}")]) from None


def failed_keys(state: Snapshot | ResumeState, run_metadata: RunMetadata | None) -> set[str]:
    """The failed keys to leave out so that they run again: those that ended the run, or all if those are not known."""
    failed = {key for key, step in state.steps.items() if not step.ok}
    outcome = None if run_metadata is None else run_metadata.outcome_bytes()
    known = None if outcome is None else failed_keys_of(outcome)
    return failed if known is None else failed & known


def losses_by_step(state: Snapshot | ResumeState) -> dict[str, list[LossWarning]]:
    """The warnings of the state, by step."""
    losses: dict[str, list[LossWarning]] = {}
    for warning in state.warnings if isinstance(state, Snapshot) else ():
        losses.setdefault(warning.step_id, []).append(warning)
    return losses
