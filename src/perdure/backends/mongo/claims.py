"""Who drives a run: claiming, acquiring, renewing, releasing.

`claim` finds due runs by an index, takes them in one bulk of updates of which each succeeds only while its run is still due, and
reads back which it got: no run is given to two callers, and nobody waits for anybody. What it lost to another worker it makes up
for by looking again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.backends.base.leases import new_token
from perdure.backends.mongo import limits
from perdure.backends.mongo.documents import LARGE_COLUMNS, Document, lease_of, pulse_of, row_of
from perdure.backends.mongo.errors import TornError
from perdure.backends.mongo.expressions import Expression, either, freed, instant, is_due, is_leased, plus
from perdure.backends.mongo.inbox import NOT_ENDED
from perdure.backends.mongo.moving import filled
from perdure.backends.mongo.reading import by_key, in_time, inbox_of, item_counts, journal_of
from perdure.backends.mongo.schema import Collections, together
from perdure.backends.mongo.writes import fence
from perdure.errors import LeaseHeld, LeaseLost, RunNotFound
from perdure.model.records import Claim, Claims, Lease, Pulse

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

_ORDER: Final = [("priority", -1), ("wake_at", 1), ("_id", 1)]
_CANDIDATE: Final = dict.fromkeys(("generation", "queue", "limit_key"), 1)
_PULSE: Final = dict.fromkeys(("epoch", "token", "inbox_seq", "cancel_requested"), 1)


class Wanted(NamedTuple):
    """Which runs a worker takes, how many, and for how long. It is copied from what the caller passed in."""

    limit: int
    length: int
    owner: str
    workflows: list[str]
    queues: list[str] | None
    now: int | None

    @classmethod
    def of(
        cls, limit: int, length: int, owner: str, workflows: Collection[str], queues: Collection[str] | None, now: int | None
    ) -> Wanted:
        """The runs of these workflows in these queues, or in all."""
        return cls(max(limit, 0), length, owner, sorted(set(workflows)), None if queues is None else sorted(set(queues)), now)

    @property
    def conditions(self) -> Document:
        """What a run must be like, whatever the time."""
        queues = {} if self.queues is None else {"queue": {"$in": self.queues}}
        return {"workflow": {"$in": self.workflows}, **queues}


def _taking(length: int, owner: str, token: Expression, now: int | None) -> list[Expression]:
    """What leases a run, whoever had it before, and counts the attempt."""
    at = instant(now)
    until = {"$add": [at, length]}
    grew = {"$gt": ["$length", "$claimed_length"]}
    leased = {"token": token, "lease_owner": {"$literal": owner}, "lease_until": until, "wake_at": until}
    attempts = either(grew, 1, plus("attempts", 1))
    epoch = {"$max": [plus("epoch", 1), at]}
    changes = {"status": "running", "epoch": epoch, "attempts": attempts, "claimed_length": "$length", "updated_at": at}
    return [{"$set": freed(**leased, **changes)}]


async def claim(db: Collections, wanted: Wanted) -> Claims:
    """Lease due runs, and load what they recorded."""
    now = await db.clock(wanted.now)
    limited, soon = await together(limits.of_queues(db, wanted.queues), _next_wake_at(db, wanted, now))
    if limited:
        taken = await db.atomically(lambda session: _take_within(db, wanted, now, limited, session))
    else:
        taken = await _take(db, wanted, now)
    return Claims(claims=await load(db, taken), next_wake_at=soon)


async def _next_wake_at(db: Collections, wanted: Wanted, now: int) -> int | None:
    later = {**in_time(db, now), "wake_at": {"$gt": now}, **wanted.conditions}
    found = await db.runs.find_one(later, {"wake_at": 1}, sort=[("wake_at", 1)])
    return None if found is None else int(found["wake_at"])


async def _take(db: Collections, wanted: Wanted, now: int) -> list[Document]:
    taken: list[Document] = []
    missing = wanted.limit
    while missing > 0:
        due = {**in_time(db, now), **wanted.conditions}
        candidates = await db.runs.find(due, _CANDIDATE).sort(_ORDER).limit(missing).to_list()
        taken += await _take_these(db, candidates, wanted, now)
        # Fewer than asked for were all there are; what others took of them is theirs.
        missing = wanted.limit - len(taken) if len(candidates) == missing else 0
    return taken


async def _take_within(
    db: Collections, wanted: Wanted, now: int, limited: Sequence[Document], session: AsyncClientSession
) -> list[Document]:
    """As `_take`, with nobody else claiming from these queues meanwhile."""
    room = await limits.reserved(db, limited, now, session)
    due = {**in_time(db, now), **wanted.conditions, **room.conditions}
    candidates: list[Document] = []
    if wanted.limit:
        async for candidate in db.runs.find(due, _CANDIDATE, session=session).sort(_ORDER):
            if room.take(candidate["queue"], candidate["limit_key"]):
                candidates.append(candidate)
            if len(candidates) == wanted.limit:
                break
    return await _take_these(db, candidates, wanted, now, session)


async def _take_these(
    db: Collections, candidates: Iterable[Document], wanted: Wanted, now: int, session: AsyncClientSession | None = None
) -> list[Document]:
    """Those of the candidates that were leased, in their order."""
    from pymongo import UpdateOne

    tokens = {candidate["_id"]: candidate["generation"] + new_token() for candidate in candidates}
    if not tokens:
        return []
    still_due = in_time(db, now)
    takes = [
        UpdateOne({"_id": key, **still_due}, _taking(wanted.length, wanted.owner, token, now)) for key, token in tokens.items()
    ]
    await db.runs.bulk_write(takes, ordered=False, session=session)
    found = by_key(await db.runs.find({"_id": {"$in": list(tokens)}}, session=session).to_list())
    return [found[key] for key, token in tokens.items() if key in found and found[key]["token"] == token]


async def acquire(
    db: Collections, run_id: str, length: int, owner: str, secret: str, now: int | None, *, due_only: bool
) -> Claim | None:
    """Lease this run, or None when it has ended, lacks its input or (with `due_only`) is not due."""
    key, at = db.key(run_id), instant(now)
    is_free: list[Expression] = [{"$not": [is_leased(at)]}, *([is_due(at)] if due_only else [])]
    condition = {"_id": key, "held": False, **NOT_ENDED, "input_hash": {"$ne": b""}, "$expr": {"$and": is_free}}
    pipeline = _taking(length, owner, {"$concat": ["$generation", secret]}, now)
    while True:
        taken = await db.runs.find_one_and_update(condition, pipeline, return_document=True)
        found = taken or await db.runs.find_one({"_id": key})
        if found is None:
            raise RunNotFound(run_id)
        if (found["token"] or "").endswith(secret):  # taken now, or by an attempt whose reply was lost
            return await _load(db, found)
        if not _may_be_taken(found, await db.clock(now), due_only=due_only):
            return None


def _may_be_taken(found: Document, now: int, *, due_only: bool) -> bool:
    """Whether somebody was only faster. Raises `LeaseHeld`."""
    run = row_of(found)
    if run.ended:
        return False
    if run.held:
        raise LeaseHeld(run.id, "an operator, who put it on hold")
    if run.lease_until is not None and run.lease_until > now:
        raise LeaseHeld(run.id, run.lease_owner or "a live worker")
    return not run.lacks_input and (not due_only or (run.wake_at is not None and run.wake_at <= now))


async def renew(db: Collections, leases: Sequence[Lease], length: int, now: int | None) -> list[Pulse | None]:
    """Prolong each lease that is still current to `length` microseconds from now."""
    if not leases:
        return []
    at = instant(now)
    until = {"$add": [at, length]}
    pipeline: list[Expression] = [{"$set": {"lease_until": until, "wake_at": until, "updated_at": at}}]
    if len(leases) == 1:
        held = await db.runs.find_one_and_update(fence(db, leases[0]), pipeline, projection=_PULSE, return_document=True)
        return [None if held is None else pulse_of(held)]
    from pymongo import UpdateOne

    await db.runs.bulk_write([UpdateOne(fence(db, lease), pipeline) for lease in leases], ordered=False)
    found = by_key(await db.runs.find({"_id": {"$in": [db.key(lease.run_id) for lease in leases]}}, _PULSE).to_list())
    return [_pulse(found.get(db.key(lease.run_id)), lease) for lease in leases]


def _pulse(found: Document | None, lease: Lease) -> Pulse | None:
    is_current = found is not None and (found["epoch"], found["token"]) == (lease.epoch, lease.token)
    return pulse_of(found) if found is not None and is_current else None


async def release(db: Collections, lease: Lease, now: int | None, mark: str) -> None:
    """Give the run back, due at once, with its attempt."""
    at = instant(now)
    attempts = {"$max": [0, plus("attempts", -1)]}
    free = freed(status="pending", wake_at=at, updated_at=at, attempts=attempts, closed_by=mark)
    done = await db.runs.update_one(fence(db, lease), [{"$set": free}])
    if done.matched_count:
        return
    by_us = await db.runs.find_one({"_id": db.key(lease.run_id), "closed_by": mark}, {"_id": 1})
    if by_us is None:
        raise LeaseLost(lease.run_id, lease.epoch)


async def load(db: Collections, taken: Sequence[Document]) -> list[Claim]:
    """The claims for runs that were leased, without those that were deleted or replaced since."""
    loaded = [await _load(db, document) for document in taken]
    return [claim for claim in loaded if claim is not None]


async def _load(db: Collections, taken: Document) -> Claim | None:
    document: Document | None = taken
    while document is not None:
        try:
            return await _claim_of(db, document)
        except TornError:  # somebody moved a part of it; the lease is ours all the same
            still = {name: taken[name] for name in ("_id", "epoch", "token")}
            document = await db.runs.find_one(still)
    return None


async def _claim_of(db: Collections, document: Document) -> Claim:
    """The claim for a run that was leased, with everything that it recorded. Raises `TornError`."""
    await filled(db, [document], LARGE_COLUMNS)
    return Claim(
        lease=lease_of(document),
        run=row_of(document),
        journal=await journal_of(db, document),
        inbox=await inbox_of(db, document),
        inbox_seq=document["inbox_seq"],
        item_counts=await item_counts(db, document),
    )
