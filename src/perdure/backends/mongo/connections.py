"""The client of a MongoDB store: where it lives, and what the server must be and survives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.failures import WriteFailure
from perdure.backends.mongo.address import MongoAddress, settings_for
from perdure.backends.mongo.documents import Document
from perdure.backends.mongo.errors import classify_failure, driver, map_error
from perdure.backends.mongo.schema import Collections, set_up
from perdure.errors import PersistenceError
from perdure.store import Durability

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient

T = TypeVar("T")

# For a borrowed client that would wait for ever: how long an attempt at a verb, or at hearing of changes, may take.
_ATTEMPT_WITHIN: Final = 120.0
_CLOSE_WITHIN: Final = 5.0
# What a server need not gather when it is only asked for its storage engine.
_UNASKED: Final[Document] = dict.fromkeys(("metrics", "wiredTiger", "locks", "repl", "tcmalloc"), 0)


class MongoConnections(ServerConnections):
    """The client of one store, on its loop."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-mongo")
    PATIENCE: ClassVar[float] = 30.0  # a replica set that lost its primary takes some ten seconds to choose another

    def __init__(self, place: MongoAddress, stem: str, *, url: str | None, client: AsyncMongoClient[Any] | None) -> None:
        super().__init__(place.label, is_borrowed=client is not None)
        self.place = place
        self.stem = stem
        self._url = url
        self._client = client
        self._collections: dict[str, Collections] = {}

    def sibling(self) -> Self:
        """A connections in the same place, with a client of its own unless that is borrowed."""
        client = self._client if self.is_borrowed else None
        connections = type(self)(self.place, self.stem, url=self._url, client=client)
        connections._borrowed_loop = self._borrowed_loop  # noqa: SLF001 - its own kind
        return connections

    def classify_failure(self, error: BaseException) -> WriteFailure:
        return classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        return map_error(error, self.place.label, self.place.password)

    def collections(self, namespace: str) -> Collections:
        """The collections, for one namespace."""
        found = self._collections.get(namespace)
        if found is None:
            found = self._collections[namespace] = Collections(self._connected(), self.place.database, self.stem, namespace)
        return found

    def _connected(self) -> AsyncMongoClient[Document]:
        if self._client is None:
            raise PersistenceError(self.label, "it was closed; open a new one")
        return self._client

    async def open(self, *, allowed: bool) -> None:
        """Leave a client and the collections there, and know what the server survives."""
        if self._client is None and self._url is not None:
            self._client = await asyncio.to_thread(_new_client, self._url, self.label)  # it looks for files on the way
        with self.bounded():
            await self._look(self.collections(""), allowed=allowed)

    async def _look(self, db: Collections, *, allowed: bool) -> None:
        told = await db.database.command("hello")
        if "setName" not in told and told.get("msg") != "isdbgrid":
            raise PersistenceError(
                self.label,
                "this mongod stands alone, and a run's end and its parent's news are one transaction, which only a replica set "
                "has (one member is enough): start mongod with --replSet rs0, and run rs.initiate() once",
            )
        self.durability = await self._durability(db, told)
        await set_up(db, self.label, allowed=allowed)

    async def _durability(self, db: Collections, told: dict[str, Any]) -> Durability:
        from pymongo.errors import PyMongoError

        with contextlib.suppress(PyMongoError):  # not everybody may ask; then it is one that keeps things, as nearly all do
            status = await db.database.command("serverStatus", storageEngine=1, **_UNASKED)
            if not status.get("storageEngine", {}).get("persistent", True):
                return "process"
        # A cluster of shards does not tell what its shards are; those are replica sets.
        return "replicated" if len(told.get("hosts", ())) > 1 or told.get("msg") == "isdbgrid" else "disk"

    async def perform(self, namespace: str, work: Callable[[Collections, bool], Awaitable[T]]) -> T:
        """What the work gives, tried again after errors that pass. It is told when it may have been done before."""

        async def attempt(repeated: bool) -> T:  # noqa: FBT001 - as `retry_transient` has it
            with self.bounded():
                return await work(self.collections(namespace), repeated)

        return await self.retry_transient(attempt)

    def bounded(self) -> AbstractContextManager[object]:
        """Where nothing is waited for without end: by what the client was told, or else by us."""
        options = self._connected().options
        is_bounded = options.timeout or options.pool_options.socket_timeout
        return nullcontext() if is_bounded else driver().timeout(_ATTEMPT_WITHIN)

    async def close(self) -> None:
        """Let go of the client, if it is ours."""
        client, self._client = self._client, None
        self._url = None
        self._collections.clear()
        if client is not None and not self.is_borrowed:
            with driver().timeout(_CLOSE_WITHIN):  # it says goodbye, which the server need not hear
                await client.close()


def _new_client(url: str, label: str) -> AsyncMongoClient[Document]:
    from pymongo.errors import PyMongoError

    try:
        client: AsyncMongoClient[Document] = driver().AsyncMongoClient(url, **settings_for(url))
    except (PyMongoError, ValueError, TypeError) as refused:
        # What it says may repeat a part of the URL, such as half a password.
        reason = "the driver cannot read its URL; characters such as @ : / in the name and the password are written %40 %3A %2F"
        raise PersistenceError(label, f"{reason} ({type(refused).__name__})") from None
    return client
