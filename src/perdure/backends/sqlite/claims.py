"""Who drives which run: claim, acquire, renew, release.

Runs that may come due lie in one index by (workflow, queue, priority, wake_at, id). A claim visits each distinct (workflow,
queue, priority) with one seek, and from each only the due rows, so its cost does not depend on how many runs sleep, belong
to other workflows or wait behind a queue's limit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, Final, NamedTuple

from perdure.backends.base.leases import new_token
from perdure.backends.base.process_owner import Owner, Owners
from perdure.backends.sqlite.rows import RUN_COLUMNS, clock, run_from
from perdure.backends.sqlite.runs import get
from perdure.backends.sqlite.schedules import queue_limits
from perdure.backends.sqlite.schema import Session
from perdure.errors import LeaseHeld, LeaseLost, RunNotFound
from perdure.model.records import Lease, Pulse, QueueLimits, RunRow

# A loose index scan: from the first row of a group straight to the first row of the next. Not a comparison of row values,
# for which SQLite would read through the rows of the present group.
_GROUPS: Final = """
    WITH RECURSIVE first(id) AS (
        SELECT (
            SELECT id FROM $runs INDEXED BY $runs_wake WHERE namespace = ?1 AND wake_at IS NOT NULL AND held = 0
            ORDER BY workflow, queue, priority LIMIT 1
        )
        UNION ALL
        SELECT coalesce(
            (SELECT id FROM $runs INDEXED BY $runs_wake WHERE namespace = ?1 AND wake_at IS NOT NULL AND held = 0
                AND workflow = here.workflow AND queue = here.queue AND priority > here.priority ORDER BY priority LIMIT 1),
            (SELECT id FROM $runs INDEXED BY $runs_wake WHERE namespace = ?1 AND wake_at IS NOT NULL AND held = 0
                AND workflow = here.workflow AND queue > here.queue ORDER BY queue, priority LIMIT 1),
            (SELECT id FROM $runs INDEXED BY $runs_wake WHERE namespace = ?1 AND wake_at IS NOT NULL AND held = 0
                AND workflow > here.workflow ORDER BY workflow, queue, priority LIMIT 1)
        )
        FROM first JOIN $runs AS here ON here.namespace = ?1 AND here.id = first.id
    )
    SELECT here.workflow, here.queue, here.priority FROM first JOIN $runs AS here ON here.namespace = ?1 AND here.id = first.id
"""
_DUE: Final = """
    SELECT wake_at, id, limit_key FROM $runs
    WHERE namespace = ?1 AND workflow = ?2 AND queue = ?3 AND priority = ?4 AND wake_at <= ?5 AND held = 0
    ORDER BY wake_at, id
"""
_NEXT: Final = """
    SELECT min(wake_at) FROM $runs
    WHERE namespace = ?1 AND workflow = ?2 AND queue = ?3 AND priority = ?4 AND wake_at > ?5 AND held = 0
"""
_LEASED: Final = """
    SELECT queue, limit_key, count(*) FROM $runs
    WHERE namespace = ?1 AND lease_owner IS NOT NULL AND lease_until > ?2 GROUP BY queue, limit_key
"""
_OWNERS: Final = """
    WITH RECURSIVE found(owner) AS (
        SELECT min(lease_owner) FROM $runs WHERE namespace = ?1 AND lease_owner IS NOT NULL
        UNION ALL
        SELECT (SELECT min(lease_owner) FROM $runs WHERE namespace = ?1 AND lease_owner > found.owner)
        FROM found WHERE found.owner IS NOT NULL
    )
    SELECT owner FROM found WHERE owner IS NOT NULL
"""
_FREE: Final = """
    UPDATE $runs SET lease_owner = NULL, lease_until = min(lease_until, ?3), wake_at = min(wake_at, ?3)
    WHERE namespace = ?1 AND lease_owner = ?2
"""
_OWNED: Final = """
    SELECT id FROM $runs INDEXED BY $runs_leased WHERE namespace = ?1 AND lease_owner = ?2 AND held = 0 AND wake_at > ?3
