"""A store of your own, as you write it: four methods over anything that keeps a run by its id and knows which are due.

`workflow_adapter` makes a store of it. That one cannot refuse a worker which lost its lease: it is unfenced. So it is for one
process, or with `acquire` and `release` for several whose clocks run at one speed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from perdure.model.durations import moment
from perdure.model.records import RunRow, Status
from perdure.snapshots.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as a `WorkflowStore` keeps it.

    The snapshot is the run; everything else stands there too and is told apart for your columns and indexes. `wake_at` is the
    instant, aware and in UTC, from which the run is due: its start, its timer, when a signal came that it waits for, or while it
    is driven the lease's end. None: it has ended, or waits for a signal alone. `event_name` is the first signal it waits for.

    What `load` gives may have the snapshot as its `to_dict()` or as JSON text. Only `run_id` and `snapshot` of it are used.
    """

    run_id: str
    workflow: str
    snapshot: Snapshot | dict[str, Any] | str | bytes
    status: Status
    wake_at: datetime | None
    event_name: str | None
    updated_at: datetime


class WorkflowStore(Protocol):
    """What keeps whole runs and knows which are due. Methods may be plain or async; a plain one runs on the event loop.

    A run is saved as a whole at every step, and what `save` acknowledged `load` must give. Several processes may share it only
    if it also has `acquire` and `release`.
    """

    def save(self, run: StoredRun, /) -> Awaitable[Any] | Any:
        """Keep the run, in place of what was there under its id."""
        ...

    def load(self, run_id: str, /) -> Awaitable[StoredRun | None] | StoredRun | None:
        """The run that was saved last under this id, or None."""
        ...

    def delete(self, run_id: str, /) -> Awaitable[Any] | Any:
        """Forget the run. One that is not there is no error."""
        ...

    def due(self, now: datetime, limit: int, /) -> Awaitable[Sequence[str | StoredRun]] | Sequence[str | StoredRun]:
        """Ids (or runs) whose `wake_at` is not after `now`, earliest first, at most `limit`.

        One that is not due after all, or not there, is passed over. A store that wakes its runs by itself gives none.
        """
        ...


class LeasingStore(WorkflowStore, Protocol):
    """A `WorkflowStore` that several processes may share."""

    def acquire(self, run_id: str, token: str, ttl: float, /) -> Awaitable[bool] | bool:
        """Whether the run is this token's alone for the next `ttl` seconds, by the store's clock.

        Also asked for a run that was never saved, and again by the token that has it, to prolong that. If this is False then,
        the token is released and asked for once more.
        """
        ...

    def release(self, run_id: str, token: str, /) -> Awaitable[Any] | Any:
        """Give the run up, if this token has it."""
        ...


class SnapshotStore(Protocol):
    """What keeps snapshots by run id, for `wf.run`: the part that is used. Methods may be plain or async."""

    def save(self, id: str, snapshot: Snapshot, /) -> Awaitable[Any] | Any:  # noqa: A002 - the name people know
        """Keep the snapshot, in place of what was there."""
        ...

    def load(self, id: str, /) -> Awaitable[Any] | Any:  # noqa: A002 - as above
        """What was saved last under this id (a snapshot, its dict or its JSON text), or None."""
        ...

    def delete(self, id: str, /) -> Awaitable[Any] | Any:  # noqa: A002 - as above
        """Forget it. One that is not there is no error."""
        ...


def stored_run(row: RunRow, snapshot: Snapshot) -> StoredRun:
    """The run as it is handed to `save`."""
    awaited = [one.name for one in row.waiting_for if one.kind == "signal"]
    return StoredRun(
        run_id=row.id,
        workflow=row.workflow,
        snapshot=snapshot,
        status=row.status,
        wake_at=None if row.wake_at is None else moment(row.wake_at),
        event_name=awaited[0] if awaited else None,
        updated_at=moment(row.updated_at),
    )


# What `store=` of `wf.run` takes beside a store of ours.
# What can be the `store=` of `wf.run` besides a store.
StateKeeper: TypeAlias = SnapshotStore | WorkflowStore
