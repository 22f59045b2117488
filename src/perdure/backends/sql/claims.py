"""Who drives which run: claim, acquire, release.

A claim locks what it takes and passes over what others have locked. Where a queue has a limit, claims wait for each other at the
queue's row before they count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from perdure.backends.base.leases import new_token
from perdure.backends.sql import reading
from perdure.backends.sql.lines import Lines, Turn, groups_of, next_wake_at
from perdure.backends.sql.room import Room
from perdure.backends.sql.rows import RUN_COLUMNS, RUN_FIELDS, lease_of, run_from
from perdure.backends.sql.runs import time
from perdure.backends.sql.schedules import limits_from
from perdure.backends.sql.session import Given, Row, Session, Statement
from perdure.errors import LeaseHeld, LeaseLost, RunNotFound
from perdure.model.records import Claim, Lease, QueueLimits, RunRow

_ASKED: Final = f"SELECT {RUN_COLUMNS}, lease_token, $clock FROM $runs WHERE namespace = ?1 AND id = ?2 $for_update"
_TAKE: Final = """
    UPDATE $runs SET status = 'running', waiting_for = '[]', epoch = ?3, lease_token = ?4, lease_owner = ?5, lease_until = ?6,
        wake_at = ?6, updated_at = ?7, attempts = ?8, journal_length = ?9
    WHERE namespace = ?1 AND id = ?2
"""
_RELEASE: Final = """
    UPDATE $runs SET status = 'pending', wake_at = ?3, updated_at = ?3, attempts = ?4,
        lease_token = NULL, lease_owner = NULL, lease_until = NULL
    WHERE namespace = ?1 AND id = ?2
