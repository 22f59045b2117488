"""Which worker drives a run: claiming, acquiring, renewing, releasing.

`claim` finds due runs by an index, takes them in one bulk of updates of which each succeeds only while its run is still due, and
reads back which ones it got: no run is leased twice, and no claim waits for another. For runs that another worker took it looks
again. A claim from queues with limits is a transaction, see `queues`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.backends.base.claim_rules import ClaimFilter, ClaimRequest, SuspectCounter, earliest
from perdure.backends.base.damaged_runs import UNREADABLE, problem_of, set_aside
from perdure.backends.base.leases import Release, new_token, refuse_leased
from perdure.backends.mongo.documents import (
    LARGE_COLUMNS,
    LEAST,
    Document,
    Expression,
    either,
    instant,
    is_due,
    is_leased,
    lease_columns,
    lease_of,
    literal,
    name_in,
    plus_sound,
    pulse_of,
    row_of,
    same_run,
)
from perdure.backends.mongo.errors import TornError
from perdure.backends.mongo.inbox import NOT_ENDED
from perdure.backends.mongo.overflow import load_payloads
from perdure.backends.mongo.queues import find_limited, known_limits, lock_queues, room_condition, set_last_starts
from perdure.backends.mongo.reading import by_key, due_condition, inbox_of, item_counts, journal_of
from perdure.backends.mongo.schema import Collections
from perdure.backends.mongo.writes import fence
from perdure.errors import LeaseHeld, LeaseLost, RunNotFound, SnapshotCorrupt
from perdure.model.records import NO_PROBLEM, SUSPECT_ATTEMPTS, Claim, Claims, Lease, Pulse

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

_ORDER: Final = [("priority", -1), ("wake_at", 1), ("_id", 1)]
_CANDIDATE: Final = dict.fromkeys(("incarnation", "journal", "queue", "limit_key", "status", "attempts", "epoch"), 1)
_SUSPECT: Final[Document] = {"status": "running", "attempts": {"$gte": SUSPECT_ATTEMPTS}}
_PULSE: Final = dict.fromkeys(("epoch", "token", "inbox_seq", "cancel_requested"), 1)


def _lease_pipeline(length: int, owner: str, token: Expression, now: int | None) -> list[Expression]:
    """The update that leases a run, whether or not it was leased before, and counts the attempt."""
    at = instant(now)
    until = {"$add": [at, length]}
    grew = {"$gt": ["$length", "$claimed_length"]}
    leased = {"token": token, "lease_owner": {"$literal": owner}, "lease_until": until, "wake_at": until}
    attempts = either(grew, 1, plus_sound("attempts", 1))
    epoch = {"$max": [plus_sound("epoch", 1), at]}
    changes = {"status": "running", "epoch": epoch, "attempts": attempts, "claimed_length": "$length", "updated_at": at}
    return [{"$set": lease_columns(**leased, **changes)}]


async def claim(db: Collections, request: ClaimRequest) -> Claims:
    """Lease due runs, and load what they recorded."""
    now = await db.clock(request.now)
    limited, next_wake_at = await asyncio.gather(find_limited(db, request.filter.queues), _next_wake_at(db, request, now))
    if limited:
        taken, next_start_at, now = await db.run_transaction(lambda session: _take_limited(db, request, limited, session))
        next_wake_at = earliest(next_wake_at, next_start_at)
    else:
        taken = await _take(db, request, now)
    return Claims(claims=await load(db, taken, now), next_wake_at=next_wake_at, now=now)


async def see_nothing_due(db: Collections, request: ClaimRequest) -> Claims | None:
    """The empty reply to a claim when no run of any workflow is due, found with one query; None when one may be."""
    clock: Document = {"$project": {"now": {"$toLong": "$$NOW"}}}  # in milliseconds
    may_wake: Document = {"namespace": db.namespace, "held": False, "wake_at": {"$gte": LEAST}}
    earliest: list[Document] = [{"$match": may_wake}, {"$sort": {"wake_at": 1}}, {"$limit": 1}, {"$project": {"wake_at": 1}}]
    add_earliest: Document = {"$unionWith": {"coll": db.runs.name, "pipeline": earliest}}
    found = await (await db.meta.aggregate([{"$match": {"_id": "schema"}}, clock, add_earliest])).to_list()
    now = request.now if request.now is not None else next((one["now"] * 1000 for one in found if "now" in one), None)
    wake_at = next((one["wake_at"] for one in found if "wake_at" in one), None)
    if now is None or (wake_at is not None and wake_at <= now):
        return None
    return Claims(claims=[], next_wake_at=wake_at, now=now)


async def _next_wake_at(db: Collections, request: ClaimRequest, now: int) -> int | None:
    later = {**due_condition(db, now), "wake_at": {"$gt": now}, **_filter_condition(request.filter)}
    found = await db.runs.find_one(later, {"wake_at": 1}, sort=[("wake_at", 1)])
    return None if found is None else int(found["wake_at"])


async def _take(db: Collections, request: ClaimRequest, now: int) -> list[Document]:
    taken: list[Document] = []
    missing, suspects = request.limit, SuspectCounter(request.suspects)
    while missing > 0:
        due = {**due_condition(db, now), **_filter_condition(request.filter)}
        if not suspects.has_room:  # they must not fill the page
            due = {"$and": [due, {"$nor": [_SUSPECT]}]}
        found = await db.runs.find(due, _CANDIDATE).sort(_ORDER).limit(missing).to_list()
        taken += await _take_these(db, [one for one in found if suspects.take(is_suspect=_is_suspect(one))], request, now)
        # Fewer than asked for are all that were due, also when another worker took some of them.
        missing = request.limit - len(taken) if len(found) == missing else 0
    return taken


def _is_suspect(candidate: Document) -> bool:
    attempts = candidate["attempts"]
    return candidate["status"] == "running" and isinstance(attempts, int) and attempts >= SUSPECT_ATTEMPTS


async def _take_limited(
    db: Collections, request: ClaimRequest, limited: Sequence[str], session: AsyncClientSession
) -> tuple[list[Document], int | None, int]:
    """As `_take`, while no other claim from these queues is under way; also when a rate lets the next run start, and the time."""
    counter, now = await lock_queues(db, limited, request.now, session)
    suspects = SuspectCounter(request.suspects)
    candidates: list[Document] = []
    missing = request.limit
    while missing > 0:
        kept_back = [*room_condition(counter, limited), *([] if suspects.has_room else [_SUSPECT])]
        seen = {"_id": {"$nin": [candidate["_id"] for candidate in candidates]}}
        due = {"$and": [{**due_condition(db, now), **_filter_condition(request.filter)}, {"$nor": kept_back}, seen]}
        page = await db.runs.find(due, _CANDIDATE, session=session).sort(_ORDER).limit(missing).to_list()
        for candidate in page:
            is_suspect = _is_suspect(candidate)
            if not suspects.take(is_suspect=is_suspect):
                continue
            if counter.take(candidate["queue"], candidate["limit_key"], is_start=candidate["epoch"] == 0):
                candidates.append(candidate)
            else:
                suspects.give_back(is_suspect=is_suspect)
        # What was passed over in a full page is full or spent now, and left out of the next one.
        missing = request.limit - len(candidates) if len(page) == missing else 0
    taken = await _take_these(db, candidates, request, now, session)
    await set_last_starts(db, counter, now, session)
    for queue in limited:  # whether a run waits there is not looked up
        if not counter.may_start(queue):
            counter.hold_back(queue)
    return taken, counter.next_start_at(), now


async def _take_these(
    db: Collections, candidates: Iterable[Document], request: ClaimRequest, now: int, session: AsyncClientSession | None = None
) -> list[Document]:
    """Those of the candidates that were leased, in their order."""
    from pymongo import UpdateOne

    # A token has the incarnation and the journal of its run, so both must be what they were.
    seen = {candidate["_id"]: (candidate["incarnation"], candidate["journal"]) for candidate in candidates}
    tokens = {key: incarnation + journal + new_token() for key, (incarnation, journal) in seen.items()}
    if not tokens:
        return []
    still_due = due_condition(db, now)
    takes = [
        UpdateOne(
            same_run(key, seen[key][0], journal=seen[key][1], **still_due),
            _lease_pipeline(request.length, request.owner, token, now),
        )
        for key, token in tokens.items()
    ]
    await db.runs.bulk_write(takes, ordered=False, session=session)
    found = by_key(await db.runs.find({"_id": {"$in": list(tokens)}}, session=session).to_list())
    return [found[key] for key, token in tokens.items() if key in found and found[key]["token"] == token]


async def acquire(
    db: Collections, run_id: str, length: int, owner: str, secret: str, now: int | None, *, due_only: bool
) -> Claim | None:
    """Lease this run, or None when it has ended, lacks its input, has no room in its queue or (with `due_only`) is not due."""
    key, at = db.key(run_id), instant(now)
    is_free: list[Expression] = [{"$not": [is_leased(at)]}, *([is_due(at)] if due_only else [])]
    condition = {"_id": key, "held": False, **NOT_ENDED, "input_hash": {"$ne": b""}}
    pipeline = _lease_pipeline(length, owner, {"$concat": ["$incarnation", "$journal", secret]}, now)
    known = await known_limits(db)
    unlimited = {"queue": {"$nin": sorted(known.queues)}, "$expr": {"$and": [*is_free, known.is_current]}}
    taken = await db.runs.find_one_and_update({**condition, **unlimited}, pipeline, return_document=True)
    while True:
        found = taken or await db.runs.find_one({"_id": key})
        if found is None:
            raise RunNotFound(run_id)
        if (found["token"] or "").endswith(secret):  # taken now, or by an attempt whose reply was lost
            return await _load_or_set_aside(db, found, await db.clock(now))
        if not _may_be_taken(found, await db.clock(now), due_only=due_only):
            return None
        lease = _SingleLease(found["queue"], found["limit_key"], {**condition, "$expr": {"$and": is_free}}, pipeline, now)
        has_room, taken = await db.run_transaction(partial(_take_in_queue, db, lease, is_start=found["epoch"] == 0))
        if not has_room:
            return None


class _SingleLease(NamedTuple):
    """The update that leases one run of this queue and limit key."""

    queue: str
    limit_key: str | None
    condition: Document
    pipeline: list[Expression]
    now: int | None


async def _take_in_queue(
    db: Collections, lease: _SingleLease, session: AsyncClientSession, *, is_start: bool
) -> tuple[bool, Document | None]:
    """Whether the queue has room for the run, and its document if it was leased: another write may have come between."""
    counter, at = await lock_queues(db, [lease.queue], lease.now, session)
    if not counter.take(lease.queue, lease.limit_key, is_start=is_start):
        return False, None
    taken = await db.runs.find_one_and_update(lease.condition, lease.pipeline, return_document=True, session=session)
    if taken is not None:
        await set_last_starts(db, counter, at, session)
    return True, taken


def _may_be_taken(found: Document, now: int, *, due_only: bool) -> bool:
    """Whether the run may be leased after all: another write came between. Raises `LeaseHeld`."""
    run = row_of(found)
    if run.ended:
        return False
    if run.held:
        raise LeaseHeld.by_operator(run.id)
    refuse_leased(run, now)
    return not run.lacks_input and (not due_only or (run.wake_at is not None and run.wake_at <= now))


async def renew(
    db: Collections, leases: Sequence[Lease], length: int, running_steps: Mapping[Lease, bytes], now: int | None
) -> list[Pulse | None]:
    """Prolong each lease that is still current to `length` microseconds from now."""
    if not leases:
        return []
    at = instant(now)
    until = {"$add": [at, length]}

    def pipeline(lease: Lease) -> list[Expression]:
        steps = literal(running_steps.get(lease))
        return [{"$set": {"lease_until": until, "wake_at": until, "updated_at": at, "running_steps": steps}}]

    if len(leases) == 1:
        (lease,) = leases
        held = await db.runs.find_one_and_update(fence(db, lease), pipeline(lease), projection=_PULSE, return_document=True)
        return [None if held is None else pulse_of(held)]
    from pymongo import UpdateOne

    await db.runs.bulk_write([UpdateOne(fence(db, lease), pipeline(lease)) for lease in leases], ordered=False)
    found = by_key(await db.runs.find({"_id": {"$in": [db.key(lease.run_id) for lease in leases]}}, _PULSE).to_list())
    return [_pulse(found.get(db.key(lease.run_id)), lease) for lease in leases]


def _pulse(found: Document | None, lease: Lease) -> Pulse | None:
    is_current = found is not None and (found["epoch"], found["token"]) == (lease.epoch, lease.token)
    return pulse_of(found) if found is not None and is_current else None


async def release(db: Collections, lease: Lease, release: Release, now: int | None, mark: str) -> None:
    """Give the run back, due at once or later."""
    at = instant(now)
    free = lease_columns(status="pending", updated_at=at, closed_by=mark, **_release_columns(release, at))
    done = await db.runs.update_one(fence(db, lease), [{"$set": free}])
    if done.matched_count:
        return
    by_us = await db.runs.find_one({"_id": db.key(lease.run_id), "closed_by": mark}, {"_id": 1})
    if by_us is None:
        raise LeaseLost(lease.run_id, lease.epoch)


def _release_columns(release: Release, at: Expression) -> dict[str, Expression]:
    """The columns that giving up a lease changes, but for the lease itself."""
    columns: dict[str, Expression] = {**NO_PROBLEM, "wake_at": at if release.wake_at is None else literal(release.wake_at)}
    if not release.counts_attempt:
        columns["attempts"] = {"$max": [0, plus_sound("attempts", -1)]}
    if release.problem is not None:
        columns |= {"problem": literal(release.problem), "problem_at": at, "problem_count": plus_sound("problem_count", 1)}
    return columns


async def load(db: Collections, taken: Sequence[Document], now: int) -> list[Claim]:
    """The claims for runs that were leased, without those that were deleted or replaced since, and those that are damaged."""
    claims: list[Claim] = []
    for document in taken:
        with suppress(SnapshotCorrupt):
            claim = await _load_or_set_aside(db, document, now)
            claims += [] if claim is None else [claim]
    return claims


async def _load_or_set_aside(db: Collections, taken: Document, now: int) -> Claim | None:
    """As `_load`. A run that cannot be read is set aside, and `SnapshotCorrupt` is raised."""
    try:
        return await _load(db, taken)
    except UNREADABLE as reason:
        problem = problem_of(name_in(taken["_id"]), "the journal or the inbox", reason)
        free = lease_columns(status="pending", updated_at=literal(now), **_release_columns(set_aside(problem, now), literal(now)))
        await db.runs.update_one({"_id": taken["_id"], "token": taken["token"]}, [{"$set": free}])
        raise problem from reason


async def _load(db: Collections, taken: Document) -> Claim | None:
    document: Document | None = taken
    while document is not None:
        try:
            return await _claim_of(db, document)
        except TornError:  # a part of it was moved meanwhile; the lease is ours all the same
            still = {name: taken[name] for name in ("_id", "epoch", "token")}
            document = await db.runs.find_one(still)
    return None


async def _claim_of(db: Collections, document: Document) -> Claim:
    """The claim for a run that was leased, with everything that it recorded. Raises `TornError`."""
    await load_payloads(db, [document], LARGE_COLUMNS)
    if type(document["inbox_seq"]) is not int:
        raise ValueError(f"inbox_seq is of type {type(document['inbox_seq']).__name__}")
    return Claim(
        lease=lease_of(document),
        run=row_of(document),
        journal=await journal_of(db, document),
        inbox=await inbox_of(db, document),
        inbox_seq=document["inbox_seq"],
        item_counts=await item_counts(db, document),
    )


def _filter_condition(claim_filter: ClaimFilter) -> Document:
    """The condition that a run is of these workflows in these versions, and in these queues."""
    queues = {} if claim_filter.queues is None else {"queue": {"$in": list(claim_filter.queues)}}
    versions: dict[int, list[str]] = {}
    for workflow, version in claim_filter.workflows:
        versions.setdefault(version, []).append(workflow)
    of_version = [{"workflow": {"$in": names}, "version": version} for version, names in sorted(versions.items())]
    if len(of_version) == 1:  # as nearly always
        return {**of_version[0], **queues}
    return {"$or": of_version, **queues} if of_version else {"workflow": {"$in": []}}
