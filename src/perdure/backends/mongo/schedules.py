"""Schedules, and the registry of workers. Firing a schedule moves it on and creates its run in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from perdure.backends.mongo.documents import Document, instant, literal, name_in, same_run
from perdure.backends.mongo.overflow import delete_overflow, split_document
from perdure.backends.mongo.runs import RunInsert, insert_run
from perdure.backends.mongo.schema import Collections
from perdure.model.records import Schedule, WorkerRow

if TYPE_CHECKING:
    from pymongo.asynchronous.client_session import AsyncClientSession

_FIELDS: Final = tuple(name for name in Schedule.__struct_fields__ if name != "id")


async def put_schedule(db: Collections, schedule: Schedule) -> None:
    """Insert or replace the schedule."""
    key = db.key(schedule.id)
    fields = {name: value for name, value in msgspec.structs.asdict(schedule).items() if name != "id"}
    await db.schedules.replace_one({"_id": key}, {"_id": key, "namespace": db.namespace, "fired_by": None, **fields}, upsert=True)


async def schedules(db: Collections) -> list[Schedule]:
    """All schedules, by id."""
    cursor = db.schedules.find({"namespace": db.namespace}).sort("_id", 1)
    return [Schedule(id=name_in(found["_id"]), **{name: found[name] for name in _FIELDS}) async for found in cursor]


async def drop_schedule(db: Collections, schedule_id: str, *, is_repeated: bool = False) -> bool:
    """Remove the schedule; False when it did not exist. A repetition that does not find it was done by the first attempt."""
    done = await db.schedules.delete_one({"_id": db.key(schedule_id)})
    return bool(done.deleted_count) or is_repeated


async def fire(db: Collections, schedule_id: str, expected_at: int, next_at: int | None, insert: RunInsert) -> bool:
    """Move the schedule from `expected_at` to `next_at` and create the run; False when another call did, or it was dropped."""
    key = db.key(schedule_id)
    document = await split_document(db, insert.document(db.namespace))

    async def fire(session: AsyncClientSession) -> bool:
        moved = {"$set": {"next_at": next_at, "fired_by": insert.incarnation}}
        done = await db.schedules.update_one({"_id": key, "next_at": expected_at}, moved, session=session)
        if done.matched_count:
            await insert_run(db, insert, document, session)
        return bool(done.matched_count)

    fired = await db.run_transaction(fire) or await _was_fired(db, key, insert.incarnation)
    if document["is_spilled"] and await db.runs.find_one(same_run(document["_id"], insert.incarnation), {"_id": 1}) is None:
        await delete_overflow(db, document)
    return fired


async def pass_over(db: Collections, schedule_id: str, expected_at: int, next_at: int | None, call: str) -> bool:
    """Move the schedule without creating a run; `call` is the same in every attempt of one call."""
    key = db.key(schedule_id)
    moved = {"$set": {"next_at": next_at, "fired_by": call}}
    done = await db.schedules.update_one({"_id": key, "next_at": expected_at}, moved)
    return bool(done.matched_count) or await _was_fired(db, key, call)


async def _was_fired(db: Collections, key: str, call: str) -> bool:
    """Whether an earlier attempt of this call fired it, and the reply was lost."""
    found: Document | None = await db.schedules.find_one({"_id": key, "fired_by": call}, {"_id": 1})
    return found is not None


async def put_worker(db: Collections, worker_id: str, info: bytes, now: int | None) -> None:
    """Insert or replace the worker, seen now."""
    fields = {"namespace": literal(db.namespace), "seen_at": instant(now), "info": literal(info)}
    await db.workers.update_one({"_id": db.key(worker_id)}, [{"$set": fields}], upsert=True)


async def workers(db: Collections) -> list[WorkerRow]:
    """All workers, by id."""
    cursor = db.workers.find({"namespace": db.namespace}).sort("_id", 1)
    return [WorkerRow(id=name_in(found["_id"]), seen_at=found["seen_at"], info=bytes(found["info"])) async for found in cursor]


async def drop_worker(db: Collections, worker_id: str) -> None:
    """Remove the worker, if it is there."""
    await db.workers.delete_one({"_id": db.key(worker_id)})
