"""How runs begin, are replaced and removed, and what operators ask of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from perdure.backends.base.batching import Reply
from perdure.backends.base.leases import new_token
from perdure.backends.base.new_runs import found_row, new_row, restored_row
from perdure.backends.mongo.documents import (
    LARGE_COLUMNS,
    PARTS,
    Document,
    entry_document,
    lease_of,
    row_of,
    run_document,
    weight,
)
from perdure.backends.mongo.errors import has_only_duplicates
from perdure.backends.mongo.expressions import Expression, appended, earlier, either, freed, instant, is_leased, literal, plus
from perdure.backends.mongo.inbox import NOT_ENDED
from perdure.backends.mongo.moving import column, filled, put_payloads, spill, spilling, stem_in, sweep
from perdure.backends.mongo.names import in_place
from perdure.backends.mongo.reading import by_key
from perdure.backends.mongo.schema import Collections
from perdure.errors import LeaseHeld, RunFinished, RunNotFound
from perdure.model.journal import Entry, drop_entry
from perdure.model.records import ENDED, Claim, Created, NewRun, RunRow, Signal

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

_LEFT_OVER: Final = {"generation": 1, "is_spilled": 1}
_LACKS_INPUT: Final = {"$eq": ["$input_hash", literal(b"")]}
_OF_INPUT: Final = (
    "workflow", "input_hash", "definition_hash", "queue", "priority", "limit_key", "start_at", "deadline",
    "parent_id", "parent_key", "wake_at", "updated_at",
)  # fmt: skip


class Begin(NamedTuple):
    """A run to be created, and with `length` to be leased at once."""

    run: NewRun
    length: int | None
    owner: str
    entries: Sequence[Entry]
    inbox: Sequence[Signal]
    created_at: int | None
    now: int | None
    generation: str
    secret: str

    @property
    def written_rows(self) -> list[str]:
        """A run is created once in a bulk."""
        return [self.run.id]

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        return len(self.run.input) + len(self.run.metadata) + weight(self.entries) + weight(self.inbox) + 1000

    def document(self, namespace: str) -> Document:
        """The run's document, in which `_timed` is still missing."""
        row = new_row(self.run, 0, self.created_at)
        return run_document(namespace, row, self.generation, self.entries, self.inbox)


def begin(
    run: NewRun,
    length: int | None,
    owner: str,
    entries: Sequence[Entry],
    inbox: Sequence[Signal],
    created_at: int | None,
    now: int | None,
) -> Begin:
    """What creates this run. It makes the same one however often it is sent."""
    return Begin(run, length, owner, entries, inbox, created_at, now, new_token(), new_token())


def _timed(begin: Begin) -> dict[str, Expression]:
    """What of a new run's document the server's clock says."""
    at, start_at = instant(begin.now), begin.run.start_at
    columns: dict[str, Expression] = {"updated_at": at, "wake_at": at if start_at is None else literal(start_at)}
    if begin.created_at is None:
        columns["created_at"] = at
    if begin.length is not None:
        until = {"$add": [at, begin.length]}
        columns |= {"status": "running", "attempts": 1, "epoch": at, "claimed_length": len(begin.entries)}
        columns |= {"token": begin.generation + begin.secret, "lease_owner": literal(begin.owner)}
        columns |= {"lease_until": until, "wake_at": until}
    return columns


def _insertion(document: Document, begin: Begin) -> list[Expression]:
    """What makes the run's document, or leaves the one that is there as it is."""
    is_missing = {"$eq": [{"$type": "$generation"}, "missing"]}
    made = {"$mergeObjects": [literal(document), _timed(begin)]}
    return [{"$replaceWith": either(is_missing, made, "$$ROOT")}]


async def create_all(db: Collections, begins: Sequence[Begin]) -> list[Reply[Created | None]]:
    """Insert the runs that are not there; None for each that is. No two have one id."""
    documents = [await spill(db, begin.document(db.namespace)) for begin in begins]
    found = await _insert_all(db, begins, documents)
    answers: list[Reply[Created | None]] = []
    for begin, document in zip(begins, documents, strict=True):
        made = found.get(document["_id"])
        is_new = made is not None and made["generation"] == begin.generation
        if not is_new:
            await sweep(db, document)
        answers.append(_created(begin, made) if made is not None and is_new else None)
    return answers


