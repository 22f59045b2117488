"""The store contract: what a database must do so that runs survive.

A store owns atomicity, the engine owns meaning. Each verb is one atomic transition. Every verb that a *driver* calls takes
its `Lease` and is refused with `LeaseLost` when the run's epoch or token has changed since. The check is in the same transaction
that writes, and that transaction keeps `claim` and `acquire` out until it ends: a stale worker can never change a run. `create`,
`signal`, `cancel`, `hold` and `unhold` come from outside, take no lease and touch only the inbox and the request columns.
`restore` comes from outside too and replaces a run as a whole, but only while no live lease holds it.

`Store` is what a driver and a `Runtime` call: write that first. The other protocols are optional parts, each announced by a name
in `capabilities`; `require` checks that. The stores of this package are of type `FullStore`: they have the verbs of all parts.

Verbs are coroutines. The four that a driver waits for (`create`, `record`, `suspend`, `finish`) may return any awaitable, so
that a store can answer with a future of its own and save a task.

A value that the database will never take, because it is too long for a column, a row or a packet, is refused by every verb with
`ValueNotStorable`, and nothing has changed. The engine then fails the step, the run or the call that the value belongs to. Any
other failure of the database is a `PersistenceError`, and the same write may succeed later.

Instants are integer microseconds UTC by the store's own clock, unless a test passes `now=`; lengths are seconds. Payloads are
opaque bytes. Ids and names are text (`check_id`), compared byte for byte: a verb raises `TypeError` for anything else, and
`ValueError` for text that is no id. `model.id_checks` does that for all stores. What a driver writes was checked by the engine.

`perdure.testing.contract` holds the suite that every store passes, sentence by sentence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar, overload

from perdure.errors import StoreCapabilityError
from perdure.model.journal import Entry
from perdure.model.records import (
    END_STATUSES,
    Awaited,
    Claim,
    Claims,
    Created,
    EndStatus,
    Item,
    Lease,
    NewInput,
    NewRun,
    Pulse,
    QueueLimits,
    RunInfo,
    RunRow,
    Schedule,
    Signal,
    WorkerRow,
    WorkflowVersion,
)
from perdure.model.run_filter import EVERY_RUN, RunFilter

if TYPE_CHECKING:
    from perdure.snapshots.resume_state import ResumeState
    from perdure.snapshots.snapshot import Snapshot

T = TypeVar("T")

Durability: TypeAlias = Literal["process", "disk", "replicated"]
# shared: several processes may use it at once. durable: what was acknowledged is there after reopening.
# The others are the parts below: `OperatorStore`, `ScheduleStore`, `StreamStore`, `TransactionStore` and `OutboxStore`.
Capability: TypeAlias = Literal["shared", "durable", "operators", "schedules", "streams", "transaction", "outbox"]

# The parts that every store of this package has.
STANDARD_PARTS: Final[frozenset[Capability]] = frozenset({"operators", "schedules", "streams"})


class Store(Protocol):
    """A database that holds runs: the core. All verbs may be called from any event loop and from many tasks at once."""

    @property
    def key(self) -> tuple[str, ...]:
        """Which database and namespace this is; equal keys in one process mean the same runs."""

    @property
    def durability(self) -> Durability:
        """What an acknowledged write survives, read from the settings in force; `process` unless the store is `durable`."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this store can do beyond the core.

        Verbs of a part that is not named here are missing, or raise `StoreCapabilityError`. So does pickling the store without
        `shared`.
        """

    async def setup(self) -> None:
        """Create or upgrade the schema. Safe when many processes do it at once. The first verb does it if no one called it."""

    async def close(self) -> None:
        """Close connections and threads once everything submitted was answered; a `watch` in progress returns.

        A closed store refuses every verb with `PersistenceError`, best with `StoreClosed`, after which a wait does not try again;
        closing it again does nothing.
        """

    def sibling(self) -> Store:
        """A handle on the same runs whose `renew` does not depend on the caller's event loop: for the heartbeat's thread."""

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
        """Insert the run, pending and due at `start_at` or now; with `ttl` it is running and leased at once, as attempt one.

        In a queue that has a limit (`limit_queue`) there is no lease: the run is pending, `ttl` or not, and waits for its turn.
        A new run starts with exactly `entries` in its journal and `inbox` in its inbox, in one transition with its row;
        `created_at` is for a run that was first created elsewhere. For an id that exists, the same workflow and input hash return
        that run unchanged and unclaimed, whatever its version; others raise `RunConflict`. Raises `ValueError`, and changes
        nothing, for an empty input hash, for seqs that are not above zero and unique, and for inbox rows that are consumed or
        repeat a dedupe.
        """

    async def claim(
        self,
        limit: int,
        ttl: float,
        workflows: Collection[WorkflowVersion],
        queues: Collection[str] | None = None,
        *,
        suspects: int | None = None,
        now: int | None = None,
    ) -> Claims:
        """Lease up to `limit` due runs of these workflows and versions: highest priority first, then longest due, then by id.

        No run goes to two callers. At most `suspects` of them (None: any number) are running runs with two or more attempts:
        their holders were lost, and one of them may be what ends its workers. The other suspects, and runs of other workflows,
        versions or queues, are passed over and delay no other run. Counts an attempt; the count restarts at one when the journal
        grew since the last claim. A run whose data cannot be read is set aside with its problem, as `release` does it, and the
        others are given.
        """

    async def acquire(self, run_id: str, ttl: float, *, due_only: bool = True, now: int | None = None) -> Claim | None:
        """Lease this run, whatever its queue. None when it has ended, (with `due_only`) is not due, or its queue has no room.

        Counts an attempt, and keeps to the limits of the queue, as `claim` does. Raises `RunNotFound`; `LeaseHeld` while a live
        lease holds the run.
        """

    async def renew(
        self, leases: Sequence[Lease], ttl: float, *, running_steps: Sequence[bytes | None] = (), now: int | None = None
    ) -> list[Pulse | None]:
        """Prolong each lease by `ttl` from now; None in the place of each that is no longer current.

        `running_steps` has for each lease what its holder says of the steps under way, in a few kilobytes; it is kept in the
        run's row, in place of what was said before, until the lease is given up or another one is granted. Without it, or with
        None, nothing is known of them.
        """

    async def release(
        self,
        lease: Lease,
        *,
        wake_at: int | None = None,
        problem: str | None = None,
        counts_attempt: bool = False,
        now: int | None = None,
    ) -> None:
        """Give up the lease: the run is pending, and due at `wake_at` or at once. Raises `LeaseLost`.

        Its attempt counts only with `counts_attempt`. `problem`, which is not empty, says why this worker could not drive the run
        on: it is kept with the store's time, and `problem_count` grows by one. Without it both are cleared. A cancel request or a
        signal that came before does not make the run due earlier: a run that does not fit would be tried again without a pause.
        """

    def record(
        self, lease: Lease, entries: Sequence[Entry] = (), *, consume: Sequence[int] = (), now: int | None = None
    ) -> Awaitable[Pulse]:
        """Append entries and consume inbox rows, all or nothing; the run's row is not touched. Raises `LeaseLost`.

        Idempotent under one lease, because a reply may get lost: an entry that is there already, the same, is left alone, and a
        row is consumed once. Another entry under a seq that is taken, also by this very record, and an inbox row that does not
        exist raise `PersistenceError`.
        """

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
        """Record, then give up the lease until `wake_at` or an awaited inbox row. Raises `LeaseLost`.

        When awaited rows are there and unconsumed, they are returned in order, the lease is kept and the run goes on. After a
        cancel request the run is suspended but due at once. Attempts start from zero, and a problem is cleared.
        """

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
        """Record, end the run, and put the outcome into its parent's inbox, all or nothing. Raises `LeaseLost`.

        The parent gets a row of kind `child` named `parent_key` and is woken if it waits for it; a parent that has ended or does
        not exist gets nothing. Then `parent_notified` is true. A problem is cleared.
        """

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        """Let the run start over with this input: pending and due at once, its lease given up, its journal empty. `LeaseLost`.

        Its generation is one more, `continued_at` is now, and `first_input_hash`, if it was None, the hash of the input before.
        Attempts start from zero and a problem is cleared. All else stays: unconsumed inbox rows, streams, progress, parent, a
        cancel request, a hold. Consumed rows are needed no more, but a repeated dedupe is recognised as before, and no inbox seq
        is given twice. Repeated after a lost reply, with the same seed, it changes nothing.
        """

    async def reopen(self, run_id: str, drop: Collection[str], *, now: int | None = None) -> None:
        """Make a failed, cancelled or dead run pending and due, under a new epoch, without what it recorded for `drop`.

        Appends one drop entry, after the highest seq, and changes no other entry; outcome and cancel request are withdrawn,
        attempts start from zero, and its next end is put into its parent's inbox again. Its generation stays. Raises
        `RunNotFound`, `RunFinished` when it completed, `LeaseHeld` when it has not ended.
        """

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """Put a signal into the run's inbox, wake the run if it waits for it, and return the inbox seq.

        A pending run with a problem is due at once, whatever the signal.
        A run that is due already keeps its place in the order. A repeated `dedupe` for the same name returns the first one's seq
        and changes nothing, also when that was consumed or the run has ended since. Raises `RunNotFound`, `RunFinished`.
        """

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        """Request that the run stops, and make it due unless it is leased. Raises `RunNotFound`, `RunFinished`."""

    async def get(self, run_id: str) -> RunRow | None:
        """The run's row, or None."""

    async def journal(self, run_id: str, *, after: int = 0) -> list[Entry]:
        """The run's entries with a seq above `after`, by seq."""

    async def inbox(self, run_id: str, *, after: int = 0) -> list[Signal]:
        """The unconsumed inbox rows with a seq above `after`, by seq."""

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> list[RunInfo]:
        """The runs that are asked for, last changed first, ties by id. `before` is the (updated_at, id) of the last line seen.

        `prefix` is short for a filter that has only a prefix: a program that knows stores of snapshots lists them by it.

        Raises `ValueError` for a `limit` that is not a whole number of at least 1.
        """

    async def watch(self, timeout: float) -> None:
        """Return when a run may have become due or ended since the call, at the latest after `timeout` seconds.

        So it does when the limits of a queue were changed, and when a run of a limited queue gave up its lease.
        """


