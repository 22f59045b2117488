"""Which runs a worker gets.

A claim looks through the summaries of the runs that have not ended, in memory; only the logs of those it takes are opened. Claims
of one namespace come one after the other, so that they keep to the queues' limits together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest, QueueCounter, SuspectCounter, earliest
from perdure.backends.base.leases import is_due, store_time
from perdure.backends.base.process_owner import Owners
from perdure.backends.files.index import RunSummary
from perdure.backends.files.index_repair import PASS_OVER_AFTER, repair
from perdure.backends.files.locks import LockBusy
from perdure.backends.files.namespace import FilesNamespace, LockedRun
from perdure.backends.files.queues import queue_counter, save_starts
from perdure.backends.files.verbs import has_dead_owner
from perdure.errors import SnapshotCorrupt
from perdure.model.records import Claim, Claims


def claim(namespace: FilesNamespace, request: ClaimRequest, ttl: float, owners: Owners) -> Claims:
    """Lease up to `request.limit` due runs. When nothing is due this writes nothing and takes no lock."""
    at, wanted = store_time(request.now), request.filter
    repair(namespace)
    if request.limit < 1 or not any(may_be_claimed(summary, owners, at) for summary in _matching(namespace, wanted)):
        return Claims(claims=[], next_wake_at=_next_look_at(namespace, wanted, owners, at), now=at)
    with namespace.lock("claim"):
        repair(namespace)
        next_wake_at = _next_look_at(namespace, wanted, owners, at)
        counter = queue_counter(namespace, owners, at)
        claims = _claim_due(namespace, request, ttl, owners, counter, at)
        return Claims(claims=claims, next_wake_at=earliest(next_wake_at, counter.next_start_at()), now=at)


def _next_look_at(namespace: FilesNamespace, wanted: ClaimFilter, owners: Owners, at: int) -> int | None:
    holders = (one.lease_owner for one in namespace.index.unfinished())
    return owners.next_look_at(_next_wake_at(namespace, wanted, at), holders, at)


def _claim_due(
    namespace: FilesNamespace, request: ClaimRequest, ttl: float, owners: Owners, counter: QueueCounter, at: int
) -> list[Claim]:
    wanted, suspects = request.filter, SuspectCounter(request.suspects)
    due = [summary for summary in _matching(namespace, wanted) if may_be_claimed(summary, owners, at)]
    lease = partial(_lease, ttl=ttl, wanted=wanted, owners=owners, at=at)
    claims: list[Claim] = []
    for summary in sorted(due, key=lambda one: (-one.priority, min(one.wake_at or 0, at), one.id)):
        if len(claims) >= request.limit:
            break
        if not suspects.take(is_suspect=summary.is_suspect):
            continue
        try:
            claimed = _lease_within(namespace, summary, lease, counter, at)
        except OSError:
            if not claims:
                raise
            break  # what was leased so far must reach its worker
        if claimed is not None:
            claims.append(claimed)
        else:
            suspects.give_back(is_suspect=summary.is_suspect)
    return claims


def _lease_within(
    namespace: FilesNamespace, summary: RunSummary, lease: Callable[..., Claim | None], counter: QueueCounter, at: int
) -> Claim | None:
    """The claim, if the limits of its queue let the run in and it can be leased."""
    is_start = not summary.has_started
    if not counter.take(summary.queue, summary.limit_key, is_start=is_start):
        return None
    claimed = None
    with suppress(SnapshotCorrupt, LockBusy):  # one run that cannot be read, or whose writer is stopped, must not hold up others
        save_starts(namespace, counter.started & {summary.queue} if is_start else (), at)
        claimed = namespace.change_one(summary.id, partial(lease, is_start=is_start), patience=PASS_OVER_AFTER)
    if claimed is None:
        counter.give_back(summary.queue, summary.limit_key, is_start=is_start)
    return claimed


def _lease(run: LockedRun, ttl: float, wanted: ClaimFilter, owners: Owners, at: int, *, is_start: bool) -> Claim | None:
    """The claim, if the run still is as the index said."""
    if run.state is None:
        return None
    now = RunSummary.of(run.state)
    if now.ended or now.held or not wanted.matches(now) or not may_be_claimed(now, owners, at):
        return None
    if is_start is now.has_started:
        return None  # it was created again since, or another process leased it
    return run.state.grant_lease(ttl, at, owners.here)


def _matching(namespace: FilesNamespace, wanted: ClaimFilter) -> list[RunSummary]:
    return [one for one in claimable(namespace) if wanted.matches(one)]


def claimable(namespace: FilesNamespace) -> list[RunSummary]:
    """Runs that are due or that time alone will make due."""
    return [one for one in namespace.index.unfinished() if not one.ended and not one.held and one.wake_at is not None]


def may_be_claimed(summary: RunSummary, owners: Owners, at: int) -> bool:
    """Whether the run may be claimed, also because the process that had it leased has died."""
    return is_due(summary, at) or (summary.wake_at is not None and has_dead_owner(summary.lease_owner, owners))


def _next_wake_at(namespace: FilesNamespace, wanted: ClaimFilter, at: int) -> int | None:
    later = (one.wake_at for one in _matching(namespace, wanted) if one.wake_at is not None and one.wake_at > at)
    return min(later, default=None)
