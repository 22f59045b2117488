"""Creating, restoring, reopening and deleting runs, and the verbs of operators: cancel, hold, purge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.backends.base.batching import Reply
from perdure.backends.base.leases import new_token, refuse_leased
from perdure.backends.base.new_runs import new_row, row_after_create, row_after_restore
from perdure.backends.mongo.claims import acquire
from perdure.backends.mongo.documents import (
    FIRST_JOURNAL,
    HAS_PROBLEM,
    LARGE_COLUMNS,
    ROW_ONLY,
    Document,
    Expression,
    KnownLimits,
    append_to,
    earliest,
    either,
    entry_document,
    instant,
    is_leased,
    lease_columns,
    lease_of,
    literal,
    plus,
    row_of,
    run_document,
    same_run,
    weight,
)
from perdure.backends.mongo.errors import has_only_duplicates
from perdure.backends.mongo.inbox import NOT_ENDED
from perdure.backends.mongo.overflow import (
    delete_overflow,
    inline_or_reference,
    journal_stem_in,
    load_payloads,
    spilled_flag,
    split_document,
    store_payloads,
)
from perdure.backends.mongo.queues import known_limits
from perdure.backends.mongo.reading import by_key
from perdure.backends.mongo.schema import Collections
from perdure.errors import LeaseHeld, RunFinished, RunNotFound
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import ENDED, NO_PROBLEM, Claim, Created, EndStatus, NewRun, RunRow, Signal

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

_OVERFLOW: Final = {"incarnation": 1, "is_spilled": 1}
_LACKS_INPUT: Final = {"$eq": ["$input_hash", literal(b"")]}
_OF_INPUT: Final = (
    "workflow", "version", "input_hash", "first_input_hash", "definition_hash", "queue", "priority", "limit_key", "start_at",
    "deadline", "parent_id", "parent_key", "wake_at", "updated_at",
)  # fmt: skip


class RunInsert(NamedTuple):
    """A run to be created, and with `length` to be leased at once."""

    run: NewRun
    length: int | None
    owner: str
    entries: Sequence[Entry]
    inbox: Sequence[Signal]
    created_at: int | None
    now: int | None
    incarnation: str
    secret: str

    @property
    def written_rows(self) -> list[str]:
        """A bulk creates a run once."""
        return [self.run.id]

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        return len(self.run.input) + len(self.run.metadata) + weight(self.entries) + weight(self.inbox) + 1000

    def document(self, namespace: str) -> Document:
        """The run's document without the columns of `_server_time_columns`."""
        row = new_row(self.run, 0, self.created_at)
        return run_document(namespace, row, self.incarnation, self.entries, self.inbox)


def run_insert(
    run: NewRun,
    length: int | None,
    owner: str,
    entries: Sequence[Entry],
    inbox: Sequence[Signal],
    created_at: int | None,
    now: int | None,
) -> RunInsert:
    """The insert of this run. Sent again, it inserts the same one."""
    return RunInsert(run, length, owner, entries, inbox, created_at, now, new_token(), new_token())


def _server_time_columns(insert: RunInsert) -> dict[str, Expression]:
    """The columns of a new run that depend on the server's clock."""
    at, start_at = instant(insert.now), insert.run.start_at
    columns: dict[str, Expression] = {"updated_at": at, "wake_at": at if start_at is None else literal(start_at)}
    if insert.created_at is None:
        columns["created_at"] = at
    return columns


def _first_lease(insert: RunInsert, length: int) -> dict[str, Expression]:
    """The columns of a new run that is leased at once."""
    at = instant(insert.now)
    until = {"$add": [at, length]}
    columns = {"status": "running", "attempts": 1, "epoch": at, "claimed_length": len(insert.entries)}
    columns |= {"token": insert.incarnation + FIRST_JOURNAL + insert.secret, "lease_owner": literal(insert.owner)}
    return columns | {"lease_until": until, "wake_at": until}


