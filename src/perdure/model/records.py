"""What the engine and a store exchange: runs, leases, signals, claims, as frozen structs over bytes.

Instants are integer microseconds UTC, payloads are opaque bytes, run ids and keys have been checked (`check_id`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import msgspec

from perdure.model.durations import MAX_INSTANT, MICROSECOND, moment
from perdure.model.journal import Entry
from perdure.model.own_names import awaited_by_user
from perdure.result import WaitingFor

Status: TypeAlias = Literal["pending", "running", "suspended", "completed", "failed", "cancelled", "dead"]
EndStatus: TypeAlias = Literal["completed", "failed", "cancelled", "dead"]
END_STATUSES: Final[tuple[EndStatus, ...]] = get_args(EndStatus)
# A workflow by its name, and one of its versions.
WorkflowVersion: TypeAlias = tuple[str, int]
# A running run that lost this many workers in a row, without recording anything, may be what ends them.
SUSPECT_ATTEMPTS: Final = 2
ENDED: Final[frozenset[str]] = frozenset(END_STATUSES)
UNFINISHED: Final[tuple[Status, ...]] = ("pending", "running", "suspended")
ALL_STATUSES: Final[tuple[Status, ...]] = get_args(Status)
STATUSES: Final[frozenset[str]] = frozenset(ALL_STATUSES)


class Awaited(msgspec.Struct, frozen=True, array_like=True):
    """What a suspended run waits for: a signal by name, or a child's outcome by key."""

    kind: Literal["signal", "child"]
    name: str

    @property
    def by_user(self) -> WaitingFor:
        """The same as a user knows it: under the name that was written, an approval apart from a signal."""
        return awaited_by_user(self.kind, self.name)


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a run's inbox. `seq` counts from 1 in order of arrival.

    `consumed_by` is the token of the lease that consumed the row, for who reads a database. No verb gives such a row, so a store
    need not keep more than that it was consumed.
    """

    seq: int
    name: str
    payload: bytes
    kind: Literal["signal", "child"] = "signal"
    dedupe: str | None = None
    consumed_by: str | None = None

    @property
    def address(self) -> Awaited:
        """What a run must wait for to get this row."""
        return Awaited(self.kind, self.name)


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a run's output stream. `n` counts from 0 in each stream."""

    stream: str
    n: int
    payload: bytes


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is written when a run is created. It is driven in this `version` of its workflow for as long as it exists.

    Only a run that was restored without its input has an empty `input_hash`, and may have version 0: it is not known.
    `generation` counts how often the run has started over. `first_input_hash` and `continued_at` are None until then: they are
    the hash of its first input, and when it last started over. A new run that goes on from a snapshot may have all three.
    """

    id: str
    workflow: str
    version: int = 1
    input: bytes
    input_hash: bytes
    seed: bytes
    definition_hash: str | None = None
    metadata: bytes = b"{}"
    queue: str = "default"
    priority: int = 0
    limit_key: str | None = None
    start_at: int | None = None
    deadline: int | None = None
    parent_id: str | None = None
    parent_key: str | None = None
    generation: int = 0
    first_input_hash: bytes | None = None
    continued_at: int | None = None

    @property
    def original_input_hash(self) -> bytes:
        """The hash of the input with which the run was created: a repeated `create` has it."""
        return self.input_hash if self.first_input_hash is None else self.first_input_hash


class NewInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a run starts over with. The seed is a new one, so that no random number of the run comes twice.

    The deadline is the one in force: what a retry has put off is recorded in the journal, which the run loses.
    """

    input: bytes
    input_hash: bytes
    seed: bytes
    definition_hash: str | None = None
    deadline: int | None = None


