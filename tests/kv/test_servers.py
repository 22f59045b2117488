"""On a server: one round trip for each verb, nothing acknowledged is lost, and a client or pool that was passed in stays open."""

from __future__ import annotations

import asyncio
import pickle
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pymongo
import pytest
import redis.asyncio

from perdure.errors import PerdureWarning, PersistenceError
from perdure.kv import MongoKeyValueStore, PostgresKeyValueStore, RedisKeyValueStore, open_key_value_store
from tests.kv.conftest import made
from tests.kv.places import MongoPlace, Place, PostgresPlace, RedisPlace
from tests.patience import PATIENCE
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import PostgresServer, with_search_path
from tests.servers.redis import RedisServer
from tests.wire import Wire

SERVERS: Final = (PostgresPlace, RedisPlace, MongoPlace)


@pytest.fixture(params=SERVERS, ids=lambda kind: kind.__name__)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    yield from made(request.param)


@pytest.fixture
def wire(place: Place) -> Iterator[Wire]:
    # The driver of MongoDB looks after its server on a connection of its own, here so rarely that no look falls into a test.
    quiet = "&serverMonitoringMode=poll&heartbeatFrequencyMS=600000" if isinstance(place, MongoPlace) else ""
    through = Wire(place.dsn + quiet)
    yield through
    through.close()


