"""The protocols of a store of your own: four methods over anything that keeps runs by id and knows which are due.

`perdure.backends.user_defined` makes a `Store` of it, which is unfenced: it cannot refuse the write of a worker that lost its
lease. So it is for one process, or with `acquire` and `release` for several processes whose clocks run at the same speed.
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

    The snapshot is the whole run; the other fields repeat parts of it for your columns and indexes. `wake_at` is the instant,
    aware and in UTC, from which the run is due: its start, its timer, the arrival of a signal it waits for, or the end of its
    lease while it is driven. It is None when the run has ended or waits for a signal only. `event_name` is the first signal that
    the run waits for.

    `load` may return the snapshot as a dict (`to_dict()`) or as JSON text. Only `run_id` and `snapshot` of it are used.
    """

    run_id: str
    workflow: str
    snapshot: Snapshot | dict[str, Any] | str | bytes
    status: Status
    wake_at: datetime | None
    event_name: str | None
    updated_at: datetime


class WorkflowStore(Protocol):
    """Keeps whole runs and knows which are due. Methods may be plain or async; a plain one runs on the event loop.

    A run is saved as a whole at every step, and `load` must return what `save` acknowledged last. Several processes may share the
    store only if it also has `acquire` and `release`.
    """

    def save(self, run: StoredRun, /) -> Awaitable[Any] | Any:
        """Store the run, in place of what was there under its id."""
        ...

    def load(self, run_id: str, /) -> Awaitable[StoredRun | None] | StoredRun | None:
        """The run that was saved last under this id, or None."""
        ...

    def delete(self, run_id: str, /) -> Awaitable[Any] | Any:
        """Delete the run. It is no error when there is none."""
        ...

    def due(self, now: datetime, limit: int, /) -> Awaitable[Sequence[str | StoredRun] | None] | Sequence[str | StoredRun] | None:
        """Ids (or runs) whose `wake_at` is not after `now`, earliest first, at most `limit`.

        A run that turns out not to be due, or not to exist, is passed over. A store that wakes its runs by itself returns
        None, or an empty list.
        """
        ...


class LeasingStore(WorkflowStore, Protocol):
    """A `WorkflowStore` that several processes may share."""

    def acquire(self, run_id: str, token: str, ttl: float, /) -> Awaitable[bool] | bool:
        """Lease the run to this token for the next `ttl` seconds by the store's clock; whether it is leased now.

        Also called for a run that was never saved, and again with the token that has the lease, to prolong it. If that returns
        False, the token is released and `acquire` called once more.
        """
        ...

    def release(self, run_id: str, token: str, /) -> Awaitable[Any] | Any:
        """Give up the lease, if this token has it."""
        ...


class SnapshotStore(Protocol):
    """Keeps snapshots by run id, for `wf.run`: the methods that are used. They may be plain or async."""

    def save(self, id: str, snapshot: Snapshot, /) -> Awaitable[Any] | Any:  # noqa: A002 - the name people know
        """Store the snapshot, in place of what was there."""
        ...

    def load(self, id: str, /) -> Awaitable[Any] | Any:  # noqa: A002 - as above
        """What was saved last under this id: a snapshot, its dict or its JSON text; or None."""
        ...

    def delete(self, id: str, /) -> Awaitable[Any] | Any:  # noqa: A002 - as above
        """Delete it. It is no error when there is none."""
        ...


def stored_run(row: RunRow, snapshot: Snapshot) -> StoredRun:
    """The run as it is passed to `save`."""
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


# What `store=` of `wf.run` takes that is not a `Store`.
StateKeeper: TypeAlias = SnapshotStore | WorkflowStore
