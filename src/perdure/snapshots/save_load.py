"""`save` and `load` of whole runs, for every store: a run goes in as a snapshot and comes out as one.

What was saved comes out word for word until something happens to the run; from then on the snapshot is made from the rows, as for
any run. A snapshot that does not say with which input the run was started is kept as it is, and waits for a `create` that does.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec

from perdure.errors import SnapshotFormatError
from perdure.model.ids import check_id, random_bytes
from perdure.model.journal import Entry
from perdure.model.records import ENDED, RunRow, Signal, Status, encoded_metadata
from perdure.snapshots.importer import entries_of, inbox_of, losses_of, read_state
from perdure.snapshots.parts import OURS
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.run_metadata import RunRecord, record_in
from perdure.snapshots.snapshot import Snapshot, assert_valid_snapshot
from perdure.snapshots.view import OF_RUN, Readable, View, stored_view


class _Rows(Readable, Protocol):
    """What is needed of a store."""

    async def restore(self, run: RunRow, entries: list[Entry], inbox: list[Signal]) -> None: ...


class SavesSnapshots:
    """The verbs `save` and `load` of a store that has `restore`."""

    async def save(self: _Rows, run_id: str, snapshot: Snapshot | ResumeState | dict[str, Any]) -> None:
        """Put the run in place of what is there, all or nothing.

        Raises `SnapshotFormatError` when it is no snapshot, `LeaseHeld` while a worker drives the run.
        """
        await self.restore(*rows_of(check_id(run_id, "a run's id"), read_state(snapshot)))

    async def load(self: _Rows, run_id: str) -> Snapshot | None:
        """The run as a snapshot, or None. It can be saved again, here or elsewhere, and passed as `snapshot=`."""
        view = await stored_view(self, check_id(run_id, "a run's id"))
        return None if view is None else _as_saved(view) or view.snapshot()


class _Saved(msgspec.Struct, frozen=True):
    """What was saved besides the steps, and how the rows stood then."""

    document: dict[str, Any]
    status: Status
    length: int
    # How many signals waited, whether the input was missing, and whether it was to be cancelled: none of it shows in the journal.
    signals: int
    lacks_input: bool
    cancel_requested: bool

    def still_stands(self, view: View) -> bool:
        """Whether nothing has happened to the run since."""
        row = view.row
        now = (row.status, view.length, len(view.inbox), row.lacks_input, row.cancel_requested)
        return now == (self.status, self.length, self.signals, self.lacks_input, self.cancel_requested)


def rows_of(run_id: str, state: Snapshot | ResumeState) -> tuple[RunRow, list[Entry], list[Signal]]:
    """The rows of a run that stands like this. Raises `SnapshotFormatError`."""
    snapshot = state if isinstance(state, Snapshot) else state.to_snapshot()
    metadata = dict(snapshot.metadata or {})
    record = record_in(metadata)
    entries = entries_of(snapshot.steps, losses_of(snapshot), record)
    status = _status(record)
    document = {name: part for name, part in snapshot.to_dict().items() if name != "steps"}
    users = {name: value for name, value in metadata.items() if name not in OF_RUN}
    inbox = inbox_of(record)
    start = _start(metadata, record)
    is_cancelled = record is not None and record.cancel_requested and status not in ENDED
    saved = msgspec.to_builtins(_Saved(document, status, len(entries), len(inbox), not start["input_hash"], is_cancelled))
    now = time.time_ns() // 1000
    row = RunRow(
        id=run_id,
        workflow=snapshot.workflow_name or ("" if record is None else record.workflow),
        status=status,
        metadata=_metadata({**users, OURS: saved}),
        created_at=now if record is None else record.created_at,
        updated_at=now,
        cancel_requested=is_cancelled,
        **start,
        **_standing(record, status, now),
    )
    return row, entries, inbox


def _status(record: RunRecord | None) -> Status:
    """How the run stands, as far as it can be put back; otherwise its code finds out, from what is recorded."""
    if record is None or record.status is None:
        return "pending"
    if record.status in ENDED:
        return record.status if record.outcome_bytes() is not None else "pending"
    waits = record.wake_at is not None or bool(record.waiting_for)
    return "suspended" if record.status == "suspended" and waits else "pending"


def _start(metadata: dict[str, Any], record: RunRecord | None) -> dict[str, Any]:
    """With what the run was started, if that is known."""
    if record is None:
        return {"input": b"", "input_hash": b"", "seed": random_bytes()}
    definition_hash = metadata.get("definitionHash")
    return {
        "input": msgspec.json.encode(metadata.get("input")) if record.input_hash else b"",
        "input_hash": record.input_hash,
        "seed": record.seed,
        "definition_hash": definition_hash if isinstance(definition_hash, str) else None,
    }


def _standing(record: RunRecord | None, status: Status, now: int) -> dict[str, Any]:
    if record is None or status == "pending":
        # One that was to start later still is. Otherwise what it had was the end of a lease.
        starts_at = record.wake_at if record is not None and record.status == "pending" else None
        return {"wake_at": now if starts_at is None else starts_at}
    return {"wake_at": record.wake_at, "waiting_for": record.waiting_for, "outcome": record.outcome_bytes()}


def _metadata(metadata: dict[str, Any]) -> bytes:
    try:
        return encoded_metadata(metadata)
    except TypeError as reason:
        raise SnapshotFormatError([("$.metadata", f"cannot be stored: {reason}")]) from None


def _as_saved(view: View) -> Snapshot | None:
    """The snapshot that was saved, if nothing has happened to the run since."""
    told = msgspec.json.decode(view.row.metadata).get(OURS)
    if told is None:
        return None
    saved = msgspec.convert(told, _Saved)
    if not saved.still_stands(view):
        return None
    steps = {key: step.tree() for key, step in view.snapshot().steps.items()}
    return assert_valid_snapshot({**saved.document, "steps": steps})
