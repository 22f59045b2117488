"""Heartbeats, which wait for nobody.

An open `transaction()` may keep its run's row locked for as long as its step takes. A renewal of many leases would wait for that
one, and lose all. So it passes over rows that are locked and comes back to them a few times. One that stays locked is answered as
it stands, without being prolonged: as long as the lock is held nobody takes the run over, and the next heartbeat tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from perdure.backends.sql.connections import SqlConnections
from perdure.backends.sql.recording import fences_from, is_current
from perdure.backends.sql.session import Result, Session
from perdure.model.records import Lease, Pulse

Pulses: TypeAlias = dict[Lease, Pulse]

_PAUSES: Final = (0.0, 0.01, 0.03, 0.1, 0.2)  # seconds before each attempt


class _Current(NamedTuple):
    pulses: Pulses
    at: int


async def renew(
    connections: SqlConnections, namespace: str, leases: Sequence[Lease], length: int, now: int | None
) -> list[Pulse | None]:
    """Prolong each lease that is still current to `length` microseconds from now; None for each other."""
    pulses: Pulses = {}
    asked = list(leases)
    for pause in _PAUSES:
        if asked:
            await asyncio.sleep(pause)
            free, locked = await connections.perform(namespace, partial(_renew, leases=asked, length=length, now=now))
            pulses |= free | locked
            asked = list(locked)
    return [pulses.get(lease) for lease in leases]


async def _renew(db: Session, _: bool, *, leases: Sequence[Lease], length: int, now: int | None) -> tuple[Pulses, Pulses]:  # noqa: FBT001 - as all work
    return await renew_unlocked(db, leases, length, now)


async def renew_unlocked(
    db: Session, leases: Sequence[Lease], length: int, now: int | None, owner: str | None = None
) -> tuple[Pulses, Pulses]:
    """The leases that were prolonged, and those that are current but locked. With `owner` they become this owner's."""
    free = await _current(db, leases, "$for_change $skip_locked")
    if free.pulses:
        at = free.at if now is None else now
        await _prolong(db, [lease.run_id for lease in free.pulses], at, at + length, owner)
    others = [lease for lease in leases if lease not in free.pulses]
    return free.pulses, (await _current(db, others)).pulses if others else {}


async def _current(db: Session, leases: Sequence[Lease], lock: str = "") -> _Current:
    """Of these leases those that are current, with what their holders are told, and the time."""
    given = db.given()
    template = f"""
        SELECT id, epoch, lease_token, inbox_seq, cancel_requested, $clock FROM $runs
        WHERE namespace = ?1 AND {given.among("id", sorted({lease.run_id for lease in leases}))} ORDER BY id {lock}
    """
    (result,) = await db.send([db.statement(template, *given.values)])
    fences = fences_from(db.tables, Result([row[:-1] for row in result.rows], 0))
    pulses = {lease: fences[lease.run_id][2] for lease in leases if is_current(fences, lease)}
    return _Current(pulses, int(result.rows[0][-1]) if result.rows else 0)


async def _prolong(db: Session, run_ids: Sequence[str], at: int, until: int, owner: str | None) -> None:
    given = db.given()
    end, changed = given.one(until), given.one(at)
    owned = "" if owner is None else f", lease_owner = {given.one(owner)}"
    template = f"""
        UPDATE $runs SET lease_until = {end}, wake_at = {end}, updated_at = {changed}{owned}
        WHERE namespace = ?1 AND {given.among("id", run_ids)}
    """
    await db.run(template, *given.values)