def _insert_pipeline(document: Document, insert: RunInsert, known: KnownLimits | None = None) -> list[Expression]:
    """The update that inserts the run's document, or leaves the existing one as it is.

    It gives the lease that was asked for only while it is known that the queue has no limits.
    """
    is_missing = {"$eq": [{"$type": "$incarnation"}, "missing"]}
    parts: list[Expression] = [literal(document), _server_time_columns(insert)]
    if insert.length is not None and known is not None and insert.run.queue not in known.queues:
        parts.append(either(known.is_current, _first_lease(insert, insert.length), literal({})))
    return [{"$replaceWith": either(is_missing, {"$mergeObjects": parts}, "$$ROOT")}]


async def create_all(db: Collections, inserts: Sequence[RunInsert]) -> list[Reply[Created | None]]:
    """Insert the runs that do not exist; None for each that does. No two have the same id."""
    documents = [await split_document(db, insert.document(db.namespace)) for insert in inserts]
    known = await known_limits(db) if any(insert.length is not None for insert in inserts) else None
    found = await _insert_all(db, inserts, documents, known)
    replies: list[Reply[Created | None]] = []
    for insert, document in zip(inserts, documents, strict=True):
        stored = found.get(document["_id"])
        is_new = stored is not None and stored["incarnation"] == insert.incarnation
        if not is_new:
            await delete_overflow(db, document)
        replies.append(await _created_from(db, insert, stored, known) if stored is not None and is_new else None)
    return replies


async def _insert_all(
    db: Collections, inserts: Sequence[RunInsert], documents: Sequence[Document], known: KnownLimits | None
) -> dict[str, Document]:
    """The runs that exist afterwards, by key."""
    from pymongo import UpdateOne
    from pymongo.errors import BulkWriteError

    if len(inserts) == 1:
        stored = await db.runs.find_one_and_update(
            {"_id": documents[0]["_id"]},
            _insert_pipeline(documents[0], inserts[0], known),
            projection=ROW_ONLY,
            upsert=True,
            return_document=True,
        )
        return {} if stored is None else {stored["_id"]: stored}
    pairs = zip(documents, inserts, strict=True)
    try:
        upserts = [UpdateOne({"_id": one["_id"]}, _insert_pipeline(one, insert, known), upsert=True) for one, insert in pairs]
        await db.runs.bulk_write(upserts, ordered=False)
    except BulkWriteError as error:
        if not has_only_duplicates(error):  # else another process created one of them meanwhile
            raise
    return by_key(await db.runs.find({"_id": {"$in": [one["_id"] for one in documents]}}, ROW_ONLY).to_list())


async def _created_from(db: Collections, insert: RunInsert, stored: Document, known: KnownLimits | None) -> Created:
    columns = {name: getattr(insert.run, name) for name in ("input", "metadata")}  # the document may have references to them
    run = row_of(stored | columns)
    if insert.length is None or (known is not None and insert.run.queue in known.queues):
        return Created(run=run, is_new=True)
    if stored["token"] is None:
        return await _lease_late(db, insert, insert.length, run)
    claim = Claim(
        lease=lease_of(stored),
        run=run,
        journal=list(insert.entries),
        inbox=list(insert.inbox),
        inbox_seq=stored["inbox_seq"],
        item_counts={},
    )
    return Created(run=run, is_new=True, claim=claim)


async def _lease_late(db: Collections, insert: RunInsert, length: int, run: RunRow) -> Created:
    """The new run, leased now: what was known of its queue had expired when the server inserted it."""
    claim = None
    with suppress(LeaseHeld, RunNotFound):
        claim = await acquire(db, run.id, length, insert.owner, insert.secret, insert.now, due_only=False)
    return Created(run=run if claim is None else claim.run, is_new=True, claim=claim)


async def find(db: Collections, insert: RunInsert) -> Created | None:
    """The run that exists, which gets its input if it lacked that; None when it was deleted. Raises `RunConflict`."""
    while True:
        document = await db.runs.find_one({"_id": db.key(insert.run.id)}, ROW_ONLY)
        if document is None:
            return None
        found = row_of((await load_payloads(db, [document], LARGE_COLUMNS))[0])
        now = await db.clock(insert.now) if found.lacks_input else 0
        run = row_after_create(found, insert.run, now)
        if run is found or await _bring_input(db, document, run):
            return Created(run=run, is_new=False)