class OperatorStore(Store, Protocol):
    """Capability `operators`: what an operator or a migration does to runs, and which workers there are."""

    async def hold(self, run_id: str) -> None:
        """Keep the run from being claimed or acquired (`LeaseHeld`) until `unhold`; its present holder goes on.

        Raises `RunNotFound`.
        """

    async def unhold(self, run_id: str, *, now: int | None = None) -> None:
        """Undo `hold`, and make a pending run with a problem due at once. Raises `RunNotFound`."""

    async def delete(self, run_id: str) -> None:
        """Remove the run with everything of it; its holder loses the lease. A run that does not exist is no error."""

    async def purge(
        self,
        older_than: float,
        *,
        status: Collection[EndStatus] = END_STATUSES,
        workflow: str | None = None,
        limit: int = 1000,
        now: int | None = None,
    ) -> int:
        """Delete up to `limit` ended runs not changed for at least `older_than` seconds, oldest first, and return how many.

        Only runs with one of these statuses, and of this workflow (None: of any). That a run has ended and has not changed since
        is checked in the transition that deletes it: one that was reopened meanwhile stays. So does a run whose parent has not
        ended: the parent may still ask for it. Raises `ValueError` for a status that is no end.
        """

    async def count(self, wanted: RunFilter = EVERY_RUN) -> int:
        """How many runs `list` would return without a limit."""

    async def due(self, *, now: int | None = None, limit: int = 100) -> Sequence[str]:
        """Ids of the runs that may be claimed now, whatever their queue, longest due first, then by id."""

    async def restore(
        self, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal] = (), *, now: int | None = None
    ) -> None:
        """Put this whole run in place of what is there under its id, in one transition.

        Row, journal and unconsumed inbox are then exactly these and there are no items, except: there is no lease, a running run
        is pending, attempts start from zero, the epoch is a new one, only a pending run with its input has a problem, and a run
        that was there stays on hold or not as it was. Due now are a pending run without `wake_at`, a suspended one that has what
        it waits for in its inbox, and one that was cancelled; an ended one is never due. The parent is not notified. The holder
        of an expired lease is not notified either: its next write is refused. Raises `LeaseHeld` while a live lease holds the
        run, and `ValueError` as `create` does; then nothing has changed.

        A run restored without its input (an empty hash) stays pending and is given to no worker until the first `create` with its
        workflow (with any, if its own is ""). From that `create` it takes workflow and input with their hashes, queue, priority,
        limit key, start and deadline, a version if its own is 0, and a parent if it has none; it keeps everything else. Unless it
        has ended it is then due at `start_at` or now, and now if it was cancelled or reopened. `create` returns it as an existing
        run, unclaimed.
        """

    async def put_worker(self, worker_id: str, info: bytes, *, now: int | None = None) -> None:
        """Insert or replace the worker with this id, seen now. It wakes no watcher."""

    async def workers(self) -> Sequence[WorkerRow]:
        """All workers that were put and not dropped, by id."""

    async def drop_worker(self, worker_id: str) -> None:
        """Remove the worker. One that does not exist is no error."""

    async def save(self, run_id: str, snapshot: Snapshot | ResumeState | dict[str, Any]) -> None:
        """Put the run that this snapshot describes in place of what is there, all or nothing, like `restore`.

        What the snapshot lacks (the input, the outcome) comes with the first `create`, or when the run is driven. Raises
        `SnapshotFormatError`, and `LeaseHeld` while a worker drives the run.
        """

    async def load(self, run_id: str) -> Snapshot | None:
        """The run as a snapshot, or None: exactly what was saved, until the run changes; then as it is now.

        It can be saved again, here or elsewhere, and passed as `snapshot=` or `resume_state=`.
        """


