import asyncio
import builtins
import gc
import os
import re
import time
from typing import Any
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest

from perdure.backends.base.dsn import split_options
from perdure.backends.postgres import PostgresStore
from perdure.errors import PersistenceError
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, in_another_loop, new_run, outcomes
from perdure.testing.processes import process_pool


def _set_up(dsn: str) -> bool:
    async def work() -> bool:
        store = PostgresStore(dsn)
        await store.setup()
        created = await store.create(new_run(), now=NOW)
        await store.close()
        return created.is_new

    return asyncio.run(work())


async def test_16_processes_may_create_the_schema_at_once(dsn: str) -> None:
    def work() -> list[bool]:
        with process_pool(16) as pool:
            return list(pool.map(_set_up, [dsn] * 16))

    assert sum(await asyncio.to_thread(work)) == 1


async def test_without_auto_migrate_nothing_is_created(dsn: str) -> None:
    store = PostgresStore(dsn, auto_migrate=False)
    with pytest.raises(PersistenceError, match="auto_migrate is off"):
        await store.get("run")
    await store.setup()
    assert await store.get("run") is None
    await store.close()


async def test_tables_of_another_version_are_left_alone(dsn: str, store: PostgresStore) -> None:
    await store.setup()
    connection = await asyncpg.connect(dsn)
    await connection.execute("UPDATE perdure_meta SET value = 99")
    await connection.close()
    other = PostgresStore(dsn)
    with pytest.raises(PersistenceError, match="schema version 99"):
        await other.get("run")
    await other.close()


async def test_a_password_is_never_shown(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.backends.postgres.connections.PostgresConnections.PATIENCE", 0.0)
    password = urlsplit(dsn).password or ""
    for wrong in (dsn, dsn.replace(password, f"{password}x"), re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:1", dsn)):
        store = PostgresStore(wrong)
        assert password not in repr(store)
        assert password not in "".join(store.key)
        (answer,) = await outcomes([store.setup()])
        assert isinstance(answer, PersistenceError) == (wrong is not dsn)
        assert password not in f"{answer!r} {getattr(answer, '__cause__', None)!r}"
        await store.close()
    for bad in ("mysql://u:secret@h/d", "postgresql://u:secret@[h/d"):
        with pytest.raises(ValueError, match="PostgreSQL DSN") as refusal:
            PostgresStore(bad)
        assert "secret" not in repr(refusal.value)
        assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "asyncpg":
            raise ImportError(name)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install perdure\[postgres\]"):
        PostgresStore("postgresql://localhost/x")


async def test_a_borrowed_pool_is_used_on_its_loop_and_left_open(dsn: str) -> None:
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=3)
    store = PostgresStore(pool=pool)
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await in_another_loop(lambda: store.record(claim.lease, [entry(1)], now=NOW))
    sibling = store.sibling()
    assert sibling.key == store.key
    assert len(await in_another_loop(lambda: sibling.renew([claim.lease], TTL, now=NOW))) == 1
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(2)])
    await asyncio.wait_for(store.watch(0.01), 60)
    await sibling.close()
    await store.close()
    assert len(await pool.fetch("SELECT * FROM perdure_steps")) == 2
    await pool.close()


async def test_a_loop_that_blocks_the_renewals_of_its_pool_is_reported(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=3)
    store = PostgresStore(pool=pool)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    sibling = store.sibling()
    renewing = asyncio.create_task(in_another_loop(lambda: sibling.renew([claim.lease], 0.3)))
    await asyncio.sleep(0)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:  # a step that computes
        pass
    assert await renewing != [None]
    assert "event loop of the borrowed pool was blocked" in caplog.text
    await sibling.close()
    await store.close()
    await pool.close()


def test_options_of_ours_are_told_from_those_of_postgres() -> None:
    dsn, options = split_options("postgresql://u:p%40@h:1/d?sslmode=disable&table=shop&prefix=a%2Fb", {"table", "prefix"})
    assert (dsn, options) == ("postgresql://u:p%40@h:1/d?sslmode=disable", {"table": "shop", "prefix": "a/b"})


