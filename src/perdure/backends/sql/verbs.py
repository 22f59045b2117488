"""The verbs of the contract that are the same on every SQL database: each binds a verb of this package to its arguments.

A store says how such a verb is run: `_read`, `_write` and `_change`. It has the other verbs itself: those of leases, which depend
on who may hold one, and those that every step needs (create, record, suspend, finish), for which it has a faster way.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from perdure.backends.base.new_runs import check_start
from perdure.backends.sql import closing, inbox, listing, reading, recording, runs, schedules
from perdure.backends.sql.schema import VERSION
from perdure.backends.sql.session import Session
from perdure.model.durations import microseconds
from perdure.model.id_checks import ChecksIds
from perdure.model.journal import Entry
from perdure.model.records import (
    END_STATUSES,
    EndStatus,
    Item,
    Lease,
    NewInput,
    NewRun,
    QueueLimits,
    RunInfo,
    RunRow,
    Schedule,
    Signal,
    WorkerRow,
    check_positive,
)
from perdure.model.run_filter import EVERY_RUN, RunFilter
from perdure.store import STANDARD_PARTS, Capability

T = TypeVar("T")
Verb: TypeAlias = Callable[[Session], Coroutine[Any, Any, T]]


class SqlVerbs(ChecksIds, ABC):
    """The base of every store on an SQL database."""

    # Of the tables: a store refuses those of another version when it opens them.
    schema_version: ClassVar[int] = VERSION

    @abstractmethod
    async def _read(self, verb: Verb[T]) -> T:
        """The result of a verb that only reads, with one statement."""

    async def _read_at_one_moment(self, verb: Verb[T]) -> T:
        """As `_read`, for a verb of several statements that depend on each other where the dialect `has_few_indexes`."""
        return await self._read(verb)

    @abstractmethod
    async def _write(self, verb: Verb[T]) -> T:
        """The result of a verb, in one transaction."""

    @abstractmethod
    async def _change(self, verb: Verb[T]) -> T:
        """As `_write`, for a verb that may make a run due or end it: it wakes the watchers."""

    def _time(self, now: int | None) -> int | None:
        """The instant that a verb gets: `now`, or None for the clock of the database."""
        return now

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All there are."""
        return STANDARD_PARTS | {"shared", "durable", "transaction", "outbox"}

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        """Let the run start over with another input."""
        await self._change(lambda db: closing.continue_as(db, lease, new, self._time(now)))

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make an ended run pending again."""
        dropped = tuple(drop)
        await self._change(lambda db: runs.reopen(db, run_id, dropped, self._time(now)))

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop."""
        await self._change(lambda db: runs.cancel(db, run_id, self._time(now)))

    async def hold(self, run_id: str) -> None:
        """Keep the run from being driven."""
        await self._write(lambda db: runs.hold(db, run_id))

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        """Undo `hold`."""
        await self._change(lambda db: runs.unhold(db, run_id, self._time(now)))

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress."""
        await self._write(lambda db: recording.report(db, lease, progress))

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        return await self._read(lambda db: runs.get(db, run_id))

    async def journal(self, run_id: str, *, after: int = 0) -> builtins.list[Entry]:
        """The run's entries, by seq."""
        return await self._read(lambda db: reading.journal(db, run_id, after))

    async def inbox(self, run_id: str, *, after: int = 0) -> builtins.list[Signal]:
        """The unconsumed inbox rows, by seq."""
        return await self._read(lambda db: inbox.read(db, run_id, after))

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> builtins.list[Item]:
        """Items of a stream, in order."""
        return await self._read(lambda db: reading.items(db, run_id, stream, after, limit))

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> builtins.list[RunInfo]:
        """Runs, last changed first."""
        wanted = wanted.within(prefix)
        check_positive(limit, "limit")
        return await self._read_at_one_moment(lambda db: listing.list_runs(db, wanted, before, limit))

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        """How many runs there are."""
        return await self._read_at_one_moment(lambda db: listing.count(db, wanted))

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it."""
        await self._change(lambda db: runs.delete(db, run_id))

    async def purge(
        self,
        older_than: float,
        *,
        status: Collection[EndStatus] = END_STATUSES,
        workflow: str | None = None,
        limit: int = 1000,
        now: int | None = None,
    ) -> int:
        """Delete ended runs, oldest first."""
        age = microseconds(older_than, what="older_than")
        return await self._write(lambda db: runs.purge(db, age, status, workflow, limit, self._time(now)))

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        """Insert or replace the worker, seen now."""
        await self._write(lambda db: schedules.put_worker(db, worker_id, info, self._time(now)))

    async def workers(self) -> Sequence[WorkerRow]:
        """All workers, by id."""
        return await self._read(schedules.workers)

    async def drop_worker(self, worker_id: str) -> None:
        """Remove the worker."""
        await self._write(lambda db: schedules.drop_worker(db, worker_id))

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule."""
        await self._change(lambda db: schedules.put_schedule(db, schedule))

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        return await self._read(schedules.schedules)

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule."""
        return await self._write(lambda db: schedules.drop_schedule(db, schedule_id))

    async def fire(
        self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None = None
    ) -> bool:
        """Move the schedule on and create its run, once."""
        start = None if run is None else check_start(run)
        return await self._change(lambda db: schedules.fire(db, schedule_id, expected_at, next_at, start, self._time(now)))

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set the limits of a queue."""
        await self._change(lambda db: schedules.limit_queue(db, queue, limits))

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        return await self._read(schedules.queue_limits)