class ScheduleStore(Store, Protocol):
    """Capability `schedules`: runs that start by the clock, how many of a queue are leased at once, and how fast they start."""

    async def put_schedule(self, schedule: Schedule) -> None:
        """Insert or replace the schedule with this id."""

    async def schedules(self) -> Sequence[Schedule]:
        """All schedules, by id."""

    async def drop_schedule(self, schedule_id: str) -> bool:
        """Remove the schedule; False when it did not exist."""

    async def fire(
        self, schedule_id: str, *, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None = None
    ) -> bool:
        """Move the schedule from `expected_at` to `next_at` and create the run, in one transition; an existing run is left alone.

        Without a run (None) the instant is passed over. False, and nothing changes, when the schedule is not at `expected_at` any
        more or does not exist.
        """

    async def limit_queue(self, queue: str, limits: QueueLimits) -> None:
        """Replace the limits of a queue: how many runs `claim` and `acquire` lease at once, and how fast runs start.

        Runs beyond a limit are passed over and delay no other run. Leases count until they expire. A start is the first lease of
        a run, one whose `epoch` is 0. With an `interval` a start is given only when the store's time is at least the queue's last
        start plus the interval, and that time is then its last start, in the same transition: so a claim gives at most one.
        What has started before (resumed, released, taken over, reopened, restored) is not held back by an interval. The last
        start is kept when limits are replaced: workers that set them again when they start do not make the queue faster.
        """

    async def queue_limits(self) -> dict[str, QueueLimits]:
        """The limits that were set, by queue; a queue without a limit is not there."""