async def test_a_watcher_is_told_and_does_not_look_for_itself(
    dsn: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PostgresStore(dsn)
    await other.setup()
    await store.watch(5)  # opens the connection
    with monkeypatch.context() as patched:
        patched.setattr("perdure.backends.postgres.store.POLL_EVERY", 3600.0)
        for n in range(5):
            watching = asyncio.create_task(store.watch(3600))
            await asyncio.sleep(0)
            await other.create(new_run(f"run-{n}"))
            await asyncio.wait_for(watching, 60)
    began = time.monotonic()
    await store.watch(1.5)  # nothing happens, and polling would have ended it sooner
    assert time.monotonic() - began >= 1.4
    await other.close()


async def test_cancelling_a_caller_leaves_the_store_usable(store: PostgresStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    tasks = [asyncio.ensure_future(store.record(claim.lease, [entry(seq)])) for seq in range(1, 21)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks)
    assert {line.seq for line in await store.journal("run")} >= set(range(2, 21, 2))


async def test_children_and_their_parent_may_end_at_once(store: PostgresStore) -> None:
    parent = (await store.create(new_run("parent"), ttl=TTL)).claim
    assert parent is not None
    children = [
        (await store.create(new_run(f"child-{n}", parent_id="parent", parent_key=f"key-{n}"), ttl=TTL)).claim for n in range(10)
    ]
    ends = [store.finish(child.lease, "completed", b"1") for child in children if child is not None]
    async with asyncio.timeout(60):
        await asyncio.gather(*ends, store.finish(parent.lease, "completed", b"1"))
    assert await store.count(status="completed") == 11


def _in_a_fork(store: PostgresStore) -> int:
    """What a forked child's exit code says: 0 when it read the run and created another."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_work_in_fork(store))
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def _work_in_fork(store: PostgresStore) -> None:
    async with asyncio.timeout(60):
        if await store.get("run") is None:
            raise LookupError
        await store.create(new_run("child"))
        await store.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_store_can_be_used_on_both_sides_of_a_fork(dsn: str) -> None:
    store = PostgresStore(dsn)
    asyncio.run(_create(store, "run"))
    assert _in_a_fork(store) == 0
    asyncio.run(_create(store, "parent"))
    assert asyncio.run(_count_and_close(store)) == 3


async def _create(store: PostgresStore, run_id: str) -> None:
    await store.create(new_run(run_id))


async def _count_and_close(store: PostgresStore) -> int:
    number = await store.count()
    await store.close()
    return number


async def _connections(dsn: str, name: str) -> int:
    connection = await asyncpg.connect(dsn)
    number = await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = $1", name)
    await connection.close()
    return int(number)


async def test_a_store_that_is_only_dropped_gives_its_connections_back(dsn: str) -> None:
    name = f"dropped-{os.getpid()}"
    store = PostgresStore(f"{dsn}&application_name={name}")
    await store.create(new_run())
    await store.watch(5)
    assert await _connections(dsn, name) >= 2
    del store
    async with asyncio.timeout(60):
        while await _connections(dsn, name):  # the server knows it, and tells nobody
            gc.collect()  # the thread of the connections may have held on to the last verb for a moment longer
            await asyncio.sleep(0.02)


async def test_a_transaction_cancelled_while_it_begins_leaves_no_lock(store: PostgresStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    lease = claim.lease

    async def work() -> None:
        async with store.transaction(lease):
            await asyncio.sleep(60)

    for turns in range(30):
        task = asyncio.create_task(work())
        await asyncio.sleep(0.0005 * turns)
        task.cancel()
        await asyncio.wait([task])
    async with asyncio.timeout(60):
        assert await store.acquire("run", TTL, now=EXPIRED) is not None