"""


class Wanted(NamedTuple):
    """Which runs a worker takes, how many, and for how long. It is copied from what the caller passed in."""

    limit: int
    length: int
    owner: str
    workflows: tuple[str, ...]
    queues: frozenset[str] | None
    now: int | None

    @classmethod
    def of(
        cls, limit: int, length: int, owner: str, workflows: Collection[str], queues: Collection[str] | None, now: int | None
    ) -> Wanted:
        """The runs of these workflows in these queues, or in all."""
        names = None if queues is None else frozenset(queues)
        return cls(max(limit, 0), length, owner, tuple(sorted(set(workflows))), names, now)


class Taken(NamedTuple):
    """A run just leased; its journal is loaded after the commit."""

    lease: Lease
    run: RunRow
    inbox_seq: int


class Took(NamedTuple):
    """What a claim took, and when more may come due."""

    taken: list[Taken]
    next_wake_at: int | None


async def claim(db: Session, wanted: Wanted) -> Took:
    """Lease due runs."""
    if not wanted.workflows or wanted.queues == frozenset():
        return Took([], None)
    at = await time(db, wanted.now)
    limits = await _limits(db, wanted.queues)
    groups = await groups_of(db, wanted.workflows, wanted.queues)
    soon = await next_wake_at(db, groups, at)
    room = Room(limits, await _leased(db, sorted(limits), at) if limits else ())
    ids = await _lock(db, Lines(db, groups, room, at, wanted.limit), room, wanted.limit, at)
    return Took(await _take(db, ids, wanted.owner, at, wanted.length), soon)


async def _limits(db: Session, queues: frozenset[str] | None) -> dict[str, QueueLimits]:
    """The limits of these queues, or of all, locked until the transaction ends."""
    given = Given()
    among = "" if queues is None else f"AND queue IN ({given.many(sorted(queues))})"
    template = f"""
        SELECT queue, concurrency, key_concurrency FROM $queues
        WHERE namespace = ?1 AND (concurrency IS NOT NULL OR key_concurrency IS NOT NULL) {among} ORDER BY queue $for_update
    """
    return limits_from(db, await db.all(template, *given.values))


async def _leased(db: Session, queues: Sequence[str], now: int) -> list[tuple[str, str | None, int]]:
    given = Given()
    template = f"""
        SELECT queue, limit_key, count(*) FROM $runs
        WHERE namespace = ?1 AND queue IN ({given.many(queues)}) AND lease_until > {given.one(now)} GROUP BY queue, limit_key
    """
    name = db.tables.values.name_from
    return [(name(queue), key and name(key), int(number)) for queue, key, number in await db.all(template, *given.values)]


async def _lock(db: Session, lines: Lines, room: Room, limit: int, now: int) -> list[str]:
    """The ids of due runs that are now locked, in the order of their turn."""
    ids: list[str] = []
    while turns := await lines.next(limit - len(ids)):
        locked = await _locked(db, turns, now)
        for turn in turns:
            if turn.id in locked:
                ids.append(turn.id)
            else:
                room.give_back(turn.queue, turn.limit_key)
    return ids


async def _locked(db: Session, turns: Sequence[Turn], now: int) -> set[str]:
    given = Given()
    places = given.many(sorted(turn.id for turn in turns))
    template = f"""
        SELECT id FROM $runs WHERE namespace = ?1 AND id IN ({places}) AND wake_at <= {given.one(now)} AND held = 0
        ORDER BY id $for_update $skip_locked
    """
    return {db.tables.values.name_from(row[0]) for row in await db.all(template, *given.values)}


async def _take(db: Session, ids: Sequence[str], owner: str, at: int, length: int, token: str = "") -> list[Taken]:
    """Lease runs that are locked."""
    if not ids:
        return []
    given = Given()
    template = f"""
        SELECT {RUN_COLUMNS}, inbox_seq, journal_length,
            (SELECT max(step.seq) FROM $steps AS step WHERE step.namespace = ?1 AND step.run_id = run.id)
        FROM $runs AS run WHERE namespace = ?1 AND id IN ({given.many(ids)})
    """
    rows = await db.all(template, *given.values)
    taken = [_taken(db, row, owner, at, length, token or new_token()) for row in rows]
    await db.send([statement for _, statement in taken])
    return sorted((one for one, _ in taken), key=lambda one: ids.index(one.run.id))


def _taken(db: Session, row: Row, owner: str, at: int, length: int, token: str) -> tuple[Taken, Statement]:
    run = run_from(row, db.tables.values)
    inbox_seq, seen, journal_length = (int(value or 0) for value in row[len(RUN_FIELDS) :])
    until = at + length
    run = msgspec.structs.replace(
        run,
        status="running",
        waiting_for=(),
        epoch=max(run.epoch + 1, at),
        lease_owner=owner,
        lease_until=until,
        wake_at=until,
        updated_at=at,
        attempts=1 if seen < journal_length else run.attempts + 1,
    )
    taking = db.statement(_TAKE, run.id, run.epoch, token, owner, until, at, run.attempts, journal_length)
    return Taken(lease_of(run, token), run, inbox_seq), taking


async def acquire(
    db: Session, run_id: str, length: int, owner: str, token: str, now: int | None, *, due_only: bool
) -> Taken | None:
    """Lease this run, or None when it has ended, lacks its input or (with `due_only`) is not due."""
    row = await db.one(_ASKED, run_id)
    if row is None:
        raise RunNotFound(run_id)
    run, at = run_from(row, db.tables.values), int(row[-1]) if now is None else now
    if row[-2] is not None and db.tables.values.name_from(row[-2]) == token:
        return await _ours(db, run, token)  # taken by an attempt whose reply was lost
    if run.ended:
        return None
    if run.held:
        raise LeaseHeld(run_id, "an operator, who put it on hold")
    if run.lease_until is not None and run.lease_until > at:
        raise LeaseHeld(run_id, run.lease_owner or "a live worker")
    is_due = run.wake_at is not None and run.wake_at <= at
    if run.lacks_input or (due_only and not is_due):
        return None
    return (await _take(db, [run_id], owner, at, length, token))[0]


async def _ours(db: Session, run: RunRow, token: str) -> Taken:
    row = await db.one("SELECT inbox_seq FROM $runs WHERE namespace = ?1 AND id = ?2", run.id)
    return Taken(lease_of(run, token), run, 0 if row is None else int(row[0]))


async def release(db: Session, lease: Lease, now: int | None, *, is_repeated: bool = False) -> None:
    """Give the run back, due at once, with its attempt."""
    row = await db.one(_ASKED, lease.run_id)
    if row is None:
        raise LeaseLost(lease.run_id, lease.epoch)
    run, token = run_from(row, db.tables.values), row[-2] and db.tables.values.name_from(row[-2])
    if is_repeated and (run.status, run.epoch, token) == ("pending", lease.epoch, None):
        return  # by an attempt whose reply was lost
    if (run.epoch, token) != (lease.epoch, lease.token):
        raise LeaseLost(lease.run_id, lease.epoch)
    await db.run(_RELEASE, lease.run_id, int(row[-1]) if now is None else now, max(run.attempts - 1, 0))


async def load(db: Session, taken: Sequence[Taken]) -> list[Claim]:
    """The claims for runs that were leased. To be called after that was committed: from then on only we append to them."""
    parts = await reading.parts(db, [one.run.id for one in taken])
    return [_claim_of(one, parts) for one in taken]


def _claim_of(taken: Taken, parts: reading.Parts) -> Claim:
    inbox = parts.inboxes.get(taken.run.id, [])
    return Claim(
        lease=taken.lease,
        run=taken.run,
        journal=parts.journals.get(taken.run.id, []),
        inbox=inbox,
        # Rows that came after the lease was taken are in the list, so they count as seen.
        inbox_seq=max(taken.inbox_seq, inbox[-1].seq if inbox else 0),
        item_counts=parts.item_counts.get(taken.run.id, {}),
    )
