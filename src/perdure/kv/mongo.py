"""Text by key in a MongoDB collection, for any number of processes and machines.

    {_id: "<namespace>:<key>", value: "...", expires_at?: Date}

The namespace is written without colons. Every verb is one command and one round trip, by the server's clock. A TTL index removes
what has expired, about once a minute; until then every method ignores it. A text that is no UTF-8, because of lone surrogates, is
kept as binary. What was set is in the journal of a majority when `set` returns.
"""

from __future__ import annotations

from typing import Any, Final

from perdure.aio.threads import run_in_thread
from perdure.backends.mongo.address import address_of, check_source, settings_for
from perdure.backends.mongo.connections import MongoConnections
from perdure.backends.mongo.errors import driver
from perdure.backends.mongo.schema import check_stem
from perdure.kv.limits import check_namespace, escape_colons
from perdure.kv.patterns import key_range
from perdure.kv.server_store import ServerKeyValueStore

# A document holds 16 MB, and so does the command that brings it, with the key and everything around it.
MAX_VALUE_BYTES: Final = (16 << 20) - (64 << 10)
_MICROSECONDS_PER_MILLISECOND: Final = 1000
_IS_LIVE: Final = {"$or": [{"expires_at": None}, {"$expr": {"$gt": ["$expires_at", "$$NOW"]}}]}


class MongoKvConnections(MongoConnections):
    """The client of a key-value store, and its collection."""

    @property
    def values(self) -> Any:
        """The collection."""
        return self.collections("").of("values")

    async def open(self, *, allowed: bool) -> None:  # noqa: ARG002 - it may always create its index
        """Make a client and the TTL index. Many processes may do this at once: it is the same index."""
        if self._client is None and self._url is not None:  # in a thread, as it reads files
            self._client = await run_in_thread(driver().AsyncMongoClient, self._url, **settings_for(self._url))
        await self.values.create_index("expires_at", expireAfterSeconds=0)


class MongoKeyValueStore(ServerKeyValueStore[MongoKvConnections]):
    """A `KeyValueStore` in the collection `{collection}_values` of a MongoDB database. A text has at most 16,711,680 bytes.

    It takes a URL, or a `client` (`AsyncMongoClient`) that stays the caller's: it is used on the event loop that runs when the
    store is made (or first used), and not closed. The database is the one given, else that of the URL, else `perdure`.
    `namespace` keeps several users of one collection apart.
    """

    most_bytes = MAX_VALUE_BYTES

    def __init__(
        self,
        url: str | None = None,
        *,
        client: Any = None,
        database: str | None = None,
        collection: str = "perdure",
        namespace: str = "",
    ) -> None:
        driver()
        check_source(url, client)
        address = address_of(url, client, database)
        self._before = f"{escape_colons(check_namespace(namespace))}:"
        super().__init__(MongoKvConnections(address, check_stem(collection), url=url, client=client))

    @property
    def place(self) -> tuple[str, ...]:
        """Hosts, database, collection, and what begins every `_id`."""
        address = self._connections.address
        return ("mongodb", address.hosts, address.database, self._connections.stem, self._before)

    async def _get(self, key: str) -> bytes | None:
        found = await self._connections.values.find_one({"_id": self._name(key), **_IS_LIVE}, {"value": 1})
        return None if found is None else _bytes_of(found["value"])

    async def _set(self, key: str, data: bytes, length: int | None) -> None:
        document = {"value": _value_of(data)}
        values, which = self._connections.values, {"_id": self._name(key)}
        if length is None:
            await values.replace_one(which, document, upsert=True)
            return
        # Rounded up: a whole millisecond is the least there is. A literal, as the text may begin with a dollar.
        ends = {"$add": ["$$NOW", -(-length // _MICROSECONDS_PER_MILLISECOND)]}
        await values.update_one(which, [{"$set": {"value": {"$literal": document["value"]}, "expires_at": ends}}], upsert=True)

    async def _delete(self, key: str) -> bool:
        deleted = await self._connections.values.delete_one({"_id": self._name(key), **_IS_LIVE})
        return bool(deleted.deleted_count)

    async def _exists(self, key: str) -> bool:
        return await self._connections.values.find_one({"_id": self._name(key), **_IS_LIVE}, {"_id": 1}) is not None

    async def _keys_with_prefix(self, prefix: str) -> list[str]:
        first, end = key_range(self._name(prefix))
        which = {"_id": {"$gte": first, "$lt": end}, **_IS_LIVE}
        return [found["_id"].removeprefix(self._before) async for found in self._connections.values.find(which, {"_id": 1})]

    def _name(self, key: str) -> str:
        return self._before + key


def _value_of(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _bytes_of(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