class StreamStore(Store, Protocol):
    """Capability `streams`: what a run shows while it goes on. A claim's `item_counts` has the length of each stream."""

    def record(
        self,
        lease: Lease,
        entries: Sequence[Entry] = (),
        *,
        consume: Sequence[int] = (),
        items: Sequence[Item] = (),
        now: int | None = None,
    ) -> Awaitable[Pulse]:
        """As `Store.record`, and append items under the same rules: idempotent, and never another one under a number taken."""

    async def items(self, run_id: str, stream: str, *, after: int = -1, limit: int = 100) -> list[Item]:
        """Items of a stream numbered above `after`, in order."""

    async def watch(self, timeout: float, *, items: bool = False) -> None:
        """As `Store.watch`, and with `items` also when a run may have new items since the call.

        Without it new items need not wake anything: workers would claim in vain many times a second.
        """

    async def report(self, lease: Lease, progress: bytes) -> None:
        """Replace the run's progress. Raises `LeaseLost`."""


class Transaction(Protocol):
    """A database transaction in which a step's own writes and its record are one."""

    @property
    def connection(self) -> Any:
        """The driver's own connection, in this transaction. It must not commit, roll back or be closed.

        For an asynchronous driver it belongs to the caller's event loop; a synchronous one gives it only inside `call_plain`.
        Raises `StoreCapabilityError` where the store has no driver with connections, and `RuntimeError` in the wrong place.
        """

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""

    async def call_plain(self, fn: Callable[[], T]) -> T:
        """What the plain function gives, called where `connection` can be used: a synchronous driver has a thread for it.

        When the caller is cancelled meanwhile, the transaction is rolled back at once; the function may go on and writes nothing.
        With an asynchronous driver it is called here, and must return an awaitable; otherwise this raises `TypeError`.
        """

    def is_transient(self, error: BaseException) -> bool:
        """Whether the same work may succeed now: the database undid this transaction for the sake of another, or is restarted."""

    async def record(self, entries: Sequence[Entry], consume: Sequence[int] = (), items: Sequence[Item] = ()) -> Pulse:
        """As `StreamStore.record`, committed with everything else in this transaction.

        Raises `TransactionFailed` when it cannot be committed any more: a statement failed, or has ended it.
        """