async def _insert_all(db: Collections, begins: Sequence[Begin], documents: Sequence[Document]) -> dict[str, Document]:
    """What is there afterwards, by key."""
    from pymongo import UpdateOne
    from pymongo.errors import BulkWriteError

    if len(begins) == 1:
        made = await db.runs.find_one_and_update(
            {"_id": documents[0]["_id"]}, _insertion(documents[0], begins[0]), projection=PARTS, upsert=True, return_document=True
        )
        return {} if made is None else {made["_id"]: made}
    pairs = zip(documents, begins, strict=True)
    try:
        upserts = [UpdateOne({"_id": one["_id"]}, _insertion(one, begin), upsert=True) for one, begin in pairs]
        await db.runs.bulk_write(upserts, ordered=False)
    except BulkWriteError as error:
        if not has_only_duplicates(error):  # somebody created one of them at this moment
            raise
    return by_key(await db.runs.find({"_id": {"$in": [one["_id"] for one in documents]}}, PARTS).to_list())


def _created(begin: Begin, made: Document) -> Created:
    columns = {name: getattr(begin.run, name) for name in ("input", "metadata")}  # the document may have them elsewhere
    run = row_of(made | columns)
    if begin.length is None:
        return Created(run=run, is_new=True)
    claim = Claim(
        lease=lease_of(made),
        run=run,
        journal=list(begin.entries),
        inbox=list(begin.inbox),
        inbox_seq=made["inbox_seq"],
        item_counts={},
    )
    return Created(run=run, is_new=True, claim=claim)


async def find(db: Collections, begin: Begin) -> Created | None:
    """The run that is there, with its input now if it lacked that; None when it is gone again. Raises `RunConflict`."""
    while True:
        document = await db.runs.find_one({"_id": db.key(begin.run.id)}, PARTS)
        if document is None:
            return None
        found = row_of((await filled(db, [document], LARGE_COLUMNS))[0])
        now = await db.clock(begin.now) if found.lacks_input else 0
        run = found_row(found, begin.run, now)
        if run is found or await _bring_input(db, document, run):
            return Created(run=run, is_new=False)


async def _bring_input(db: Collections, found: Document, run: RunRow) -> bool:
    """Whether the run, which lacked its input, is still as it was found and has it now."""
    stem = stem_in(found)
    await put_payloads(db, [(stem, run.input)])
    values = {name: getattr(run, name) for name in _OF_INPUT}
    as_found = {name: found[name] for name in ("status", "cancel_requested", "input_hash", "epoch")}
    condition = in_place(found["_id"], found["generation"], **as_found)
    done = await db.runs.update_one(condition, {"$set": {**values, "input": column(stem, run.input), **spilling(run.input)}})
    return bool(done.matched_count)


async def insert(db: Collections, begin: Begin, document: Document, session: AsyncClientSession) -> None:
    """Insert the run in this transaction, unless one is there."""
    await db.runs.update_one({"_id": document["_id"]}, _insertion(document, begin), upsert=True, session=session)


async def restore(db: Collections, run: RunRow, entries: Sequence[Entry], inbox: Sequence[Signal], now: int | None) -> None:
    """Put this whole run in place of what is there. Raises `LeaseHeld`."""
    generation, key = new_token(), db.key(run.id)
    while True:
        found = await db.runs.find_one({"_id": key}, PARTS)
        at = await db.clock(now)
        before = None if found is None else row_of(found)
        if before is not None and before.lease_until is not None and before.lease_until > at:
            raise LeaseHeld(run.id, before.lease_owner or "a live worker")
        row = restored_row(run, inbox, before, at)
        document = await spill(db, run_document(db.namespace, row, generation, entries, inbox))
        if await _replace(db, found, document):
            return


