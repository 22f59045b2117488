import asyncio
from collections.abc import Callable
from typing import Any

import pymongo
import pytest

from perdure import stores
from perdure.backends.mongo import MongoStore
from perdure.backends.mongo.address import parse_address, settings_for
from perdure.errors import PersistenceError
from perdure.kv import MongoKeyValueStore
from perdure.testing.contract.world import NOW, new_run
from tests.backends.operators import PASSWORD
from tests.servers.mongo import MongoServer


async def test_stems_and_databases_are_apart(dsn: str) -> None:
    stores = [MongoStore(dsn), MongoStore(dsn, collection="shop"), MongoStore(dsn, prefix="a")]
    for store in stores:
        assert (await store.create(new_run(), now=NOW)).is_new
    assert len({store.key for store in stores}) == 3
    names = await stores[1]._connections.run(stores[1]._connections.collections("").database.list_collection_names())
    assert {"perdure_runs", "perdure_steps", "perdure_signals", "shop_runs", "shop_steps"} <= set(names)
    for store in stores:
        await store.close()


def test_the_database_is_the_option_or_the_path_or_perdure() -> None:
    assert parse_address("mongodb://h1,h2:1/shop?x=y", "option").database == "option"
    assert parse_address("mongodb://h1,h2:1/my%20shop?x=y", None).database == "my shop"
    assert [parse_address(url, None).database for url in ("mongodb://h", "mongodb://h/", "mongodb://h/?x=y")] == ["perdure"] * 3
    assert "maxPoolSize" not in settings_for("mongodb://h/?maxpoolsize=5")
    assert settings_for("mongodb+srv://h/d")["maxPoolSize"] == 20


@pytest.mark.parametrize("stem", ["", "1a", "a.b", "a$b", "a b", "x" * 101])
def test_a_stem_is_a_name(stem: str) -> None:
    with pytest.raises(ValueError, match="must be letters, digits"):
        MongoStore("mongodb://localhost/", collection=stem)


def test_a_password_that_is_not_escaped_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="can be read in two ways") as refusal:
        MongoStore(f"mongodb://ada:{PASSWORD}@127.0.0.1:1/")
    assert PASSWORD not in repr(refusal.value)


@pytest.mark.parametrize("make", [stores.mongo, MongoStore, MongoKeyValueStore])
def test_a_store_takes_a_url_or_an_asynchronous_client_and_says_so(make: Callable[..., Any]) -> None:
    plain: Any = pymongo.MongoClient(connect=False)
    client: Any = pymongo.AsyncMongoClient(connect=False)
    with pytest.raises(ValueError, match="a URL or a client"):
        make()
    with pytest.raises(
        TypeError, match=r"a MongoClient cannot be used; pass client=pymongo\.AsyncMongoClient\(url\), or the URL"
    ):
        make(client=plain)
    for positional in (plain, client):
        with pytest.raises(TypeError, match=r"the URL of a MongoDB server, not a \w+; pass a client as client="):
            make(positional)
    plain.close()


@pytest.mark.parametrize("make", [stores.mongo, MongoStore, MongoKeyValueStore])
def test_beside_a_client_the_url_names_the_database(make: Callable[..., Any]) -> None:
    client: Any = pymongo.AsyncMongoClient(connect=False)
    for url, options, database in (
        ("mongodb://elsewhere/shop", {}, "shop"),
        ("mongodb://elsewhere/shop", {"database": "other"}, "other"),
        ("mongodb://elsewhere", {}, "perdure"),
    ):
        connections = make(url, client=client, **options)._connections
        assert (connections.address.database, connections.address.hosts) == (database, f"client {id(client)}")
        assert connections.is_borrowed


async def test_a_server_that_stands_alone_is_refused_with_what_to_do() -> None:
    server = MongoServer(own=True, is_replica_set=False)
    await asyncio.to_thread(server.start)
    store = MongoStore(server.dsn)
    with pytest.raises(PersistenceError, match=r"start mongod with --replSet rs0, and run rs\.initiate\(\)"):
        await store.setup()
    await store.close()
    await asyncio.to_thread(server.remove)


async def test_durability_is_read_from_the_server(store: MongoStore) -> None:
    await store.setup()
    assert store.durability == "disk"  # one member, which keeps things
    connections, told = store._connections, {"setName": "rs0", "hosts": ["a:1", "b:1", "c:1"]}
    assert await connections.run(connections._durability(connections.collections(""), told)) == "replicated"