async def _bring_input(db: Collections, found: Document, run: RunRow) -> bool:
    """Whether the run, which lacked its input, was still as it was found and has its input now."""
    stem = journal_stem_in(found)
    await store_payloads(db, [(stem, run.input)])
    values = {name: getattr(run, name) for name in _OF_INPUT}
    as_found = {name: found[name] for name in ("status", "cancel_requested", "input_hash", "epoch")}
    condition = same_run(found["_id"], found["incarnation"], **as_found)
    done = await db.runs.update_one(
        condition, {"$set": {**values, "input": inline_or_reference(stem, run.input), **spilled_flag(run.input)}}
    )
    return bool(done.matched_count)


async def insert_run(db: Collections, insert: RunInsert, document: Document, session: AsyncClientSession) -> None:
    """Insert the run in this transaction, unless it exists."""
    await db.runs.update_one({"_id": document["_id"]}, _insert_pipeline(document, insert), upsert=True, session=session)


async def restore(db: Collections, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal], now: int | None) -> None:
    """Put this whole run in place of the one that exists, if any. Raises `LeaseHeld`."""
    incarnation, key = new_token(), db.key(run.id)
    while True:
        found = await db.runs.find_one({"_id": key}, ROW_ONLY)
        at = await db.clock(now)
        before = None if found is None else row_of(found)
        if before is not None:
            refuse_leased(before, at)
        row = row_after_restore(run, inbox, before, at)
        document = await split_document(db, run_document(db.namespace, row, incarnation, entries, inbox))
        if await _replace(db, found, document):
            return


async def _replace(db: Collections, found: Document | None, document: Document) -> bool:
    """Whether the document was stored, in place of the one that was found."""
    from pymongo.errors import DuplicateKeyError

    if found is None:
        try:
            await db.runs.insert_one(document)
        except DuplicateKeyError:
            return await db.runs.find_one(same_run(document["_id"], document["incarnation"]), {"_id": 1}) is not None
        return True
    as_found = {name: found[name] for name in ("epoch", "token", "lease_until", "held")}
    done = await db.runs.replace_one(same_run(found["_id"], found["incarnation"], **as_found), document)
    if done.matched_count:
        await delete_overflow(db, found)
    return bool(done.matched_count)


async def reopen(db: Collections, run_id: str, drop: Collection[str], now: int | None, mark: str) -> None:
    """Make an ended run pending again. Raises `RunNotFound`, `RunFinished`, `LeaseHeld`."""
    while True:
        found = await db.runs.find_one({"_id": db.key(run_id)})
        if found is None:
            raise RunNotFound(run_id)
        if found["last_write"] == mark:
            return  # it was done before, and the reply was lost
        if found["status"] == "completed":
            raise RunFinished(run_id, "completed")
        if found["status"] not in ENDED:
            raise LeaseHeld.by_attempt(run_id, found["status"])
        if await _reopen(db, found, drop, await db.clock(now), mark):
            return


async def _reopen(db: Collections, found: Document, drop: Collection[str], now: int, mark: str) -> bool:
    epoch = max(found["epoch"] + 1, now)
    last = max([found["steps_top"], *(entry["seq"] for entry in found["tail"])])
    entry = drop_entry(last + 1, drop, now, epoch)
    appending = {
        "tail": append_to("tail", [entry_document(entry)]),
        "length": plus("length", 1),
        "weight": plus("weight", weight([entry])),
    }
    pending = lease_columns(status="pending", epoch=epoch, attempts=0, updated_at=now, last_write=mark)
    withdrawn = {"outcome": None, "cancel_requested": False, "parent_notified": False, **NO_PROBLEM}
    wake_at = either(_LACKS_INPUT, None, now)
    as_found = same_run(found["_id"], found["incarnation"], status=found["status"], epoch=found["epoch"], moves=found["moves"])
    done = await db.runs.update_one(as_found, [{"$set": {**pending, **withdrawn, **appending, "wake_at": wake_at}}])
    return bool(done.matched_count)


