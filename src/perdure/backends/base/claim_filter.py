"""Which runs a claim may take: the same question in every store, copied from what the caller passed in."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class ClaimFilter(NamedTuple):
    """The workflows and queues that a worker serves, sorted so that statements made of them are the same every time.

    `queues` is None for all queues. An empty collection of workflows or queues matches no run.
    """

    workflows: tuple[str, ...]
    queues: tuple[str, ...] | None

    @classmethod
    def of(cls, workflows: Collection[str], queues: Collection[str] | None) -> ClaimFilter:
        """The filter for these workflows in these queues, or in all."""
        return cls(tuple(sorted(set(workflows))), None if queues is None else tuple(sorted(set(queues))))

    @property
    def is_empty(self) -> bool:
        """Whether no run can match."""
        return not self.workflows or self.queues == ()

    def matches(self, workflow: str, queue: str) -> bool:
        """Whether a worker with this filter takes a run of this workflow in this queue."""
        return workflow in self.workflows and (self.queues is None or queue in self.queues)


class ClaimRequest(NamedTuple):
    """One call of `claim`: which runs, how many, and the lease they get. `length` is in microseconds."""

    filter: ClaimFilter
    limit: int
    length: int
    owner: str
    now: int | None
