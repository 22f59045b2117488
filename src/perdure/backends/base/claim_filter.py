"""Which runs a claim may take: the same question in every store, copied from what the caller passed in."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from perdure.model.ids import check_text
from perdure.model.records import WorkflowVersion


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