class RunRow(NewRun, frozen=True, kw_only=True):
    """A run as the store holds it, without journal and inbox.

    `wake_at` is the instant from which it may be claimed: a pending run's start, a running one's lease end, a suspended
    one's timer. None: only a signal or a cancel can wake it. `waiting_for` is empty unless it is suspended.
    `running_steps` is what the lease holder said of the steps under way with its last renewal; None without a lease.
    `problem` says why its last holder gave it back without driving it on (it does not fit the code, or its attempt failed),
    `problem_at` when that was, and `problem_count` how many holders in a row did so. A new lease keeps them; a suspension, an end
    and a release without a problem clear them.
    `epoch` is 0 until its first lease, which is its start; a run that was reopened or restored has another one and has started.
    `updated_at` changes when the run is created, leased, renewed, released, suspended, finished, reopened or restored, or gets
    the input it was restored without, and at no other time.
    """

    status: Status
    wake_at: int | None
    waiting_for: tuple[Awaited, ...] = ()
    epoch: int = 0
    lease_owner: str | None = None
    lease_until: int | None = None
    running_steps: bytes | None = None
    attempts: int = 0
    problem: str | None = None
    problem_at: int | None = None
    problem_count: int = 0
    held: bool = False
    progress: bytes | None = None
    cancel_requested: bool = False
    outcome: bytes | None = None
    parent_notified: bool = False
    created_at: int
    updated_at: int

    @property
    def ended(self) -> bool:
        """Whether the run has ended, so that nothing can be added to it."""
        return self.status in ENDED

    @property
    def is_suspect(self) -> bool:
        """Whether its last holders were lost rather than gave it back, and it recorded nothing with them."""
        return self.status == "running" and self.attempts >= SUSPECT_ATTEMPTS

    @property
    def has_started(self) -> bool:
        """Whether it was ever leased. If not, its next lease is its start, which the rate of its queue may hold back."""
        return self.epoch != 0

    @property
    def began_at(self) -> int:
        """When the run began with its present input: `ctx.now()` is that instant until the first record is delivered."""
        return self.created_at if self.continued_at is None else self.continued_at

    @property
    def lacks_input(self) -> bool:
        """Whether it was restored without its input; it cannot be driven before a `create` brings that."""
        return not self.input_hash


def deadline_in_force(run: RunRow, journal: Iterable[Entry]) -> int | None:
    """The instant by which the run must have ended, or None. A retry gives it as long again as it had when it was created."""
    if run.deadline is None:
        return None
    reopened_at = max((entry.ended_at for entry in journal if entry.phase == "drop"), default=None)
    if reopened_at is None:
        return run.deadline
    length = run.deadline - run.created_at
    return reopened_at + length if length > 0 else None  # it was too late from the start: another such retry would be too


# The columns of a run without a problem.
NO_PROBLEM: Final[Mapping[str, Any]] = {"problem": None, "problem_at": None, "problem_count": 0}


def columns_after_continue(row: RunRow, new: NewInput, now: int) -> dict[str, Any]:
    """The columns that `continue_as` changes, but those of the lease."""
    return {
        **msgspec.structs.asdict(new),
        "status": "pending",
        "wake_at": now,
        "attempts": 0,
        "generation": row.generation + 1,
        "first_input_hash": row.original_input_hash,
        "continued_at": now,
        "updated_at": now,
        **NO_PROBLEM,
    }


