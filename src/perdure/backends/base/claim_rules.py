"""Which runs a claim may take: those that the worker asks for, as far as the limits of their queues let them in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from perdure.model.ids import check_text
from perdure.model.records import QueueLimits, WorkflowVersion

_UNLIMITED = QueueLimits()


class ClaimableRun(Protocol):
    """The columns that a filter looks at: of a `RunRow`, or of a summary of one."""

    @property
    def workflow(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def queue(self) -> str: ...


class ClaimFilter(NamedTuple):
    """The workflows, each in one version, and queues that a worker serves, sorted so that statements made of them are alike.

    `queues` is None for all queues. An empty collection of workflows or queues matches no run.
    """

    workflows: tuple[WorkflowVersion, ...]
    queues: tuple[str, ...] | None

    @classmethod
    def of(cls, workflows: Collection[WorkflowVersion], queues: Collection[str] | None) -> ClaimFilter:
        """The filter for these workflows in these queues, or in all. Raises `TypeError` for names that are no text."""
        if isinstance(queues, str):
            raise TypeError(f"queues must be a collection of names, not the text {queues!r}")
        wanted = {(check_text(name, "a workflow's name"), _check_number(version)) for name, version in workflows}
        named = None if queues is None else {check_text(queue, "a queue's name") for queue in queues}
        return cls(tuple(sorted(wanted)), None if named is None else tuple(sorted(named)))

    @property
    def is_empty(self) -> bool:
        """Whether no run can match."""
        return not self.workflows or self.queues == ()

    def matches(self, run: ClaimableRun) -> bool:
        """Whether a worker with this filter takes this run."""
        return (run.workflow, run.version) in self.workflows and (self.queues is None or run.queue in self.queues)


def _check_number(version: object) -> int:
    if not isinstance(version, int):
        raise TypeError(f"a version must be a whole number, not {version!r}")
    return version


class ClaimRequest(NamedTuple):
    """One call of `claim`: which runs, how many, and the lease they get. `length` is in microseconds."""

    filter: ClaimFilter
    limit: int
    length: int
    owner: str
    now: int | None
    suspects: int | None = None


class SuspectCounter:
    """How many more suspects (`RunRow.is_suspect`) one claim may take. None is any number."""

    def __init__(self, most: int | None) -> None:
        self._left = most

    @property
    def has_room(self) -> bool:
        """Whether one more suspect may be taken."""
        return self._left is None or self._left > 0

    def take(self, *, is_suspect: bool) -> bool:
        """Count a run that is about to be taken; False for a suspect that must be passed over."""
        if is_suspect and not self.has_room:
            return False
        if is_suspect and self._left is not None:
            self._left -= 1
        return True

    def give_back(self, *, is_suspect: bool) -> None:
        """Undo one `take`: another worker got the run, or a limit keeps it back."""
        if is_suspect and self._left is not None:
            self._left += 1


class QueueCounter:
    """What the limits of queues let in, for one `claim` or `acquire`.

    Leased runs are counted by queue and limit key; an expired lease does not count. `last_starts` has the instant of the last
    start of each queue that had one; a queue with an interval lets no more than one run start at one instant.
    """

    def __init__(
        self,
        limits: Mapping[str, QueueLimits],
        leased: Iterable[tuple[str, str | None, int]] = (),
        *,
        last_starts: Mapping[str, int] | None = None,
        now: int = 0,
    ) -> None:
        """`leased` says how many runs of a queue and limit key are leased now."""
        self._limits = limits
        self._last_starts = last_starts or {}
        self._now = now
        self._in_queue: Counter[str] = Counter()
        self._under_key: Counter[tuple[str, str]] = Counter()
        # The queues with an interval in which a run has started here: the store writes `now` as their last start.
        self.started: set[str] = set()
        self._held_back: set[str] = set()
        for queue, limit_key, number in leased:
            self.add(queue, limit_key, number)

    def add(self, queue: str, limit_key: str | None, number: int = 1) -> None:
        """Count runs that are leased."""
        self._in_queue[queue] += number
        if limit_key is not None:
            self._under_key[queue, limit_key] += number

    def has_room(self, queue: str, limit_key: str | None = None) -> bool:
        """Whether one more run may be leased, if the rate lets it start."""
        limits = self._limits.get(queue, _UNLIMITED)
        fits_queue = limits.concurrency is None or self._in_queue[queue] < limits.concurrency
        if limit_key is None or limits.per_key is None:
            return fits_queue
        return fits_queue and self._under_key[queue, limit_key] < limits.per_key

    def may_start(self, queue: str) -> bool:
        """Whether the rate of the queue lets one more run start now."""
        next_start = self._next_start(queue)
        return next_start is None or next_start <= self._now

    def take(self, queue: str, limit_key: str | None, *, is_start: bool) -> bool:
        """Count one more run, unless the limits forbid it; whether it was counted. `is_start`: it has never been leased."""
        if not self.has_room(queue, limit_key):
            return False
        if is_start and not self.may_start(queue):
            self.hold_back(queue)
            return False
        self.add(queue, limit_key)
        if is_start and self._limits.get(queue, _UNLIMITED).interval is not None:
            self.started.add(queue)
        return True

    def give_back(self, queue: str, limit_key: str | None, *, is_start: bool) -> None:
        """Undo one `take`: another worker got the run."""
        self.add(queue, limit_key, -1)
        if is_start:
            self.started.discard(queue)

    def hold_back(self, queue: str) -> None:
        """Note that due runs of this queue wait, or may wait, for its rate."""
        self._held_back.add(queue)

    def next_start_at(self) -> int | None:
        """The earliest instant at which the rate of a queue lets a run start that it held back; None if it held back none."""
        later = (self._next_start(queue) for queue in self._held_back)
        return min((instant for instant in later if instant is not None and instant > self._now), default=None)

    def full_queues(self) -> list[str]:
        """The queues that take no more runs."""
        return sorted(queue for queue in self._limits if not self.has_room(queue))

    def full_keys(self, queue: str) -> list[str]:
        """The limit keys of this queue that take no more runs."""
        limit = self._limits.get(queue, _UNLIMITED).per_key
        if limit is None:
            return []
        return sorted(key for (of, key), number in self._under_key.items() if of == queue and number >= limit)

    def rate_limited_queues(self) -> list[str]:
        """The queues in which no run may start now because of their rate; those that have started may go on."""
        return sorted(queue for queue in self._limits if not self.may_start(queue))

    def _next_start(self, queue: str) -> int | None:
        interval = self._limits.get(queue, _UNLIMITED).interval
        last_start = self._now if queue in self.started else self._last_starts.get(queue)
        return None if interval is None or last_start is None else last_start + interval


def earliest(*instants: int | None) -> int | None:
    """The earliest of these instants, where None is never."""
    return min((instant for instant in instants if instant is not None), default=None)
