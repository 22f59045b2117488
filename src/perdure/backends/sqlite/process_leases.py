"""Leases that are free as soon as their process has ended, and the verbs that look at leases.

A lease names its process as its owner, and all processes of a file are on one machine. So before a run is claimed, acquired or
restored the leases of processes that have ended are freed, as if they had expired at that moment. That stays written also when
the verb is then refused: it is true whatever becomes of the verb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from perdure.backends.base.claim_rules import ClaimRequest
from perdure.backends.base.leases import new_token, store_time
from perdure.backends.sql import claims, reading, runs
from perdure.backends.sql.session import Session
from perdure.model.journal import Entry
from perdure.model.process_owner import Owners
from perdure.model.records import Lease, Pulse, RunRow, Signal

# A loose index scan: from each owner straight to the next.
_OWNERS: Final = """
    WITH RECURSIVE found(owner) AS (
        SELECT min(lease_owner) FROM $runs WHERE namespace = ?1 AND lease_until IS NOT NULL AND lease_owner > ''
        UNION ALL
        SELECT (SELECT min(lease_owner) FROM $runs
            WHERE namespace = ?1 AND lease_until IS NOT NULL AND lease_owner > found.owner)
        FROM found WHERE found.owner IS NOT NULL
    )
    SELECT owner FROM found WHERE owner IS NOT NULL
"""
_FREE: Final = """
    UPDATE $runs SET lease_owner = NULL, lease_until = min(lease_until, ?3), wake_at = min(wake_at, ?3)
    WHERE namespace = ?1 AND lease_until IS NOT NULL AND lease_owner = ?2
"""
_OWNED: Final = """
    SELECT id FROM $runs INDEXED BY $runs_leased
    WHERE namespace = ?1 AND lease_until IS NOT NULL AND lease_owner = ?2 AND held = 0 AND wake_at > ?3 ORDER BY id
"""


async def claim(db: Session, request: ClaimRequest, owners: Owners) -> claims.ClaimResult:
    """Lease due runs, also those of processes that have ended."""
    at = store_time(request.now)
    await _free(db, owners, at)
    holders = await _holders(db)
    result = await claims.claim(db, request._replace(owner=owners.here, now=at))
    return result._replace(next_wake_at=owners.next_look_at(result.next_wake_at, holders, at))


async def find_nothing_due(db: Session, request: ClaimRequest, owners: Owners) -> claims.ClaimResult | None:
    """The empty result of a claim for which nothing is due, found by reading alone; None when there is something to lease."""
    holders, at = await _holders(db), store_time(request.now)
    if any(map(owners.has_ended, holders)):
        return None
    result = await claims.find_nothing_due(db, request._replace(now=at))
    return None if result is None else result._replace(next_wake_at=owners.next_look_at(result.next_wake_at, holders, at))


async def acquire(
    db: Session, run_id: str, length: int, owners: Owners, now: int | None, *, due_only: bool
) -> claims.LeasedRun | None:
    """Lease this run, or None when it has ended, lacks its input, has no room in its queue or (with `due_only`) is not due."""
    at = store_time(now)
    await _free(db, owners, at)
    return await claims.acquire(db, run_id, length, owners.here, new_token(), at, due_only=due_only)


async def renew(
    db: Session, leases: Sequence[Lease], length: int, running_steps: Mapping[Lease, bytes], owners: Owners, now: int | None
) -> list[Pulse | None]:
    """Prolong each lease that is still current, and make it this process's; None for each other."""
    renewed, _ = await claims.renew_unlocked(db, leases, length, running_steps, store_time(now), owners.here)
    return [renewed.get(lease) for lease in leases]


async def restore(
    db: Session, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal], owners: Owners, now: int | None
) -> None:
    """Put this whole run in place of what is there. Raises `LeaseHeld` while a process drives that."""
    at = store_time(now)
    await _free(db, owners, at)
    await runs.restore(db, run, entries, inbox, at)  # always at the first try: nothing else writes in this transaction


async def due(db: Session, limit: int, owners: Owners, now: int | None) -> list[str]:
    """Ids of the runs that may be claimed, longest due first; those of processes that have ended come last."""
    at = store_time(now)
    ids = await reading.due(db, limit, at)
    for owner in await _ended_owners(db, owners):
        ids += [run_id for (run_id,) in await db.all(_OWNED, owner, at)]
    return ids[: max(limit, 0)]


async def _holders(db: Session) -> list[str]:
    return [owner for (owner,) in await db.all(_OWNERS)]


async def _ended_owners(db: Session, owners: Owners) -> list[str]:
    return [owner for owner in await _holders(db) if owners.has_ended(owner)]


async def _free(db: Session, owners: Owners, at: int) -> None:
    for owner in await _ended_owners(db, owners):
        await db.run(_FREE, owner, at)
