"""The store contract: what a database must do so that runs survive.

A store owns atomicity, the engine owns meaning. Each verb is one atomic transition. Every verb that a *driver* calls takes
its `Lease` and is refused with `LeaseLost` when the run's epoch or token is another by now, in the same transaction that
writes, which also keeps `claim` and `acquire` out until it ends: a stale worker can never change a run. `create`, `signal`,
`cancel`, `hold` and `unhold` come from outside, take no lease and touch only the inbox and the request columns. `restore` comes
from outside too and replaces a run as a whole, but only while nobody holds it.

Verbs are coroutines. The four that a driver waits for (`create`, `record`, `suspend`, `finish`) may give any awaitable, so
that a store can answer with a future of its own and save a task.

Instants are integer microseconds UTC by the store's own clock, unless a test passes `now=`; lengths are seconds. Payloads are
opaque bytes. Run ids and keys have been checked (`check_id`) and are compared byte for byte.

`perdure.testing.contract` holds the suite that every store passes, sentence by sentence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from perdure.model.journal import Entry
from perdure.model.records import (
    Awaited,
    Claim,
    Claims,
    Created,
    EndStatus,
    Item,
    Lease,
    NewRun,
    Pulse,
    QueueLimits,
    RunInfo,
    RunRow,
    Schedule,
    Signal,
    Status,
)

if TYPE_CHECKING:
    from perdure.snapshots.resume_state import ResumeState
    from perdure.snapshots.snapshot import Snapshot

Durability: TypeAlias = Literal["process", "disk", "replicated"]
# shared: several processes may use it at once. durable: what was acknowledged is there after reopening.
# transaction: `transaction(lease)` lets a step's own writes commit together with its record.
Capability: TypeAlias = Literal["shared", "durable", "transaction"]


class Transaction(Protocol):
    """A database transaction in which a step's own writes and its record are one."""

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and give its rows."""
        ...

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = ()) -> Pulse:
        """As `Store.record`, committed with everything else in this transaction."""
        ...


class Store(Protocol):
    """A database that holds runs. All verbs may be called from any event loop and from many tasks at once."""

    @property
    def key(self) -> tuple[str, ...]:
        """Which database and namespace this is; equal keys in one process mean the same runs."""
        ...

    @property
    def durability(self) -> Durability:
        """What an acknowledged write survives, read from the settings in force."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this store can do beyond the core; what is not named here is refused with `StoreCapabilityError`.

        Without `transaction` that is `transaction()`; without `shared`, pickling the store. Without `durable`, `durability` is
        `process`.
        """
        ...

    async def setup(self) -> None:
        """Create or upgrade the schema. Safe when many processes do it at once; otherwise done by the first verb."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads once everything submitted was answered; a `watch` under way returns.

        A closed store refuses every verb with `PersistenceError`; closing it again does nothing.
        """
        ...

    def sibling(self) -> Store:
        """A handle on the same runs whose `renew` does not depend on the caller's event loop: for the heartbeat's thread."""
        ...

    def create(
        self,
        run: NewRun,
        *,
        ttl: float | None = None,
        entries: Sequence[Entry] = (),
        inbox: Sequence[Signal] = (),
        created_at: int | None = None,
        now: int | None = None,
    ) -> Awaitable[Created]:
        """Insert the run, pending and due at `start_at` or now; with `ttl` it is running and leased at once.

        That lease counts as the first attempt and is given whatever the queue's limit. A new run begins with exactly `entries` in
        its journal and `inbox` in its inbox, in one transition with its row; `created_at` says when it was begun, if that was
        elsewhere. The same id with the same workflow and input hash gives the run that is there, its journal and inbox included,
        unchanged and unclaimed; with others it raises `RunConflict`.

        A run that was restored without its input gets it from the first `create` with its workflow (any, if its own is ""). It
        takes workflow and input with their hashes, queue, priority, limit key, start and deadline, and a parent if it has none,
        and keeps everything else. Unless it has ended it is due at `start_at` or now, and now if it was cancelled. It is given
        as a run that is there, unclaimed, and from then on another input is a conflict. Raises `ValueError` for an empty input
        hash and for entries and inbox rows that `restore` would refuse; then nothing has changed.
        """
        ...

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of whatever is there under its id, in one transition.

        Row, journal and unconsumed inbox are then exactly these and there are no items, except: nobody has the lease, a running
        run is pending, attempts start from zero, the epoch is a new one, and a run that was there stays on hold or not as it
        was. Due now is a pending run without `wake_at`, a suspended one that has what it waits for in its inbox, and one that was
        cancelled; an ended one is never due. A run that lacks its input is pending and given to nobody until `create` brings
        that. Nobody is told: neither its parent nor whoever held a lease that had expired, whose next write is refused. Raises
        `LeaseHeld` while a live lease holds the run, and `ValueError` for seqs that are not above zero and unique, and for inbox
        rows that are consumed or repeat a dedupe; then nothing has changed.
        """
        ...

    async def save(self, run_id: str, snapshot: Snapshot | ResumeState | dict[str, Any]) -> None:
        """Put the run that this snapshot tells in place of what is there, all or nothing, like `restore`.

        What is not told (its input, how it ended) comes with the first `create`, or when it is driven. Raises
        `SnapshotFormatError`, and `LeaseHeld` while a worker drives the run.
        """
        ...

    async def load(self, run_id: str) -> Snapshot | None:
        """The run as a snapshot, or None: what was saved, word for word, or what has become of it since.

        It can be saved again, here or elsewhere, and passed as `snapshot=` or `resume_state=`.
        """
        ...

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[str],
        queues: Collection[str] | None = None,
        *,
        now: int | None = None,
    ) -> Claims:
        """Lease up to `limit` due runs of these workflows: highest priority first, then longest due, then by id.

        No run is given to two callers. Runs on hold, of other workflows, in other queues or over their queue's limit are
        passed over and hold up nobody; only leases that have not expired count for that limit. Counts an attempt, from one again
        when the journal grew since the last claim.
        """
        ...

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, whatever its queue. None when it has ended, lacks its input or (with `due_only`) is not due.

        Counts an attempt as `claim` does. Raises `RunNotFound`; `LeaseHeld` when a live lease or an operator holds it.
        """
        ...

    async def renew(self, leases: Sequence[Lease], ttl: float, *, now: int | None = None) -> list[Pulse | None]:
        """Prolong each lease by `ttl` from now; None in the place of each that is no longer current."""
        ...

    async def release(self, lease: Lease, *, now: int | None = None) -> None:
        """Give the run back, pending and due at once, without counting the attempt. Raises `LeaseLost`."""
        ...

    def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,
    ) -> Awaitable[Pulse]:
        """Append entries and items and consume inbox rows, all or nothing; the run's row is not touched.

        Sent twice under the same lease it is a lost reply and changes nothing: entries and items that are there already, the
        same, are left alone and only the others added, and a row is consumed once. Another entry or item under a number that is
        taken, also by this very record, and an inbox row that is not there raise `PersistenceError`. Raises `LeaseLost`.
        """
        ...

    def suspend(
        self,
        lease: Lease,
        *,
        wake_at: int | None,
        waiting_for: Collection[Awaited] = (),
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> Awaitable[list[Signal]]:
        """Record, then give up the lease until `wake_at` or an awaited inbox row, if none is there yet.

        Awaited rows that are there and unconsumed are returned, in order; then the lease is kept and the run goes on. When a
        cancel was requested the run is suspended but due at once. Attempts start from zero. Raises `LeaseLost`.
        """
        ...

    def finish(
        self,
        lease: Lease,
        status: EndStatus,
        outcome: bytes,
        *,
        entries: Sequence[Entry] = (),
        consume: Sequence[int] = (),
        now: int | None = None,
    ) -> Awaitable[object]:
        """Record and end the run, and put the outcome into its parent's inbox, all or nothing. Raises `LeaseLost`.

        The parent gets a row of kind `child` named `parent_key` and is woken if it waits for it; one that has ended or is gone
        gets nothing. Then `parent_notified` is true.
        """
        ...

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make a failed, cancelled or dead run pending and due, under a new epoch, without what it recorded for `drop`.

        Appends one drop entry, after the highest seq, and changes no other row; outcome and cancel request are withdrawn,
        attempts start from zero, and its next end is told to its parent again. One that lacks its input is due once it has
        that. Raises `RunNotFound`, `RunFinished` when it completed, `LeaseHeld` when it has not ended.
        """
        ...

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox, wake the run if it waits for it, and give the inbox seq.

        A run that is due already keeps its place in the line. A repeated `dedupe` for the same name gives the first one's seq and
        changes nothing, also when that was consumed or the run has ended since. Raises `RunNotFound`, `RunFinished`.
        """
        ...

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Ask the run to stop and make it due if nobody holds it; one that lacks its input is due at once when it gets that.

        Raises `RunNotFound`, `RunFinished`.
        """
        ...

    async def hold(self, run_id: str) -> None:
        """Keep the run from being claimed or acquired until `unhold`; its present holder goes on. Raises `RunNotFound`."""
        ...

    async def unhold(self, run_id: str) -> None:
        """Undo `hold`. Raises `RunNotFound`."""
        ...

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress. Raises `LeaseLost`."""
        ...

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""
        ...

    async def journal(self, run_id: str, *, after: int = 0) -> list[Entry]:
        """The run's entries with a seq above `after`, by seq."""
        ...

    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        """The unconsumed inbox rows with a seq above `after`, by seq."""
        ...

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> list[Item]:
        """Items of a stream numbered above `after`, in order."""
        ...

    async def list(
        self,
        *,
        prefix: str = "",
        status: Status | None = None,
        workflow: str | None = None,
        before: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> list[RunInfo]:
        """Runs, last changed first, ties by id. `prefix` is literal. `before` is the (updated_at, id) of the last line seen."""
        ...

    async def count(self, *, prefix: str = "", status: Status | None = None, workflow: str | None = None) -> int:
        """How many runs `list` would give without a limit."""
        ...

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now, whatever their queue, longest due first, then by id."""
        ...

    async def delete(self, run_id: str) -> None:
        """Remove the run and everything of it. One that is not there is no error; a holder loses its lease."""
        ...

    async def purge(self, older_than: float, *, limit: int = 1000, now: int | None = None) -> int:
        """Delete up to `limit` ended runs not changed for at least `older_than` seconds, oldest first, and say how many."""
        ...

    async def watch(self, timeout: float) -> None:
        """Return when something may have become due or ended since the call, at the latest after `timeout` seconds."""
        ...

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule with this id."""
        ...

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""
        ...

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule; False when it was not there."""
        ...

    async def fire(self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun, now: int | None = None) -> bool:
        """Move the schedule's `next_at` on and create the run, if it still is `expected_at`; a run that exists is left alone.

        False when somebody else fired it, or it is gone.
        """
        ...

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Set how many runs of a queue may be leased at once."""
        ...

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue."""
        ...

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:
        """A fenced transaction: commits on exit, rolls back on an exception. Raises `LeaseLost`, `StoreCapabilityError`."""
        ...
