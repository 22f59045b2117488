"""`save` and `load` of whole runs as snapshots, for every store.

A saved document is returned unchanged until something happens to the run; from then on the snapshot is made from the rows, as for
any run. A snapshot without the run's input is stored all the same, and the run waits for a `create` that brings the input.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from perdure.errors import SnapshotFormatError
from perdure.model.ids import check_id, random_bytes
from perdure.model.journal import Entry
from perdure.model.records import ENDED, OWN_FIELD, RunRow, Signal, Status, encode_metadata
from perdure.snapshots.consistent_view import RUN_FIELDS, RunReader, View, load_view
from perdure.snapshots.importer import losses_by_step, read_state
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.run_metadata import RunMetadata, read_run_metadata
from perdure.snapshots.snapshot import Snapshot, assert_valid_snapshot
from perdure.snapshots.to_journal import inbox_signals, journal_entries


class _RestorableStore(RunReader, Protocol):
    """What `save` and `load` need of a store."""

    async def restore(self, run: RunRow, entries: list[Entry], inbox: list[Signal]) -> None: ...


class SavesSnapshots:
    """A base class with the verbs `save` and `load` for a store that has `restore`."""

    async def save(self: _RestorableStore, run_id: str, snapshot: Snapshot | ResumeState | dict[str, Any]) -> None:
        """Replace the run by this snapshot, atomically.

        Raises `SnapshotFormatError` when it is no snapshot, `LeaseHeld` while a worker drives the run.
        """
        await self.restore(*run_rows(check_id(run_id, "a run's id"), read_state(snapshot)))

    async def load(self: _RestorableStore, run_id: str) -> Snapshot | None:
        """The run as a snapshot, or None. It can be saved again, here or elsewhere, and passed as `snapshot=`."""
        view = await load_view(self, check_id(run_id, "a run's id"))
        return None if view is None else _saved_snapshot(view) or view.snapshot()


class _SavedDocument(msgspec.Struct, frozen=True):
    """The saved document without its steps, and what the rows were like then."""

    document: dict[str, Any]
    status: Status
    length: int
    # The number of signals, whether the input was missing, and whether a cancel was requested: the journal shows none of these.
    signals: int
    lacks_input: bool
    cancel_requested: bool

    def is_unchanged(self, view: View) -> bool:
        """Whether nothing has happened to the run since."""
        row = view.row
        now = (row.status, view.length, len(view.inbox), row.lacks_input, row.cancel_requested)
        return now == (self.status, self.length, self.signals, self.lacks_input, self.cancel_requested)


def run_rows(run_id: str, state: Snapshot | ResumeState) -> tuple[RunRow, list[Entry], list[Signal]]:
    """Row, journal and inbox of the run in this state. Raises `SnapshotFormatError`."""
    snapshot = state if isinstance(state, Snapshot) else state.to_snapshot()
    metadata = dict(snapshot.metadata or {})
    run_metadata = read_run_metadata(metadata)
    entries = journal_entries(snapshot.steps, losses_by_step(snapshot), run_metadata)
    status = _status(run_metadata)
    document = {name: part for name, part in snapshot.to_dict().items() if name != "steps"}
    users = {name: value for name, value in metadata.items() if name not in RUN_FIELDS}
    inbox = inbox_signals(run_metadata)
    start = _start_fields(metadata, run_metadata)
    is_cancelled = run_metadata is not None and run_metadata.cancel_requested and status not in ENDED
    saved = msgspec.to_builtins(_SavedDocument(document, status, len(entries), len(inbox), not start["input_hash"], is_cancelled))
    now = time.time_ns() // 1000
    row = RunRow(
        id=run_id,
        workflow=snapshot.workflow_name or ("" if run_metadata is None else run_metadata.workflow),
        status=status,
        metadata=_encode_metadata({**users, OWN_FIELD: saved}),
        created_at=now if run_metadata is None else run_metadata.created_at,
        updated_at=now,
        cancel_requested=is_cancelled,
        **start,
        **_waiting_fields(run_metadata, status, now),
    )
    return row, entries, inbox


def _status(run_metadata: RunMetadata | None) -> Status:
    """The status in which the run can be restored; pending when replaying its journal has to find out."""
    if run_metadata is None or run_metadata.status is None:
        return "pending"
    if run_metadata.status in ENDED:
        return run_metadata.status if run_metadata.outcome_bytes() is not None else "pending"
    waits = run_metadata.wake_at is not None or bool(run_metadata.waiting_for)
    return "suspended" if run_metadata.status == "suspended" and waits else "pending"


def _start_fields(metadata: dict[str, Any], run_metadata: RunMetadata | None) -> dict[str, Any]:
    """The columns with which the run was started, as far as they are known."""
    if run_metadata is None:
        return {"version": 0, "input": b"", "input_hash": b"", "seed": random_bytes()}
    definition_hash = metadata.get("definitionHash")
    return {
        "input": msgspec.json.encode(metadata.get("input")) if run_metadata.input_hash else b"",
        "input_hash": run_metadata.input_hash,
        "seed": run_metadata.seed,
        "version": run_metadata.version,
        "generation": run_metadata.generation,
        "first_input_hash": run_metadata.first_input_hash,
        "continued_at": run_metadata.continued_at,
        "definition_hash": definition_hash if isinstance(definition_hash, str) else None,
    }


def _waiting_fields(run_metadata: RunMetadata | None, status: Status, now: int) -> dict[str, Any]:
    if run_metadata is None or status == "pending":
        # A pending run keeps its start. The `wake_at` of a running one was the end of a lease, which does not apply any more.
        starts_at = run_metadata.wake_at if run_metadata is not None and run_metadata.status == "pending" else None
        return {"wake_at": now if starts_at is None else starts_at}
    return {"wake_at": run_metadata.wake_at, "waiting_for": run_metadata.waiting_for, "outcome": run_metadata.outcome_bytes()}


def _encode_metadata(metadata: dict[str, Any]) -> bytes:
    try:
        return encode_metadata(metadata)
    except TypeError as reason:
        raise SnapshotFormatError([("$.metadata", f"cannot be stored: {reason}")]) from None


def _saved_snapshot(view: View) -> Snapshot | None:
    """The snapshot that was saved, if nothing has happened to the run since."""
    tree = msgspec.json.decode(view.row.metadata).get(OWN_FIELD)
    if tree is None:
        return None
    saved = msgspec.convert(tree, _SavedDocument)
    if not saved.is_unchanged(view):
        return None
    steps = {key: step.tree() for key, step in view.snapshot().steps.items()}
    return assert_valid_snapshot({**saved.document, "steps": steps})