"""
_TAKE: Final = f"""
    UPDATE $runs SET status = 'running', waiting_for = '[]', lease_token = ?3, lease_owner = ?4, lease_until = ?5, wake_at = ?5,
        updated_at = ?6, epoch = max(epoch + 1, ?6),
        attempts = CASE WHEN journal_length < grown.length THEN 1 ELSE attempts + 1 END, journal_length = grown.length
    FROM (SELECT coalesce(max(seq), 0) AS length FROM $steps WHERE namespace = ?1 AND run_id = ?2) AS grown
    WHERE namespace = ?1 AND id = ?2 RETURNING {RUN_COLUMNS}
"""
_RENEW: Final = """
    UPDATE $runs SET lease_until = ?5, wake_at = ?5, updated_at = ?6, lease_owner = ?7
    WHERE namespace = ?1 AND id = ?2 AND epoch = ?3 AND lease_token = ?4
    RETURNING cancel_requested, (SELECT max(seq) FROM $signals WHERE namespace = ?1 AND run_id = ?2)
"""
_RELEASE: Final = """
    UPDATE $runs SET status = 'pending', wake_at = ?5, updated_at = ?5, attempts = max(attempts - 1, 0),
        lease_token = NULL, lease_owner = NULL, lease_until = NULL
    WHERE namespace = ?1 AND id = ?2 AND epoch = ?3 AND lease_token = ?4
