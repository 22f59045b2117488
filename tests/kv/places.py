"""One empty database for each kind of key-value store, and how to look into it without the store."""

from __future__ import annotations

import asyncio
import atexit
import functools
import secrets
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pymongo
import redis.asyncio

from perdure.kv import MemoryKeyValueStore, open_key_value_store
from perdure.kv.protocol import KeyValueStore
from perdure.testing.keyvalue import KeyValueFactory
from tests.servers.mongo import shared_server as shared_mongo
from tests.servers.postgres import shared_server, with_search_path
from tests.servers.redis import RedisServer, configured_url


class Place(KeyValueFactory):
    """A place that a DSN names."""

    dsn: str

    async def make(self) -> None:
        """Have it there, as far as a store does not make it itself."""

    async def open(self) -> KeyValueStore:
        # In a thread: a store looks where its path leads when it is made, and the guard of these tests knows no harmless look.
        return await asyncio.to_thread(open_key_value_store, self.dsn)


class MemoryPlace(Place):
    is_shared: ClassVar[bool] = False

    def __init__(self) -> None:
        self.dsn = "memory:"
        self.kv = open_key_value_store(self.dsn)

    async def open(self) -> KeyValueStore:
        return self.kv

    async def count(self) -> int:
        assert isinstance(self.kv, MemoryKeyValueStore)
        return len(self.kv._texts)


class FilesPlace(Place):
    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="perdure-keyvalues-")
        self.dsn = f"files:{self.directory}/new/place"

    async def count(self) -> int:
        kept = Path(self.directory, "new/place/values/n-/kept")
        return await asyncio.to_thread(lambda: len(list(kept.iterdir())) if kept.is_dir() else 0)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory)


class SQLitePlace(Place):
    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="perdure-keyvalues-")
        self.dsn = f"sqlite:///{self.directory}/app.db"

    async def count(self) -> int:
        return await asyncio.to_thread(self._count)

    def _count(self) -> int:
        if not Path(f"{self.directory}/app.db").is_file():
            return 0
        connection = sqlite3.connect(f"{self.directory}/app.db")
        try:
            return int(connection.execute("SELECT count(*) FROM perdure_values").fetchone()[0])
        finally:
            connection.close()

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)  # SQLite may remove some of it itself


class PostgresPlace(Place):
    def __init__(self) -> None:
        self.server = shared_server().dsn
        self.schema = f"keyvalues_{secrets.token_hex(6)}"
        self.dsn = with_search_path(self.server, self.schema)

    async def make(self) -> None:
        await self.ask(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")

    async def open(self) -> KeyValueStore:
        await self.make()
        return await super().open()

    async def count(self) -> int:
        if not await self.ask("SELECT FROM pg_tables WHERE schemaname = $1", self.schema):
            return 0
        return int((await self.ask(f"SELECT count(*) FROM {self.schema}.perdure_values"))[0][0])

    async def close(self) -> None:
        await self.ask(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")

    async def ask(self, sql: str, *values: Any) -> list[Any]:
        connection = await asyncpg.connect(self.server)
        try:
            rows: list[Any] = await connection.fetch(sql, *values)
            return rows
        finally:
            await connection.close()


@functools.cache
def redis_server() -> RedisServer:
    """The one server of this process's tests."""
    started = RedisServer()
    started.start()
    atexit.register(started.remove)
    return started


class RedisPlace(Place):
    def __init__(self) -> None:
        self.url = configured_url() or redis_server().url
        self.table = f"perdure-{secrets.token_hex(8)}"
        self.dsn = f"{self.url}?table={self.table}"

    async def names(self) -> list[bytes]:
        async with redis.asyncio.Redis.from_url(self.url, driver_info=None) as client:
            return [name async for name in client.scan_iter(f"{self.table}:*", count=10_000)]

    async def count(self) -> int:
        return len(await self.names())

    async def close(self) -> None:
        async with redis.asyncio.Redis.from_url(self.url, driver_info=None) as client:
            for name in await self.names():
                await client.unlink(name)


@functools.cache
def mongo_server() -> str:
    """The DSN of the one server of this process's tests, which removes what has expired every second, and not every minute."""
    dsn = shared_mongo().dsn
    with pymongo.MongoClient[dict[str, Any]](dsn) as client:
        client.admin.command("setParameter", 1, ttlMonitorSleepSecs=1)
    return dsn


class MongoPlace(Place):
    most_bytes: ClassVar[int] = (16 << 20) - (64 << 10)

    def __init__(self) -> None:
        self.server = mongo_server()
        self.stem = f"keyvalues_{secrets.token_hex(6)}"
        self.dsn = f"{self.server}&collection={self.stem}"

    async def count(self) -> int:
        return await asyncio.to_thread(self._count)

    def _count(self) -> int:
        with pymongo.MongoClient[dict[str, Any]](self.server) as client:
            return client["perdure"][f"{self.stem}_values"].count_documents({})

    async def close(self) -> None:
        await asyncio.to_thread(self._drop)

    def _drop(self) -> None:
        with pymongo.MongoClient[dict[str, Any]](self.server) as client:
            client["perdure"].drop_collection(f"{self.stem}_values")


PLACES: tuple[type[Place], ...] = (MemoryPlace, FilesPlace, SQLitePlace, PostgresPlace, RedisPlace, MongoPlace)
