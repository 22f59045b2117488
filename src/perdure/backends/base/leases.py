"""What every store needs to know of leases and of time: how long a lease is, whether a run is leased or due, what time it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from perdure.backends.base.process_owner import label_of
from perdure.errors import LeaseHeld
from perdure.model.durations import MICROSECOND, microseconds
from perdure.model.ids import random_bytes
from perdure.model.records import Lease, RunRow

_A_YEAR: Final = 366 * 86_400.0


def store_time(now: int | None) -> int:
    """The present instant in microseconds by this process's clock, or the instant that the caller passed."""
    return time.time_ns() // 1000 if now is None else now


def lease_microseconds(ttl: float) -> int:
    """The length of a lease. Raises `ValueError` unless it is finite and above zero."""
    if type(ttl) is float and 0 < ttl < _A_YEAR:
        return round(ttl * MICROSECOND)  # as nearly all are
    length = microseconds(ttl, what="ttl")
    if length <= 0:
        raise ValueError(f"ttl must be above zero, not {ttl!r}")
    return length


def new_token() -> str:
    """A token that cannot be guessed."""
    return random_bytes().hex()


def length_in_microseconds(seconds: float) -> int:
    """The length in whole microseconds."""
    return round(seconds * MICROSECOND)


def steps_by_lease(leases: Sequence[Lease], running_steps: Sequence[bytes | None]) -> dict[Lease, bytes]:
    """What `renew` was passed as the running steps of each lease, but for the leases that have none."""
    if not running_steps:
        return {}
    return {lease: steps for lease, steps in zip(leases, running_steps, strict=True) if steps is not None}


class HasLease(Protocol):
    """The columns that say whether a run is leased or due: of a `RunRow`, or of a summary of one."""

    @property
    def wake_at(self) -> int | None: ...
    @property
    def lease_until(self) -> int | None: ...


class Release(NamedTuple):
    """How a lease is given up: `wake_at` None is at once, `problem` None that there is none."""

    wake_at: int | None = None
    problem: str | None = None
    counts_attempt: bool = False

    def columns(self, row: RunRow, now: int) -> dict[str, Any]:
        """The columns of the leased run that this changes, but for the lease itself."""
        has_problem = self.problem is not None
        return {
            "wake_at": now if self.wake_at is None else self.wake_at,
            "attempts": row.attempts if self.counts_attempt else max(0, row.attempts - 1),
            "problem": self.problem,
            "problem_at": now if has_problem else None,
            "problem_count": row.problem_count + 1 if has_problem else 0,
        }


def is_leased(row: HasLease, now: int) -> bool:
    """Whether the run has a lease that has not expired."""
    return row.lease_until is not None and row.lease_until > now


def is_due(row: HasLease, now: int) -> bool:
    """Whether the instant that the run waits for has come."""
    return row.wake_at is not None and row.wake_at <= now


def refuse_leased(row: RunRow, now: int) -> None:
    """Raise `LeaseHeld` while the run has a lease that has not expired."""
    if is_leased(row, now):
        raise LeaseHeld(row.id, label_of(row.lease_owner))
