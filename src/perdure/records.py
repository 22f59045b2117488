"""What the engine and a store hand each other: runs, leases, signals, claims, as frozen structs over bytes.

Instants are integer microseconds UTC, payloads are opaque bytes, run ids and keys have been checked (`check_id`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal, TypeAlias

import msgspec

from perdure.duration import moment
from perdure.journal import Entry

Status: TypeAlias = Literal["pending", "running", "suspended", "completed", "failed", "cancelled", "dead"]
EndStatus: TypeAlias = Literal["completed", "failed", "cancelled", "dead"]
ENDED: Final[frozenset[str]] = frozenset({"completed", "failed", "cancelled", "dead"})
STATUSES: Final[frozenset[str]] = ENDED | {"pending", "running", "suspended"}


MAX_ID_BYTES: Final = 1024


def check_id(text: object, what: str) -> str:
    """`text` as a run id or key: a non-empty str of at most 1,024 UTF-8 bytes without NUL or lone surrogates."""
    if type(text) is str and text.isascii() and 0 < len(text) <= MAX_ID_BYTES and "\0" not in text:
        return text  # as nearly all are
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what} {text!r} contains a lone surrogate, which not every store can hold") from None
    if not text or size > MAX_ID_BYTES or "\0" in text:
        shown = text if len(text) < 80 else text[:77] + "..."
        raise ValueError(f"{what} {shown!r} must have 1 to {MAX_ID_BYTES} UTF-8 bytes and no NUL (it has {size} bytes)")
    return text


class Awaited(msgspec.Struct, frozen=True, array_like=True):
    """What a suspended run waits for: a signal by name, or a child's outcome by key."""

    kind: Literal["signal", "child"]
    name: str


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a run's inbox. `seq` counts from 1 in order of arrival."""

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
    """What is written when a run is created. Only a run that was restored without its input has an empty `input_hash`."""

    id: str
    workflow: str
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


class RunRow(NewRun, frozen=True, kw_only=True):
    """A run as the store holds it, without journal and inbox.

    `wake_at` is the instant from which it may be claimed: a pending run's start, a running one's lease end, a suspended
    one's timer. None: only a signal, a cancel or nothing at all moves it. `waiting_for` is empty unless it is suspended.
    `updated_at` changes when the run is created, leased, renewed, released, suspended, finished, reopened or restored, or gets
    the input it was restored without, and at nothing else.
    """

    status: Status
    wake_at: int | None
    waiting_for: tuple[Awaited, ...] = ()
    epoch: int = 0
    lease_owner: str | None = None
    lease_until: int | None = None
    attempts: int = 0
    held: bool = False
    progress: bytes | None = None
    cancel_requested: bool = False
    outcome: bytes | None = None
    parent_notified: bool = False
    created_at: int
    updated_at: int

    @property
    def ended(self) -> bool:
        """Whether the run takes nothing more."""
        return self.status in ENDED

    @property
    def lacks_input(self) -> bool:
        """Whether it was restored without its input, so that nobody can drive it before a `create` brings that."""
        return not self.input_hash


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `list`."""

    id: str
    workflow: str
    status: Status
    updated_at: datetime

    @classmethod
    def of(cls, run_id: str, workflow: str, status: Status, updated_at: int) -> RunInfo:
        """The line for a run whose row was last changed at the instant `updated_at`."""
        return cls(id=run_id, workflow=workflow, status=status, updated_at=moment(updated_at))


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to drive a run. `epoch` only ever grows, also over delete and create; `token` is random per acquisition.

    A lease is good as long as the run has this epoch and token, also past `until` if nobody took over. An epoch is the one before
    plus one, or the store's clock if that is higher.
    """

    run_id: str
    epoch: int
    token: str
    until: int


class Pulse(msgspec.Struct, frozen=True, gc=False):
    """What the holder learns with every write and renewal: the highest inbox seq, and whether to stop."""

    inbox_seq: int
    cancel_requested: bool


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A run given to this worker: the lease, the row, the whole journal by seq, and the inbox rows not yet consumed.

    `inbox_seq` is the highest seq in the inbox, consumed or not. `item_counts` has the length of each stream.
    """

    lease: Lease
    run: RunRow
    journal: list[Entry]
    inbox: list[Signal]
    inbox_seq: int
    item_counts: dict[str, int]


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """What `create` found or made. `claim` is set when the run is new and a `ttl` was given."""

    run: RunRow
    is_new: bool
    claim: Claim | None = None


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What `claim` gave, and the earliest instant after now at which more may come due (it may be early, never late)."""

    claims: list[Claim]
    next_wake_at: int | None


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow to start again and again. `spec` is the engine's text for when; the store only compares `next_at`."""

    id: str
    workflow: str
    spec: str
    input: bytes
    next_at: int | None
    metadata: bytes = b"{}"


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs of a queue may be leased at once: in all, and for each `limit_key`. None: no limit."""

    concurrency: int | None = None
    key_concurrency: int | None = None
