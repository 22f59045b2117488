"""Which runs a worker gets.

A claim looks through the runs that have not ended, in memory; only those it takes are opened. Claims of one namespace come one
after the other, so that they keep to the queues' limits together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple

from perdure.backends.base.process_owner import Owners
from perdure.backends.files.index import Summary
from perdure.backends.files.locks import Busy
from perdure.backends.files.place import LockedRun, Place
from perdure.backends.files.upkeep import PASS_OVER_AFTER, look_around
from perdure.backends.files.verbs import clock
from perdure.errors import SnapshotCorrupt
from perdure.model.records import Claim, Claims, QueueLimits


class Wanted(NamedTuple):
    """Which runs a worker takes."""

    workflows: frozenset[str]
    queues: frozenset[str] | None

    @classmethod
    def of(cls, workflows: Collection[str], queues: Collection[str] | None) -> Wanted:
        """The runs of these workflows in these queues, or in all."""
        return cls(frozenset(workflows), None if queues is None else frozenset(queues))

    def has(self, workflow: str, queue: str) -> bool:
        """Whether runs like this are wanted."""
        return workflow in self.workflows and (self.queues is None or queue in self.queues)


class Room:
    """How many more runs the queue limits let in. Only leases that are alive take a place."""

    def __init__(self, limits: dict[str, QueueLimits], leased: Iterable[Summary]) -> None:
        self._limits = limits
        self._taken: Counter[tuple[str, str | None]] = Counter()
        for summary in leased:
            self.take(summary)

    def has(self, summary: Summary) -> bool:
        """Whether this run can be leased."""
        limits = self._limits.get(summary.queue)
        if limits is None:
            return True
        in_queue, queue_limit = self._taken[summary.queue, None], limits.concurrency
        in_key, key_limit = self._taken[summary.queue, summary.limit_key], limits.key_concurrency
        fits_key = summary.limit_key is None or key_limit is None or in_key < key_limit
        return fits_key and (queue_limit is None or in_queue < queue_limit)

    def take(self, summary: Summary) -> None:
        """Count this run."""
        self._taken[summary.queue, None] += 1
        if summary.limit_key is not None:
            self._taken[summary.queue, summary.limit_key] += 1


def claim(place: Place, limit: int, ttl: float, wanted: Wanted, owners: Owners, now: int | None) -> Claims:
    """Lease up to `limit` due runs. When nothing is due this writes nothing and takes no lock."""
    at = clock(now)
    look_around(place)
    if limit < 1 or not any(is_due(summary, owners, at) for summary in _fitting(place, wanted)):
        return Claims(claims=[], next_wake_at=_next_wake_at(place, wanted, at))
    with place.lock("claim"):
        look_around(place)
        next_wake_at = _next_wake_at(place, wanted, at)
        return Claims(claims=_take(place, limit, ttl, wanted, owners, at), next_wake_at=next_wake_at)


def _take(place: Place, limit: int, ttl: float, wanted: Wanted, owners: Owners, at: int) -> list[Claim]:
    room = Room(place.settings.read().limits, (one for _, one in place.index.living() if _is_leased(one, owners, at)))
    due = [summary for summary in _fitting(place, wanted) if is_due(summary, owners, at)]
    give = partial(_give, ttl=ttl, wanted=wanted, owners=owners, at=at)
    taken: list[Claim] = []
    for summary in sorted(due, key=lambda one: (-one.priority, min(one.wake_at or 0, at), one.id)):
        if len(taken) >= limit:
            break
        if room.has(summary):
            try:
                got = place.change_one(summary.id, give, patience=PASS_OVER_AFTER)
            except (SnapshotCorrupt, Busy):
                continue  # one run that cannot be read, or whose writer stands still, must not hold up the others
            except OSError:
                if not taken:
                    raise
                break  # what was leased so far must reach its worker
            if got is not None:
                room.take(summary)
                taken.append(got)
    return taken


def _give(run: LockedRun, ttl: float, wanted: Wanted, owners: Owners, at: int) -> Claim | None:
    """The lease, if the run still is as the index said."""
    if run.state is None:
        return None
    now = Summary.of(run.state)
    if now.ended or now.held or not wanted.has(now.workflow, now.queue) or not is_due(now, owners, at):
        return None
    return run.state.give_to(owners.here, ttl, at)


def _fitting(place: Place, wanted: Wanted) -> list[Summary]:
    return [one for one in claimable(place) if wanted.has(one.workflow, one.queue)]


def claimable(place: Place) -> list[Summary]:
    """Runs that are due or that time alone will make due."""
    return [one for _, one in place.index.living() if not one.ended and not one.held and one.wake_at is not None]


def _is_leased(summary: Summary, owners: Owners, at: int) -> bool:
    if summary.lease_until is None or summary.lease_until <= at:
        return False
    return summary.lease_owner is None or not owners.gone(summary.lease_owner)


def is_due(summary: Summary, owners: Owners, at: int) -> bool:
    """Whether the run may be claimed, also because the process that has it is gone."""
    if summary.wake_at is None:
        return False
    return summary.wake_at <= at or (summary.lease_owner is not None and owners.gone(summary.lease_owner))


def _next_wake_at(place: Place, wanted: Wanted, at: int) -> int | None:
    return min((one.wake_at for one in _fitting(place, wanted) if one.wake_at is not None and one.wake_at > at), default=None)