class ListedRun(Protocol):
    """A run, as far as lists filter, sort and show it."""

    @property
    def id(self) -> str: ...
    @property
    def workflow(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def status(self) -> Status: ...
    @property
    def created_at(self) -> int: ...
    @property
    def updated_at(self) -> int: ...
    @property
    def queue(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def waiting_for(self) -> tuple[Awaited, ...]: ...
    @property
    def wake_at(self) -> int | None: ...
    @property
    def attempts(self) -> int: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def metadata(self) -> bytes: ...


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `list`.

    `generation` counts how often the run has started over (`ctx.continue_as`).
    `wake_at` is the instant from which the run may be claimed (of a running one: the end of its lease), None if only a signal or
    a cancel wakes it. `waiting_for` has the signals, approvals and children that a suspended run waits for. `attempts` counts the
    claims since it last recorded something. `problem` says why the run could not be driven on the last time, None if it could;
    `error` is the error of a failed or dead run in one line.
    """

    id: str
    workflow: str
    version: int = 1
    generation: int = 0
    status: Status
    created_at: datetime
    updated_at: datetime
    queue: str = "default"
    priority: int = 0
    waiting_for: tuple[WaitingFor, ...] = ()
    wake_at: datetime | None = None
    attempts: int = 0
    problem: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}

    @classmethod
    def of(cls, run: ListedRun, error: str | None = None) -> RunInfo:
        """The line of this run, with its error in one line. Raises `OverflowError` for an instant that no datetime can have."""
        return cls(
            id=run.id,
            workflow=run.workflow,
            version=run.version,
            generation=run.generation,
            status=run.status,
            created_at=moment(run.created_at),
            updated_at=moment(run.updated_at),
            queue=run.queue,
            priority=run.priority,
            waiting_for=tuple(awaited.by_user for awaited in run.waiting_for),
            wake_at=None if run.wake_at is None else moment(min(max(run.wake_at, 0), MAX_INSTANT)),
            attempts=run.attempts,
            problem=run.problem,
            error=error,
            metadata=load_metadata(run.metadata),
        )


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to drive a run. `epoch` only ever grows, also over delete and create; `token` is random per acquisition.

    A lease is valid as long as the run has this epoch and token, also past `until` if no other worker took over. A new epoch is
    the previous one plus one, or the store's clock if that is higher.
    """

    run_id: str
    epoch: int
    token: str
    until: int

    def __post_init__(self) -> None:
        # The verbs of a driver go by these without checking them again, and a dict is an operator to MongoDB.
        if type(self.run_id) is not str or type(self.token) is not str or type(self.epoch) is not int:
            raise TypeError(f"a lease has a str, an int and a str as run_id, epoch and token, not {self.run_id!r}")


class Pulse(msgspec.Struct, frozen=True, gc=False):
    """What the store tells the lease holder with every write and renewal: the highest inbox seq, and whether to stop."""

    inbox_seq: int
    cancel_requested: bool


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A run that this worker has claimed: the lease, the row, the whole journal by seq, and the inbox rows not yet consumed.

    `inbox_seq` is the highest seq in the inbox, consumed or not. `item_counts` has the length of each stream.
    """

    lease: Lease
    run: RunRow
    journal: list[Entry]
    inbox: list[Signal]
    inbox_seq: int
    item_counts: dict[str, int]


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """What `create` found or made. `claim` is set when the run is new, a `ttl` was given and its queue has no limits."""

    run: RunRow
    is_new: bool
    claim: Claim | None = None


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """The claimed runs, and the earliest instant after now at which more may come due (it may be early, never late).

    A due run that its queue's rate held back counts as one that comes due when the rate lets the next one start.

    `now` is the store's time at the claim: by its clock, or what the caller passed.
    """

    claims: list[Claim]
    next_wake_at: int | None
    now: int


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow to start repeatedly. `spec` is the engine's text for when; the store only compares `next_at`."""

    id: str
    workflow: str
    spec: str
    input: bytes
    next_at: int | None
    metadata: bytes = b"{}"


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the store knows it: `seen_at` is its last sign of life, `info` what it says of itself."""

    id: str
    seen_at: int
    info: bytes


# What the narrowest integer column of all stores holds.
MAX_PRIORITY: Final = 2**31 - 1
MAX_VERSION: Final = 2**31 - 1
# The longest time between two starts of a queue: one a day is the lowest rate.
MAX_INTERVAL: Final = 86_400 * MICROSECOND
MAX_CONCURRENCY: Final = 2**31 - 1
# The highest number of runs or items that a store is asked for at once.
MAX_COUNT: Final = 2**31 - 1
# What a 64-bit column holds, such as that of an item's position.
MAX_POSITION: Final = 2**63 - 1


def check_version(number: Any) -> int:
    """A version of a workflow that every store can hold."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"version must be a whole number, not {number!r}")
    if not 1 <= number <= MAX_VERSION:
        raise ValueError(f"version must be from 1 to {MAX_VERSION}, not {number}")
    return number


def check_priority(number: Any) -> int:
    """A priority that every store can hold."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"priority must be a whole number, not {number!r}")
    if not -MAX_PRIORITY <= number <= MAX_PRIORITY:
        raise ValueError(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {number}")
    return number


def check_positive(number: Any, what: str, most: int = MAX_COUNT) -> int:
    """The number, if it is a whole one of at least 1 and at most `most`; otherwise ValueError."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, not {number!r}")
    if number > most:
        raise ValueError(f"{what} must be at most {most}, not {number}")
    return number


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs of a queue may be leased at once, in all and for each `limit_key`, and how fast they may start.

    `interval` is the least time between two starts in microseconds; a start is the first lease of a run. None: no limit. Raises
    `ValueError` for what is not a whole number of at least 1.
    """

    concurrency: int | None = None
    per_key: int | None = None
    interval: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("concurrency", MAX_CONCURRENCY), ("per_key", MAX_CONCURRENCY), ("interval", MAX_INTERVAL)):
            number = getattr(self, name)
            if number is not None:
                check_positive(number, name, most)

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self.concurrency is not None or self.per_key is not None or self.interval is not None


# The field of a run's metadata, or of a step in a snapshot, that holds what only perdure writes.
OWN_FIELD: Final = "perdure"


def encode_metadata(metadata: Any) -> bytes:
    """Metadata as JSON: a dict that reads back as it is."""
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict of JSON values, not {metadata!r}")
    try:
        encoded = msgspec.json.encode(metadata)
    except (TypeError, ValueError) as reason:
        raise TypeError(f"metadata must be a dict of JSON values: {reason}") from reason
    if msgspec.json.decode(encoded) != metadata:
        raise TypeError(f"metadata must be a dict of JSON values, which {metadata!r} is not")
    return encoded


def encode_users_metadata(metadata: Any) -> bytes:
    """Return the metadata that a user gives a run as JSON. Raises TypeError, and ValueError for a field that is ours."""
    encoded = encode_metadata(metadata)
    if OWN_FIELD in metadata:
        raise ValueError(f"metadata has {OWN_FIELD!r}, which only perdure writes; give it another name")
    return encoded


def load_metadata(stored: bytes) -> dict[str, Any]:
    """The metadata that the user stored with a run; an empty dict for what cannot be read."""
    try:
        metadata = msgspec.json.decode(stored, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    metadata.pop(OWN_FIELD, None)
    return metadata


def is_changed(recorded: str | None, current: str | None) -> bool:
    """Whether two hashes show that the code has changed; hashes of different schemes cannot be compared."""
    if recorded is None or current is None or recorded.partition(":")[0] != current.partition(":")[0]:
        return False
    return recorded != current


_FIRST_MISFIT_PAUSE: Final = 5.0
_FIRST_FAILURE_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 300.0
_LONGEST_PROBLEM: Final = 4000
_CUT: Final = " […] "


def misfit_pause(problem_count: int) -> float:
    """Seconds until a run that met a problem is tried again, if `problem_count` attempts in a row met one before.

    It grows, so that a thousand runs which do not fit the code do not keep the workers busy.
    """
    return _doubled(_FIRST_MISFIT_PAUSE, problem_count)


def failure_pause(attempts: int) -> float:
    """Seconds until a run is tried again whose attempt number `attempts` failed.

    By attempts and not by `problem_count`: a run that records something between two failures starts again with the first pause.
    Up to a quarter is added at random, so that runs which failed together are not tried together.
    """
    pause = _doubled(_FIRST_FAILURE_PAUSE, attempts - 1)
    return pause * random.uniform(1.0, 1.25)  # noqa: S311 - to spread out, not to hide


def _doubled(pause: float, times: int) -> float:
    doublings = min(max(times, 0), 10)  # more would only make a large number that is cut anyway
    return min(pause * (1 << doublings), _LONGEST_PAUSE)


def problem_text(problem: BaseException | str) -> str:
    """The problem as every store can hold it: not empty, not long, without NUL and lone surrogates."""
    text = str(problem) or ("unknown" if isinstance(problem, str) else type(problem).__name__)
    if len(text) > _LONGEST_PROBLEM:
        half = (_LONGEST_PROBLEM - len(_CUT)) // 2
        text = text[:half] + _CUT + text[-half:]
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