async def _replace(db: Collections, found: Document | None, document: Document) -> bool:
    """Whether the document is there now, in place of the one that was found."""
    from pymongo.errors import DuplicateKeyError

    if found is None:
        try:
            await db.runs.insert_one(document)
        except DuplicateKeyError:
            return await db.runs.find_one(in_place(document["_id"], document["generation"]), {"_id": 1}) is not None
        return True
    as_found = {name: found[name] for name in ("epoch", "token", "lease_until", "held")}
    done = await db.runs.replace_one(in_place(found["_id"], found["generation"], **as_found), document)
    if done.matched_count:
        await sweep(db, found)
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
            raise LeaseHeld(run_id, f"whoever drives it: it is {found['status']} and has not ended")
        if await _reopen(db, found, drop, await db.clock(now), mark):
            return


async def _reopen(db: Collections, found: Document, drop: Collection[str], now: int, mark: str) -> bool:
    epoch = max(found["epoch"] + 1, now)
    last = max([found["steps_top"], *(entry["seq"] for entry in found["tail"])])
    entry = drop_entry(last + 1, drop, now, epoch)
    appending = {
        "tail": appended("tail", [entry_document(entry)]),
        "length": plus("length", 1),
        "weight": plus("weight", weight([entry])),
    }
    pending = freed(status="pending", epoch=epoch, attempts=0, updated_at=now, last_write=mark)
    withdrawn = {"outcome": None, "cancel_requested": False, "parent_notified": False}
    wake_at = either(_LACKS_INPUT, None, now)
    as_found = in_place(found["_id"], found["generation"], status=found["status"], epoch=found["epoch"], moves=found["moves"])
    done = await db.runs.update_one(as_found, [{"$set": {**pending, **withdrawn, **appending, "wake_at": wake_at}}])
    return bool(done.matched_count)


async def cancel(db: Collections, run_id: str, now: int | None) -> None:
    """Ask the run to stop, and make it due if nobody holds it. Raises `RunNotFound`, `RunFinished`."""
    at = instant(now)
    stays = {"$or": [is_leased(at), _LACKS_INPUT]}
    changes = {"cancel_requested": True, "wake_at": either(stays, "$wake_at", earlier("wake_at", at))}
    done = await db.runs.update_one({"_id": db.key(run_id), **NOT_ENDED}, [{"$set": changes}])
    if not done.matched_count:
        found = await db.runs.find_one({"_id": db.key(run_id)}, {"status": 1})
        raise RunNotFound(run_id) if found is None else RunFinished(run_id, found["status"])


async def hold(db: Collections, run_id: str, *, held: bool) -> None:
    """Keep the run from being driven, or let it go on. Raises `RunNotFound`."""
    done = await db.runs.update_one({"_id": db.key(run_id)}, {"$set": {"held": held}})
    if not done.matched_count:
        raise RunNotFound(run_id)


async def delete(db: Collections, run_id: str) -> None:
    """Remove the run and everything of it."""
    found = await db.runs.find_one_and_delete({"_id": db.key(run_id)}, _LEFT_OVER)
    if found is not None:
        await sweep(db, found)


async def purge(db: Collections, older_than: int, limit: int, now: int | None) -> int:
    """Delete ended runs that were not changed for `older_than` microseconds, oldest first, and say how many."""
    if limit <= 0:
        return 0
    last = await db.clock(now) - older_than
    is_old = {"namespace": db.namespace, "status": {"$in": sorted(ENDED)}, "updated_at": {"$lte": last}}
    cursor = db.runs.find(is_old, _LEFT_OVER).sort([("updated_at", 1), ("_id", -1)]).limit(limit)  # as an index has them
    return await _delete_all(db, await cursor.to_list(), is_old)


async def _delete_all(db: Collections, found: Sequence[Document], still: Document) -> int:
    from pymongo import DeleteOne

    if not found:
        return 0
    deletes = [DeleteOne({**still, **in_place(one["_id"], one["generation"])}) for one in found]
    done = await db.runs.bulk_write(deletes, ordered=False)
    spilled = [one for one in found if one["is_spilled"]]
    left = by_key(await db.runs.find({"_id": {"$in": [one["_id"] for one in spilled]}}, _LEFT_OVER).to_list()) if spilled else {}
    for one in spilled:
        if left.get(one["_id"], {}).get("generation") != one["generation"]:
            await sweep(db, one)
    return int(done.deleted_count)