"""


class Group(NamedTuple):
    """Runs that may come due and are alike to a claim."""

    workflow: str
    queue: str
    priority: int


class Wanted(NamedTuple):
    """Which runs a worker takes."""

    workflows: frozenset[str]
    queues: frozenset[str] | None

    @classmethod
    def of(cls, workflows: Collection[str], queues: Collection[str] | None) -> Wanted:
        """The runs of these workflows in these queues, or in all."""
        return cls(frozenset(workflows), None if queues is None else frozenset(queues))

    def has(self, group: Group) -> bool:
        """Whether runs of this group are wanted."""
        return group.workflow in self.workflows and (self.queues is None or group.queue in self.queues)


class Taken(NamedTuple):
    """A run just leased; its journal is loaded after the commit."""

    lease: Lease
    run: RunRow


class Took(NamedTuple):
    """What a claim took, and when more may come due."""

    taken: list[Taken]
    next_wake_at: int | None


class _Room:
    """How many more runs each queue and limit key may have leased."""

    def __init__(self, db: Session, now: int) -> None:
        self._limits = queue_limits(db)
        self._in_queue: Counter[str] = Counter()
        self._under_key: Counter[tuple[str, str | None]] = Counter()
        for queue, limit_key, leased in db.all(_LEASED, now) if self._limits else ():
            self._in_queue[queue] += leased
            self._under_key[queue, limit_key] += leased

    def queue_is_open(self, queue: str) -> bool:
        """Whether the queue takes one more."""
        limit = self._limits.get(queue, QueueLimits()).concurrency
        return limit is None or self._in_queue[queue] < limit

    def take(self, queue: str, limit_key: str | None) -> bool:
        """Count one more run in, unless that would be too many."""
        limit = self._limits.get(queue, QueueLimits()).key_concurrency
        if not self.queue_is_open(queue) or (
            limit is not None and limit_key is not None and self._under_key[queue, limit_key] >= limit
        ):
            return False
        self._in_queue[queue] += 1
        self._under_key[queue, limit_key] += 1
        return True


def groups(db: Session) -> list[Group]:
    """Every group in which a run may come due."""
    return [Group(*row) for row in db.all(_GROUPS)]


def due_in(db: Session, group: Group, now: int) -> Iterator[tuple[int, str, str | None, str]]:
    """The due runs of a group, longest due first: (wake_at, id, limit_key, queue)."""
    return ((wake_at, run_id, limit_key, group.queue) for wake_at, run_id, limit_key in db.each(_DUE, *group, now))


def _pick(db: Session, wanted: Sequence[Group], limit: int, now: int) -> list[str]:
    """Ids of the runs to lease, in the order in which they are due their turn."""
    picked: list[str] = []
    if limit <= 0:
        return picked
    room = _Room(db, now)
    by_priority = groupby(sorted(wanted, key=lambda group: -group.priority), key=lambda group: group.priority)
    for _, alike in by_priority:
        rows = heapq.merge(*(_while_open(db, group, now, room) for group in alike), key=_turn)
        for _, run_id, limit_key, queue in rows:
            if room.take(queue, limit_key):
                picked.append(run_id)
                if len(picked) == limit:
                    return picked
    return picked


def _while_open(db: Session, group: Group, now: int, room: _Room) -> Iterator[tuple[int, str, str | None, str]]:
    """The due runs of a group, as long as its queue takes one more."""
    if not room.queue_is_open(group.queue):
        return iter(())
    return takewhile(lambda _: room.queue_is_open(group.queue), due_in(db, group, now))


def _turn(row: tuple[int, str, str | None, str]) -> tuple[int, str]:
    return row[0], row[1]


def _next_wake_at(db: Session, wanted: Sequence[Group], now: int) -> int | None:
    rows = (db.one(_NEXT, *group, now) for group in wanted)
    return min((row[0] for row in rows if row is not None and row[0] is not None), default=None)


def gone_owners(db: Session, owners: Owners) -> list[str]:
    """Holders of leases whose process is no more."""
    return [owner for (owner,) in db.all(_OWNERS) if owners.gone(owner)]


def freed_by(db: Session, owner: str, now: int) -> list[str]:
    """Ids of the runs that would be due, were the leases of this owner ended."""
    return sorted(run_id for (run_id,) in db.all(_OWNED, owner, now))


def nothing_to_claim(db: Session, limit: int, wanted: Wanted, owners: Owners, now: int | None) -> Took | None:
    """An empty claim when nothing is due, from a plain read; None when a transaction must look closer."""
    at = clock(now)
    if gone_owners(db, owners):
        return None
    mine = [group for group in groups(db) if wanted.has(group)]
    if _pick(db, mine, min(limit, 1), at):
        return None
    return Took([], _next_wake_at(db, mine, at))


def claim(db: Session, limit: int, length: int, wanted: Wanted, owners: Owners, now: int | None) -> Took:
    """Lease up to `limit` due runs for `length` microseconds."""
    at = clock(now)
    for owner in gone_owners(db, owners):
        db.run(_FREE, owner, at)
    mine = [group for group in groups(db) if wanted.has(group)]
    next_wake_at = _next_wake_at(db, mine, at)
    taken = [_take(db, run_id, at, length, owners.here) for run_id in _pick(db, mine, limit, at)]
    return Took(taken, next_wake_at)


def acquire(db: Session, run_id: str, length: int, owners: Owners, now: int | None, *, due_only: bool) -> Taken | None:
    """Lease this run for `length` microseconds, or None when it has ended, lacks its input or (with `due_only`) is not due."""
    at = clock(now)
    run = get(db, run_id)
    if run is None:
        raise RunNotFound(run_id)
    if run.ended:
        return None
    if run.held:
        raise LeaseHeld(run_id, "an operator, who put it on hold")
    if run.status == "running":
        refuse_live(run, owners, at)
    elif run.lacks_input or (due_only and (run.wake_at is None or run.wake_at > at)):
        return None
    return _take(db, run_id, at, length, owners.here)


def refuse_live(run: RunRow, owners: Owners, now: int) -> None:
    """Raise `LeaseHeld` while a lease on this run has not expired and its process may be alive."""
    owner = run.lease_owner
    if owner is None or run.lease_until is None or run.lease_until <= now or owners.gone(owner):
        return
    known = Owner.parse(owner)
    raise LeaseHeld(run.id, owner if known is None else known.label)


def _take(db: Session, run_id: str, at: int, length: int, owner: str) -> Taken:
    token = new_token()
    values = db.one(_TAKE, run_id, token, owner, at + length, at)
    if values is None:
        raise RunNotFound(run_id)
    run = run_from(values)
    return Taken(Lease(run_id=run_id, epoch=run.epoch, token=token, until=at + length), run)


def renew(db: Session, leases: Sequence[Lease], length: int, owners: Owners, now: int | None) -> list[Pulse | None]:
    """Prolong each lease that is still current to `length` microseconds from now."""
    at = clock(now)
    return [_pulse(db.one(_RENEW, lease.run_id, lease.epoch, lease.token, at + length, at, owners.here)) for lease in leases]


def _pulse(row: tuple[Any, ...] | None) -> Pulse | None:
    return None if row is None else Pulse(row[1] or 0, bool(row[0]))


def release(db: Session, lease: Lease, now: int | None) -> None:
    """Give the run back, due at once, with its attempt."""
    if not db.run(_RELEASE, lease.run_id, lease.epoch, lease.token, clock(now)):
        raise LeaseLost(lease.run_id, lease.epoch)
