"""Schedules. Firing one moves it on and creates its run in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from perdure.backends.mongo.documents import Document
from perdure.backends.mongo.moving import spill, sweep
from perdure.backends.mongo.names import in_place, name_in
from perdure.backends.mongo.runs import Begin, insert
from perdure.backends.mongo.schema import Collections
from perdure.model.records import Schedule

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
    """Remove the schedule; False when it was not there. One that is gone at the second try was removed by the first."""
    done = await db.schedules.delete_one({"_id": db.key(schedule_id)})
    return bool(done.deleted_count) or is_repeated


async def fire(db: Collections, schedule_id: str, expected_at: int, next_at: int | None, begin: Begin) -> bool:
    """Move the schedule from `expected_at` to `next_at` and create the run; False when somebody else did, or it is gone."""
    key = db.key(schedule_id)
    document = await spill(db, begin.document(db.namespace))

    async def fire(session: AsyncClientSession) -> bool:
        moved = {"$set": {"next_at": next_at, "fired_by": begin.generation}}
        done = await db.schedules.update_one({"_id": key, "next_at": expected_at}, moved, session=session)
        if done.matched_count:
            await insert(db, begin, document, session)
        return bool(done.matched_count)

    fired = await db.atomically(fire) or await _fired_before(db, key, begin)
    if document["is_spilled"] and await db.runs.find_one(in_place(document["_id"], begin.generation), {"_id": 1}) is None:
        await sweep(db, document)
    return fired


async def _fired_before(db: Collections, key: str, begin: Begin) -> bool:
    """Whether this very call fired it, and the reply was lost."""
    found: Document | None = await db.schedules.find_one({"_id": key, "fired_by": begin.generation}, {"_id": 1})
    return found is not None