class Outbox(Protocol):
    """Verbs inside a transaction of the caller: what they write is there if and when the caller commits. They take no lease."""

    async def create(self, run: NewRun, *, now: int | None = None) -> Created:
        """As `Store.create` without `ttl`. A run with this id that another transaction is creating is waited for."""

    async def signal(self, run_id: str, name: str, payload: bytes, *, dedupe: str | None = None, now: int | None = None) -> int:
        """As `Store.signal`. The run's row is locked until the caller commits or rolls back."""


class TransactionStore(Store, Protocol):
    """Capability `transaction`: a step's own writes commit together with its record."""

    def transaction(self, lease: Lease) -> AbstractAsyncContextManager[Transaction]:
        """A fenced transaction: commits on exit, rolls back on an exception. Raises `LeaseLost`.

        When the database refuses to commit, nothing was written, and leaving it raises `TransactionFailed`. Any other
        `PersistenceError` at that point means that it was written, or not.
        """


class OutboxStore(TransactionStore, Protocol):
    """Capability `outbox`: runs and signals that exist if and when a transaction of the caller's own commits."""

    async def outbox(self, connection: Any) -> Outbox:
        """The verbs for the transaction that is open on this connection of the database's driver.

        Raises `TypeError` for what is no such connection, and `ValueError` when no transaction is open on it, or it leads to
        another database.
        """


class FullStore(OperatorStore, ScheduleStore, StreamStore, TransactionStore, Protocol):
    """The core and every part. A store may have all verbs and still refuse some: `capabilities` says which parts work."""


@overload
def require(store: Store, capability: Literal["operators"]) -> OperatorStore: ...
@overload
def require(store: Store, capability: Literal["schedules"]) -> ScheduleStore: ...
@overload
def require(store: Store, capability: Literal["streams"]) -> StreamStore: ...
@overload
def require(store: Store, capability: Literal["transaction"]) -> TransactionStore: ...
@overload
def require(store: Store, capability: Literal["outbox"]) -> OutboxStore: ...
def require(store: Any, capability: Literal["operators", "schedules", "streams", "transaction", "outbox"]) -> Any:
    """The store, as one that has this part. Raises `StoreCapabilityError` when `capabilities` does not name it."""
    if capability not in store.capabilities:
        raise StoreCapabilityError(type(store).__name__, MISSING_PART[capability])
    return store


# What a `StoreCapabilityError` says a store has not, by the part that it does not announce.
MISSING_PART: Final = {
    "operators": "verbs for operators (hold, unhold, delete, purge, count, due, restore, save, load, workers)",
    "schedules": "schedules and queue limits",
    "streams": "streams of items and progress reports",
    "transaction": "transactions (SQLite, PostgreSQL, MySQL, libSQL and sql_client have them)",
    "outbox": "way to write inside a transaction of yours (SQLite, PostgreSQL, MySQL and sql_client have one)",
}
