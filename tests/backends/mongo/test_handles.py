import asyncio
import builtins
import gc
import os
import time
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from pymongo import AsyncMongoClient

from perdure.backends.mongo import MongoStore
from perdure.backends.mongo.address import parse_address, settings_for
from perdure.errors import PersistenceError
from perdure.testing.contract.world import NOW, TTL, entry, in_another_loop, new_run, outcomes
from tests.servers.mongo import MongoServer

PASSWORD = "s3cr:t/w@rd"
ESCAPED = "s3cr%3At%2Fw%40rd"


async def test_without_auto_migrate_nothing_is_created(new_dsn: str) -> None:
    store = MongoStore(new_dsn, auto_migrate=False)
    with pytest.raises(PersistenceError, match="auto_migrate is off"):
        await store.get("run")
    await store.setup()
    assert await store.get("run") is None
    await store.close()


async def test_collections_of_another_version_are_left_alone(new_dsn: str) -> None:
    store, other = MongoStore(new_dsn), MongoStore(new_dsn)
    await store.setup()
    await store._connections.run(store._connections.collections("").meta.update_one({}, {"$set": {"version": 99}}))
    with pytest.raises(PersistenceError, match="schema version 99"):
        await other.get("run")
    await store.close()
    await other.close()


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


async def test_a_password_is_never_shown(dsn: str, store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.backends.mongo.connections.MongoConnections.PATIENCE", 0.0)
    await store.setup()
    database = store._connections.collections("").database
    roles = [{"role": "readWrite", "db": database.name}]
    await store._connections.run(database.command("createUser", "ada", pwd=PASSWORD, roles=roles))
    parts = urlsplit(dsn)
    right, wrong, away = (
        urlunsplit(parts._replace(netloc=f"ada:{ESCAPED}{tail}")).replace("?", f"?authSource={database.name}&")
        for tail in (f"@{parts.netloc}", f"x@{parts.netloc}", "@127.0.0.1:1")
    )
    away += "&serverSelectionTimeoutMS=500"
    for url in (right, wrong, away):
        other = MongoStore(url)
        (answer,) = await outcomes([other.setup()])
        assert isinstance(answer, PersistenceError) == (url is not right)
        shown = f"{other!r} {other.key} {other._connections.address!r} {answer!r} {getattr(answer, '__cause__', None)!r}"
        assert not any(secret in shown for secret in (PASSWORD, ESCAPED))
        await other.close()
    await store._connections.run(database.command("dropUser", "ada"))
    unescaped = MongoStore(f"mongodb://ada:{PASSWORD}@127.0.0.1:1/")
    (answer,) = await outcomes([unescaped.setup()])
    assert isinstance(answer, PersistenceError)
    assert PASSWORD not in f"{unescaped!r} {answer!r} {answer.__cause__!r}"
    for bad in ("mysql://u:secret@h/d", "mongodb://", "mongodb:u:secret@h"):
        with pytest.raises(ValueError, match="MongoDB URL") as refusal:
            MongoStore(bad)
        assert "secret" not in repr(refusal.value)


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pymongo":
            raise ImportError(name)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install perdure\[mongo\]"):
        MongoStore("mongodb://localhost/x")


def test_a_store_takes_a_url_or_a_client() -> None:
    with pytest.raises(ValueError, match="a URL or a client"):
        MongoStore()


async def test_a_borrowed_client_is_used_on_its_loop_and_left_open(dsn: str) -> None:
    client: AsyncMongoClient[dict[str, Any]] = await asyncio.to_thread(AsyncMongoClient, dsn, tz_aware=True)
    name = urlsplit(dsn).path[1:]
    store = MongoStore(client=client, database=name)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    await in_another_loop(lambda: store.record(claim.lease, [entry(1)]))
    sibling = store.sibling()
    assert sibling.key == store.key
    assert len(await in_another_loop(lambda: sibling.renew([claim.lease], TTL))) == 1
    await asyncio.wait_for(store.watch(0.01), 60)
    await sibling.close()
    await store.close()
    assert await client[name]["perdure_runs"].count_documents({}) == 1
    await client.close()


async def test_a_watcher_is_told_and_does_not_look_for_itself(dsn: str, store: MongoStore) -> None:
    other = MongoStore(dsn)
    claim = (await other.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    await store.setup()
    await store.watch(5)  # opens the stream
    assert store._change_stream.is_live
    watching = asyncio.create_task(store.watch(60))
    await asyncio.sleep(0)
    await other.record(claim.lease, [entry(1)])
    await other.renew([claim.lease], TTL)
    await other.signal("run", "go", b"1")
    await asyncio.wait([watching], timeout=1)
    assert not watching.done()  # nothing became due
    await other.finish(claim.lease, "completed", b"1")
    async with asyncio.timeout(20):
        await watching
    began = time.monotonic()
    await store.watch(1.5)  # nothing happens, and polling would have ended it sooner
    assert time.monotonic() - began >= 1.4
    await other.close()


async def test_cancelling_a_caller_leaves_the_store_usable(store: MongoStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    tasks = [asyncio.ensure_future(store.record(claim.lease, [entry(seq)])) for seq in range(1, 21)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks)
    assert {line.seq for line in await store.journal("run")} >= set(range(2, 21, 2))


async def test_children_and_their_parent_may_end_at_once(store: MongoStore) -> None:
    parent = (await store.create(new_run("parent"), ttl=TTL)).claim
    assert parent is not None
    children = [
        (await store.create(new_run(f"child-{n}", parent_id="parent", parent_key=f"key-{n}"), ttl=TTL)).claim for n in range(6)
    ]
    ends = [store.finish(child.lease, "completed", b"1") for child in children if child is not None]
    async with asyncio.timeout(30):
        await asyncio.gather(*ends, store.finish(parent.lease, "completed", b"1"))
    assert await store.count(status="completed") == 7


def _in_a_fork(store: MongoStore) -> int:
    """What a forked child's exit code says: 0 when it read the run and created another."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_work_in_fork(store))
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def _work_in_fork(store: MongoStore) -> None:
    async with asyncio.timeout(30):
        if await store.get("run") is None:
            raise LookupError
        await store.create(new_run("child"))
        await store.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:UserWarning")
def test_a_store_can_be_used_on_both_sides_of_a_fork(dsn: str) -> None:
    store = MongoStore(dsn)
    asyncio.run(_create(store, "run"))
    assert _in_a_fork(store) == 0
    asyncio.run(_create(store, "parent"))
    assert asyncio.run(_count_and_close(store)) == 3


async def _create(store: MongoStore, run_id: str) -> None:
    await store.create(new_run(run_id))


async def _count_and_close(store: MongoStore) -> int:
    number = await store.count()
    await store.close()
    return number


async def _connections(client: AsyncMongoClient[dict[str, Any]], name: str) -> int:
    cursor = await client.admin.aggregate(
        [{"$currentOp": {"allUsers": True, "idleConnections": True}}, {"$match": {"appName": name}}]
    )
    return len(await cursor.to_list())


async def test_a_store_that_is_only_dropped_gives_its_connections_back(dsn: str) -> None:
    name = f"dropped-{os.getpid()}"
    client: AsyncMongoClient[dict[str, Any]] = await asyncio.to_thread(AsyncMongoClient, dsn)
    store = MongoStore(f"{dsn}&appName={name}")
    await store.create(new_run())
    assert await _connections(client, name) >= 1
    del store
    async with asyncio.timeout(30):
        while await _connections(client, name):  # the server knows it, and tells nobody
            gc.collect()  # the thread of the connections may have held on to the last verb for a moment longer
            await asyncio.sleep(0.1)
    await client.close()


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
