"""The client of a MongoDB store: where it lives, and what the server must be and survives."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

from perdure.aio.loop_thread import LoopThread
from perdure.aio.threads import run_in_thread
from perdure.backends.base import retries
from perdure.backends.base.connections import ServerConnections
from perdure.backends.base.retries import WriteFailure
from perdure.backends.mongo.address import MongoAddress, settings_for
from perdure.backends.mongo.documents import Document
from perdure.backends.mongo.errors import classify_failure, driver, is_silence, map_error
from perdure.backends.mongo.schema import Collections, set_up
from perdure.errors import PersistenceError, StoreClosed
from perdure.store import Durability

if TYPE_CHECKING:
    from pymongo import AsyncMongoClient

T = TypeVar("T")

# For a borrowed client that would wait for ever: how long an attempt at a verb, or a wait for changes, may take.
_ATTEMPT_WITHIN: Final = 120.0
_CLOSE_WITHIN: Final = 5.0
# Parts of its status that the server need not gather when it is only asked for its storage engine.
_UNASKED: Final[Document] = dict.fromkeys(("metrics", "wiredTiger", "locks", "repl", "tcmalloc"), 0)


class MongoConnections(ServerConnections):
    """The client of one store, on its loop."""

    THREAD: ClassVar[LoopThread] = LoopThread("perdure-mongo")
    PATIENCE: ClassVar[float] = 20.0  # a replica set that lost its primary takes some twelve seconds to choose another

    def __init__(self, address: MongoAddress, stem: str, *, url: str | None, client: AsyncMongoClient[Any] | None) -> None:
        super().__init__(address.label, is_borrowed=client is not None)
        self.address = address
        self.stem = stem
        self._url = url
        self._client = client
        self._collections: dict[str, Collections] = {}

    def sibling(self) -> Self:
        """Connections to the same database, with a client of their own unless that is borrowed."""
        client = self._client if self.is_borrowed else None
        sibling = type(self)(self.address, self.stem, url=self._url, client=client)
        sibling._pinned_loop = self._pinned_loop  # noqa: SLF001 - its own kind
        return sibling

    def classify_failure(self, error: BaseException) -> WriteFailure:
        return classify_failure(error)

    def map_error(self, error: BaseException) -> BaseException:
        return map_error(error, self.address.label, self.address.secrets)

    def collections(self, namespace: str) -> Collections:
        """The collections, for one namespace."""
        found = self._collections.get(namespace)
        if found is None:
            found = Collections(self._require_client(), self.address.database, self.stem, namespace)
            self._collections[namespace] = found
        return found

    def _require_client(self) -> AsyncMongoClient[Document]:
        if self._client is None:
            raise StoreClosed(self.label)
        return self._client

    async def open(self, *, allowed: bool) -> None:
        """Make a client and the collections, and find out what the server survives."""
        if self._client is None and self._url is not None:
            self._client = await run_in_thread(_new_client, self._url, self.label)  # in a thread, as it reads files
        with self.time_limit():
            await self._inspect(self.collections(""), allowed=allowed)

    async def _inspect(self, db: Collections, *, allowed: bool) -> None:
        hello = await db.database.command("hello")
        if "setName" not in hello and hello.get("msg") != "isdbgrid":
            raise PersistenceError(
                self.label,
                "this mongod stands alone, and a run's end and the notice to its parent are one transaction, which only a "
                "replica set has (one member is enough): start mongod with --replSet rs0, and run rs.initiate() once",
            )
        self.durability = await self._durability(db, hello)
        await set_up(db, self.label, allowed=allowed)

    async def _durability(self, db: Collections, hello: dict[str, Any]) -> Durability:
        from pymongo.errors import PyMongoError

        # Without the right to ask, the engine is taken for one that keeps its data, as nearly all do.
        with contextlib.suppress(PyMongoError):
            status = await db.database.command("serverStatus", storageEngine=1, **_UNASKED)
            if not status.get("storageEngine", {}).get("persistent", True):
                return "process"
        # A cluster of shards does not say what its shards are; those are replica sets.
        return "replicated" if len(hello.get("hosts", ())) > 1 or hello.get("msg") == "isdbgrid" else "disk"

    async def perform(self, namespace: str, work: Callable[[Collections, bool], Awaitable[T]]) -> T:
        """What the work gives, tried again after errors that pass; its second argument says that it may have been done before."""

        async def attempt(repeated: bool) -> T:  # noqa: FBT001 - as `retry_transient` has it
            with self.time_limit():
                return await work(self.collections(namespace), repeated)

        return await self.retry_transient(attempt)

    def time_limit(self) -> AbstractContextManager[object]:
        """A context in which no wait is endless: by the client's own settings, or else by ours, longer after a silence."""
        options = self._require_client().options
        is_bounded = options.timeout or options.pool_options.socket_timeout
        is_patient = retries.reply_limit() > retries.REPLY_WITHIN and not self.is_borrowed
        if is_bounded and not is_patient:
            return nullcontext()
        limit: AbstractContextManager[object] = driver().timeout(retries.reply_limit() if is_patient else _ATTEMPT_WITHIN)
        return limit

    def is_silence(self, error: BaseException) -> bool:
        return is_silence(error)

    async def drop_idle(self) -> None:
        """Close the connections that nothing uses now. The driver would do so when its own check of the server has failed."""
        topology = self._require_client()._topology  # noqa: SLF001 - there is no public way to ask for it
        for server in list(topology._servers.values()):  # noqa: SLF001
            await server.pool.reset_without_pause()

    async def close(self) -> None:
        """Close the client, if it is ours."""
        client, self._client = self._client, None
        self._url = None
        self._collections.clear()
        if client is not None and not self.is_borrowed:
            with driver().timeout(_CLOSE_WITHIN):  # it ends its sessions, which the server also does by itself
                await client.close()


def _new_client(url: str, label: str) -> AsyncMongoClient[Document]:
    from pymongo.errors import PyMongoError

    try:
        client: AsyncMongoClient[Document] = driver().AsyncMongoClient(url, **settings_for(url))
    except (PyMongoError, ValueError, TypeError) as refused:
        # The driver's message may repeat a part of the URL, such as half a password.
        reason = "the driver cannot read its URL; characters such as @ : / in the name and the password are written %40 %3A %2F"
        raise PersistenceError(label, f"{reason} ({type(refused).__name__})") from None
    return client
