"""The collections: their names, indexes and set-up, and how commands reach them.

Every write waits until a majority of the replica set has it in its journal, and every read sees only what a majority has. What
was read can therefore be copied: no failover undoes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from perdure.backends.mongo.documents import LEAST, Document, KnownLimits, key_of
from perdure.errors import PersistenceError

if TYPE_CHECKING:
    from bson.codec_options import CodecOptions
    from pymongo import AsyncMongoClient
    from pymongo.asynchronous.client_session import AsyncClientSession
    from pymongo.asynchronous.collection import AsyncCollection

T = TypeVar("T")

VERSION: Final = 4
PARTS: Final = ("runs", "steps", "signals", "items", "payloads", "queues", "schedules", "workers", "meta")
_STEM: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_NAMESPACE_EXISTS: Final = 48
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - the driver gives naive UTC

_IS_TIMED: Final = {"partialFilterExpression": {"wake_at": {"$gte": LEAST}}}
_IS_LEASED: Final = {"partialFilterExpression": {"lease_until": {"$gte": LEAST}}}
_HAS_DEDUPE: Final = {"partialFilterExpression": {"dedupe": {"$gte": ""}}}
# A record changes none of these fields, so it writes to no index.
INDEXES: Final[dict[str, Sequence[tuple[str, list[tuple[str, int]], dict[str, Any]]]]] = {
    "runs": (
        ("due", [("namespace", 1), ("held", 1), ("wake_at", 1), ("_id", 1)], _IS_TIMED),
        (
            "claim",
            [
                ("namespace", 1),
                ("held", 1),
                ("workflow", 1),
                ("version", 1),
                ("priority", -1),
                ("wake_at", 1),
                ("_id", 1),
                ("queue", 1),
                ("epoch", 1),
            ],
            _IS_TIMED,
        ),
        ("leased", [("namespace", 1), ("queue", 1), ("lease_until", 1), ("limit_key", 1)], _IS_LEASED),
        ("status", [("namespace", 1), ("status", 1), ("updated_at", -1), ("_id", 1)], {}),
        ("workflow", [("namespace", 1), ("workflow", 1), ("status", 1), ("updated_at", -1), ("_id", 1)], {}),
        ("queue", [("namespace", 1), ("queue", 1), ("status", 1), ("updated_at", -1), ("_id", 1)], {}),
    ),
    "signals": (("dedupe", [("run", 1), ("name", 1), ("dedupe", 1)], _HAS_DEDUPE),),
    "queues": (("namespace", [("namespace", 1), ("_id", 1)], {}),),
    "schedules": (("namespace", [("namespace", 1), ("_id", 1)], {}),),
    "workers": (("namespace", [("namespace", 1), ("_id", 1)], {}),),
}


def check_stem(stem: str) -> str:
    """The stem of the collections' names. Raises `ValueError`."""
    if not isinstance(stem, str) or not _STEM.fullmatch(stem):
        raise ValueError(f"collection {stem!r} must be letters, digits and '_', at most 100, and not begin with a digit")
    return stem


class Collections:
    """The collections under one stem, for one namespace. They belong to the event loop of their client."""

    def __init__(self, client: AsyncMongoClient[Document], database: str, stem: str, namespace: str) -> None:
        from pymongo import ReadPreference, WriteConcern
        from pymongo.read_concern import ReadConcern

        self.client = client
        self.namespace = namespace
        self.stem = stem
        self.database = client.get_database(
            database,
            codec_options=_codec_options(),  # a borrowed client may have others
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern("majority", j=True),
            read_concern=ReadConcern("majority"),
        )
        self.runs = self.of("runs")
        self.steps = self.of("steps")
        self.signals = self.of("signals")
        self.items = self.of("items")
        self.payloads = self.of("payloads")
        self.queues = self.of("queues")
        self.schedules = self.of("schedules")
        self.workers = self.of("workers")
        self.meta = self.of("meta")
        # Which queues have limits, as far as this process remembers it: see `queues`.
        self.known_limits: KnownLimits | None = None

    def of(self, part: str) -> AsyncCollection[Document]:
        """One of the collections."""
        return self.database.get_collection(f"{self.stem}_{part}")

    def key(self, name: str) -> str:
        """The `_id` of a run, queue or schedule of this namespace."""
        return key_of(self.namespace, name)

    async def clock(self, now: int | None) -> int:
        """The instant `now`, or the server's own time."""
        if now is not None:
            return now
        local_time: datetime = (await self.database.command("hello"))["localTime"]
        return (local_time - _EPOCH) // timedelta(microseconds=1)

    def read_at_one_moment(self) -> AsyncClientSession:
        """A session whose reads are all of one moment. Otherwise a run whose index key moves during a scan may be skipped."""
        return self.client.start_session(snapshot=True)

    async def run_transaction(self, work: Callable[[AsyncClientSession], Coroutine[Any, Any, T]]) -> T:
        """What the work gives, all of it committed or nothing; it is done again after a write conflict."""
        from pymongo import ReadPreference, WriteConcern
        from pymongo.read_concern import ReadConcern

        async with self.client.start_session() as session:
            return await session.with_transaction(
                work,
                read_concern=ReadConcern("snapshot"),
                write_concern=WriteConcern("majority", j=True),
                read_preference=ReadPreference.PRIMARY,
            )


@functools.cache
def _codec_options() -> CodecOptions[Document]:
    """How documents are read: long whole numbers as int, for which the driver has a class of its own."""
    from bson.codec_options import CodecOptions, TypeDecoder, TypeRegistry
    from bson.int64 import Int64

    class _Int64AsInt(TypeDecoder):
        bson_type = Int64

        def transform_bson(self, value: int) -> int:
            return int(value)

    return CodecOptions(type_registry=TypeRegistry([_Int64AsInt()]))


async def set_up(db: Collections, label: str, *, allowed: bool) -> None:
    """Create the collections and indexes that are missing. Many processes may do this at once, and any may be killed."""
    if await _version(db, label) is not None:
        return
    if not allowed:
        raise PersistenceError(
            label,
            f"there are no {db.stem!r} collections; check the database and collection=, or make them with `await store.setup()`",
        )
    for part in PARTS:
        await _create(db, part)
    # Last: a process that finds the version finds everything.
    await db.meta.update_one({"_id": "schema"}, {"$setOnInsert": {"version": VERSION}}, upsert=True)
    await _version(db, label)


async def _create(db: Collections, part: str) -> None:
    from pymongo import IndexModel
    from pymongo.errors import CollectionInvalid, OperationFailure

    try:
        await db.database.create_collection(f"{db.stem}_{part}", check_exists=False)
    except CollectionInvalid:
        pass
    except OperationFailure as error:
        if error.code != _NAMESPACE_EXISTS:
            raise
    models = [IndexModel(keys, name=f"{db.stem}_{name}", **options) for name, keys, options in INDEXES.get(part, ())]
    if models:
        await db.of(part).create_indexes(models)


async def _version(db: Collections, label: str) -> int | None:
    found = await db.meta.find_one({"_id": "schema"})
    if found is None:
        return None
    version = int(found.get("version", 0))
    if version != VERSION:
        what = (
            "a newer perdure; upgrade this one"
            if version > VERSION
            else "an earlier perdure or something else; choose another collection="
        )
        raise PersistenceError(
            label,
            f"the {db.stem!r} collections have schema version {version} and this perdure knows {VERSION}: they belong to {what}",
        )
    return version