async def until(is_so: Callable[..., bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.01)


async def spent(wire: Wire, verb: Callable[[], Any]) -> int:
    before = wire.round_trips
    await verb()
    return wire.round_trips - before


class TestOnTheWire:
    """Counted, and lost, by a proxy before the server."""

    async def test_every_verb_is_one_round_trip(self, place: Place, wire: Wire) -> None:
        kv: Any = open_key_value_store(wire.url)
        verbs = [
            partial(kv.set, "a", "1"), partial(kv.set, "a", "1", 3600), partial(kv.get, "a"), partial(kv.exists, "a"),
            partial(kv.keys, "a*"), partial(kv.delete, "a"),
        ]  # fmt: skip
        for verb in verbs:  # connects, and has the statements prepared
            await verb()
        costs = [[await spent(wire, verb) for _ in range(5)] for verb in verbs]
        # On a busy machine pymongo may look after its connections in the middle of one.
        assert [statistics.median(each) for each in costs] == [1] * len(verbs)
        await kv.close()

    async def test_a_set_whose_reply_is_lost_is_made_again(self, place: Place, wire: Wire) -> None:
        kv: Any = open_key_value_store(wire.url)
        await kv.set("a", "1")
        for n in range(5):
            wire.lose = 1
            await kv.set("a", f"{n}")
            assert await kv.get("a") == f"{n}"
        assert wire.lost == 5
        await kv.close()

    async def test_a_read_whose_reply_is_lost_is_asked_again(self, place: Place, wire: Wire) -> None:
        kv: Any = open_key_value_store(wire.url)
        await kv.set("a", "1")
        for read, expected in ((kv.get, "1"), (kv.exists, True), (kv.keys, ["a"])):
            wire.lose = 1
            assert await read("a") == expected
        await kv.close()

    async def test_a_delete_whose_reply_is_lost_tells_the_truth_or_that_it_does_not_know(self, place: Place, wire: Wire) -> None:
        kv: Any = open_key_value_store(wire.url)
        for _ in range(3):
            await kv.set("a", "1")
            wire.lose = 1
            try:
                assert await kv.delete("a") is True  # the driver of MongoDB recognises its own
            except PersistenceError as unknown:
                assert "whether the key existed is unknown; it is deleted now" in str(unknown)  # noqa: PT017 - one of two ways
            assert await kv.exists("a") is False
        await kv.close()


class TestRestarts:
    """The server is killed under load, and comes back."""

    @staticmethod
    async def killed_under_load(kv: Any, kill_and_start: Callable[[], None]) -> None:
        told: dict[str, int] = {}
        is_over = asyncio.Event()

        async def write(name: str) -> None:
            n = 0
            while not is_over.is_set():
                n += 1
                await kv.set(name, f"{n}")
                told[name] = n

        writers = [asyncio.ensure_future(write(f"key {n}")) for n in range(5)]
        for _ in range(3):
            seen = sum(told.values())
            await until(lambda seen=seen: len(told) == 5 and sum(told.values()) > seen + 15)
            await asyncio.to_thread(kill_and_start)
            for name, n in list(told.items()):
                assert int(await kv.get(name)) >= n
        is_over.set()
        await asyncio.gather(*writers)
        assert {name: int(await kv.get(name)) for name in told} == told
        await kv.close()

    async def test_postgres_keeps_what_it_acknowledged(self) -> None:
        server = await asyncio.to_thread(_started, partial(PostgresServer, own=True))

        def kill_and_start() -> None:
            server.kill()
            server.start()

        await self.killed_under_load(PostgresKeyValueStore(server.dsn), kill_and_start)
        await asyncio.to_thread(server.remove)

    async def test_redis_keeps_what_it_acknowledged(self) -> None:
        server = await asyncio.to_thread(_started, RedisServer)

        def kill_and_start() -> None:
            server.kill()
            server.start()

        await self.killed_under_load(RedisKeyValueStore(server.url), kill_and_start)
        await asyncio.to_thread(server.remove)


def _started(make: Callable[[], Any]) -> Any:
    server = make()
    server.start()
    return server


class TestBorrowed:
    """What is brought along is used on its own loop, from everywhere, and left open."""

    @staticmethod
    async def used_from_two_loops(kv: Any) -> None:
        await kv.set("here", "1")
        await asyncio.to_thread(lambda: asyncio.run(kv.set("there", "2", 3600)))
        assert sorted(await kv.keys("*")) == ["here", "there"]
        assert await asyncio.to_thread(lambda: asyncio.run(kv.delete("here"))) is True
        await kv.close()
        with pytest.raises(PersistenceError, match="it was closed"):
            await kv.get("there")

    async def test_a_pool_of_asyncpg(self) -> None:
        place = await asyncio.to_thread(PostgresPlace)
        await place.make()
        async with asyncpg.create_pool(place.dsn, min_size=1, max_size=2) as pool:
            await self.used_from_two_loops(PostgresKeyValueStore(pool=pool))
            assert await pool.fetchval("SELECT count(*) FROM perdure_values") == 1
        await place.close()

    async def test_a_client_of_redis(self) -> None:
        place = await asyncio.to_thread(RedisPlace)
        async with redis.asyncio.Redis.from_url(place.url, driver_info=None) as client:
            await self.used_from_two_loops(RedisKeyValueStore(client=client, table=place.table))
            assert await client.get(f"{place.table}:values::there") == b"2"
        await place.close()

    async def test_a_client_of_redis_that_decodes_is_refused(self) -> None:
        client = redis.asyncio.Redis(decode_responses=True, driver_info=None)
        with pytest.raises(ValueError, match="decode_responses"):
            RedisKeyValueStore(client=client)

    async def test_a_client_of_pymongo(self) -> None:
        place = await asyncio.to_thread(MongoPlace)
        client = await asyncio.to_thread(pymongo.AsyncMongoClient[dict[str, Any]], place.server)
        await self.used_from_two_loops(MongoKeyValueStore(client=client, collection=place.stem))
        assert await client["perdure"][f"{place.stem}_values"].count_documents({}) == 1
        await client.close()
        await place.close()


class TestWhatLiesThere:
    """The content of the database."""

    async def test_postgres_has_bytes_and_instants_in_microseconds(self) -> None:
        place = await asyncio.to_thread(PostgresPlace)
        kv: Any = await place.open()
        await kv.set("a", "\0\U0001f600")
        await kv.set("b", "x", 3600)
        rows = await place.ask(
            f"SELECT key, value, expires_at - extract(epoch FROM now()) * 1e6 FROM {place.schema}.perdure_values"
        )
        found = {row[0]: row for row in rows}
        assert tuple(found["a"]) == ("a", "\0\U0001f600".encode(), None)
        assert 3500e6 < found["b"][2] <= 3600e6
        await kv.close()
        await place.close()

    async def test_redis_itself_expires_what_has_a_ttl(self) -> None:
        place = await asyncio.to_thread(RedisPlace)
        kv: Any = await place.open()
        await kv.set("a", "\0\U0001f600")
        await kv.set("b", "x", 0.0001)
        await kv.set("c", "x", 3600)
        async with redis.asyncio.Redis.from_url(place.url, driver_info=None) as client:
            assert await client.get(f"{place.table}:values::a") == "\0\U0001f600".encode()
            assert await client.pttl(f"{place.table}:values::a") == -1
            assert 3500e3 < await client.pttl(f"{place.table}:values::c") <= 3600e3
        await kv.close()
        await place.close()

    async def test_mongo_has_text_and_an_index_that_removes_what_has_expired(self) -> None:
        place = await asyncio.to_thread(MongoPlace)
        kv: Any = await place.open()
        await kv.set("a", "$text")
        await kv.set("b", "\ud800", 3600)
        client = await asyncio.to_thread(pymongo.AsyncMongoClient[dict[str, Any]], place.server)
        collection = client["perdure"][f"{place.stem}_values"]
        assert await collection.find_one({"_id": ":a"}) == {"_id": ":a", "value": "$text"}
        found = await collection.find_one({"_id": ":b"})
        assert found is not None
        assert found["value"] == b"\xed\xa0\x80"
        index = (await collection.index_information())["expires_at_1"]
        assert index["expireAfterSeconds"] == 0
        await client.close()
        await kv.close()
        await place.close()


async def test_renewing_and_sweeping_the_same_rows_at_once_ends_well() -> None:
    place = await asyncio.to_thread(PostgresPlace)
    stores: list[Any] = [await place.open() for _ in range(3)]

    async def renew(kv: Any, name: str) -> None:
        for n in range(60):
            await asyncio.gather(*(kv.set(f"key {key}", f"{name} {n}", 0.002) for key in range(8)))
        await asyncio.gather(*(kv.set(f"key {key}", "for good") for key in range(8)))

    await asyncio.gather(*(renew(kv, name) for kv, name in zip(stores, "abc", strict=True)))
    await stores[0].set("writer", "")
    assert [await stores[1].get(f"key {key}") for key in range(8)] == ["for good"] * 8
    assert await place.count() == 9
    for kv in stores:
        await kv.close()
    await place.close()


async def test_postgres_may_stand_behind_a_pooler() -> None:
    place = await asyncio.to_thread(PostgresPlace)
    await place.make()
    pooler = await asyncio.to_thread(_started, partial(PgBouncer, place.server, pool_size=2))
    table = place.schema
    kv: Any = PostgresKeyValueStore(pooler.dsn, table=table)
    await asyncio.gather(*(kv.set(f"{n}", f"{n}", 1 if n % 2 else None) for n in range(50)))
    assert await asyncio.gather(*(kv.get(f"{n}") for n in range(0, 50, 2))) == [f"{n}" for n in range(0, 50, 2)]
    assert await kv.delete("0") is True
    assert kv._connections.behind_pooler
    await kv.close()
    await asyncio.to_thread(pooler.remove)
    await place.ask(f"DROP TABLE {table}_values")
    await place.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--appendonly", "no"), "has no append-only file, so a restart of the server loses what was set"),
        (("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"), "throws keys away when its memory is full"),
    ],
)
async def test_a_redis_server_that_forgets_is_used_with_a_warning(options: tuple[str, ...], reason: str) -> None:
    server = await asyncio.to_thread(_started, partial(RedisServer, *options))
    kv = RedisKeyValueStore(server.url)
    with pytest.warns(PerdureWarning, match=reason):
        await kv.set("a", "1")
    assert await kv.get("a") == "1"
    await kv.close()
    await asyncio.to_thread(server.remove)


async def test_a_store_that_was_only_dropped_gives_its_connections_back() -> None:
    server = await asyncio.to_thread(_started, RedisServer)
    kv = RedisKeyValueStore(server.url)
    await kv.set("a", "1")
    async with redis.asyncio.Redis.from_url(server.url, driver_info=None) as client:
        assert len(await client.client_list()) == 2
        del kv
        async with asyncio.timeout(PATIENCE):
            while len(await client.client_list()) > 1:  # noqa: ASYNC110 - the server decides
                await asyncio.sleep(0.01)
    await asyncio.to_thread(server.remove)


def test_a_table_in_a_search_path_is_another_place() -> None:
    dsn = "postgresql://h/d"
    assert PostgresKeyValueStore(with_search_path(dsn, "a")).place != PostgresKeyValueStore(with_search_path(dsn, "b")).place


@pytest.mark.parametrize("dsn", ["redis://h", "postgresql://h/d", "mongodb://h", "sqlite:///x.db", "files:x"])
def test_a_handle_cannot_be_carried_into_another_process(dsn: str) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(open_key_value_store(dsn))