async def cancel(db: Collections, run_id: str, now: int | None) -> None:
    """Ask the run to stop, and make it due if it is not leased. Raises `RunNotFound`, `RunFinished`."""
    at = instant(now)
    stays = {"$or": [is_leased(at), _LACKS_INPUT]}
    changes = {"cancel_requested": True, "wake_at": either(stays, "$wake_at", earliest("wake_at", at))}
    done = await db.runs.update_one({"_id": db.key(run_id), **NOT_ENDED}, [{"$set": changes}])
    if not done.matched_count:
        found = await db.runs.find_one({"_id": db.key(run_id)}, {"status": 1})
        raise RunNotFound(run_id) if found is None else RunFinished(run_id, found["status"])


async def hold(db: Collections, run_id: str) -> None:
    """Keep the run from being driven. Raises `RunNotFound`."""
    done = await db.runs.update_one({"_id": db.key(run_id)}, {"$set": {"held": True}})
    if not done.matched_count:
        raise RunNotFound(run_id)


async def unhold(db: Collections, run_id: str, now: int | None) -> None:
    """Let the run be driven again; one that is pending with a problem is due at once. Raises `RunNotFound`."""
    changes = {"held": False, "wake_at": either(HAS_PROBLEM, earliest("wake_at", instant(now)), "$wake_at")}
    done = await db.runs.update_one({"_id": db.key(run_id)}, [{"$set": changes}])
    if not done.matched_count:
        raise RunNotFound(run_id)


async def delete(db: Collections, run_id: str) -> None:
    """Remove the run and everything of it."""
    found = await db.runs.find_one_and_delete({"_id": db.key(run_id)}, _OVERFLOW)
    if found is not None:
        await delete_overflow(db, found)


async def purge(
    db: Collections, older_than: int, status: Collection[EndStatus], workflow: str | None, limit: int, now: int | None
) -> int:
    """Delete ended runs that were not changed for `older_than` microseconds, oldest first, and say how many."""
    if limit <= 0:
        return 0
    last = await db.clock(now) - older_than
    is_old: Document = {"namespace": db.namespace, "status": {"$in": sorted(status)}, "updated_at": {"$lte": last}}
    if workflow is not None:
        is_old["workflow"] = workflow
    found: list[Document] = []
    for one in sorted(status):  # one by one: read backwards, the server does not merge them by the index
        found += await _oldest(db, {**is_old, "status": one}, limit)
    found.sort(key=itemgetter("updated_at"))
    return await _delete_all(db, found[:limit], is_old)


async def _oldest(db: Collections, wanted: Document, limit: int) -> list[Document]:
    """The runs that were not changed for the longest time, without those whose parent has not ended."""
    found: list[Document] = []
    is_live: dict[str, bool] = {}  # by parent
    seen = 0
    while len(found) < limit:
        cursor = db.runs.find(wanted, {**_OVERFLOW, "updated_at": 1, "parent_id": 1}).sort([("updated_at", 1), ("_id", -1)])
        page = await cursor.skip(seen).limit(limit).to_list()
        for parent_id in {one["parent_id"] for one in page} - {None, *is_live}:
            is_live[parent_id] = await _is_live(db, parent_id)
        found += [one for one in page if not is_live.get(one["parent_id"], False)]
        if len(page) < limit:
            break
        seen += limit
    return found


async def _is_live(db: Collections, run_id: str) -> bool:
    return await db.runs.find_one({"_id": db.key(run_id), "status": {"$nin": sorted(ENDED)}}, {"_id": 1}) is not None


async def _delete_all(db: Collections, found: Sequence[Document], still: Document) -> int:
    from pymongo import DeleteOne

    if not found:
        return 0
    deletes = [DeleteOne({**still, **same_run(one["_id"], one["incarnation"])}) for one in found]
    done = await db.runs.bulk_write(deletes, ordered=False)
    spilled = [one for one in found if one["is_spilled"]]
    left = by_key(await db.runs.find({"_id": {"$in": [one["_id"] for one in spilled]}}, _OVERFLOW).to_list()) if spilled else {}
    for one in spilled:
        if left.get(one["_id"], {}).get("incarnation") != one["incarnation"]:
            await delete_overflow(db, one)
    return int(done.deleted_count)
