import asyncio
import builtins
import gc
import logging
import os
import re
import time
from typing import Any
from urllib.parse import urlsplit

import asyncmy
import msgspec
import pytest
from asyncmy.constants import CLIENT

from perdure.backends.mysql import MysqlStore
from perdure.backends.mysql.address import parse_address
from perdure.backends.mysql.connections import MysqlConnections
from perdure.backends.mysql.errors import map_error
from perdure.backends.sql import Session, reading
from perdure.errors import LeaseLost, PersistenceError, RunNotFound
from perdure.testing.contract.world import EXPIRED, NOW, TTL, entry, in_another_loop, new_run, outcomes, signals
from perdure.testing.processes import process_pool
from tests.backends.mysql.conftest import ask
from tests.servers.mysql import MysqlServer

STRICT = "SET sql_mode = 'STRICT_ALL_TABLES'"


async def pool_of(dsn: str, **options: Any) -> Any:
    """A pool as a program has it: REPEATABLE READ, and nothing is committed by itself."""
    given = {"minsize": 1, "maxsize": 3, "client_flag": CLIENT.FOUND_ROWS, "init_command": STRICT, **options}
    return await asyncmy.create_pool(**parse_address(dsn).arguments(), **given)


async def close(pool: Any) -> None:
    pool.close()
    await pool.wait_closed()


def _set_up(dsn: str) -> bool:
    async def work() -> bool:
        store = MysqlStore(dsn)
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


async def test_a_schema_that_was_begun_by_somebody_who_was_killed_is_completed(dsn: str, store: MysqlStore) -> None:
    await store.setup()
    await ask(dsn, "DELETE FROM perdure_meta")
    await ask(dsn, "DROP TABLE perdure_items")
    other = MysqlStore(dsn)
    await other.setup()
    assert await other.items("run", "out") == []
    await other.close()


async def test_without_auto_migrate_nothing_is_created(dsn: str) -> None:
    store = MysqlStore(dsn, auto_migrate=False)
    with pytest.raises(PersistenceError, match="auto_migrate is off"):
        await store.get("run")
    assert await ask(dsn, "SHOW TABLES") == ()
    await store.setup()
    assert await store.get("run") is None
    await store.close()


async def test_tables_of_another_version_are_left_alone(dsn: str, store: MysqlStore) -> None:
    await store.setup()
    await ask(dsn, "UPDATE perdure_meta SET value = 99 WHERE name = 'schema_version'")
    other = MysqlStore(dsn)
    with pytest.raises(PersistenceError, match="schema version 99"):
        await other.get("run")
    await other.close()


async def test_tables_that_cannot_roll_back_are_refused(dsn: str, store: MysqlStore) -> None:
    await store.setup()
    await ask(dsn, "ALTER TABLE perdure_meta ENGINE = MyISAM")
    other = MysqlStore(dsn)
    with pytest.raises(PersistenceError, match=r"perdure_meta \(MyISAM\) cannot roll back"):
        await other.get("run")
    await other.close()


async def test_a_password_is_never_shown(dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(MysqlConnections, "PATIENCE", 0.0)
    caplog.set_level(logging.DEBUG)
    password = urlsplit(dsn).password or ""
    for wrong in (dsn, dsn.replace(password, f"{password}x"), re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:1", dsn)):
        store = MysqlStore(wrong)
        assert password not in f"{store!r} {store._connections.address!r}"
        assert password not in "".join(store.key)
        (answer,) = await outcomes([store.setup()])
        assert isinstance(answer, PersistenceError) == (wrong is not dsn)
        assert password not in f"{answer!r} {getattr(answer, '__cause__', None)!r}"
        await store.close()
    for bad in ("postgresql://u:secret@h/d", "mysql://u:secret@[h/d", "mysql://u:secret@h:port/d", "mysql://u:secret@h/"):
        with pytest.raises(ValueError, match="MySQL DSN") as refusal:
            MysqlStore(bad)
        assert "secret" not in repr(refusal.value)
        assert refusal.value.__suppress_context__ or refusal.value.__context__ is None
    assert password not in caplog.text


def test_a_password_that_an_error_repeats_is_taken_out() -> None:
    place = parse_address("mysql://user:secret@host/database")
    told = map_error(asyncmy.errors.OperationalError(2003, "cannot reach user:secret@host"), place.label, place.password)
    assert isinstance(told, PersistenceError)
    assert "secret" not in f"{told!r} {told} {told.__cause__!r}"
    assert "***" in str(told)


def test_a_dsn_is_read_without_loss() -> None:
    place = parse_address("mariadb://us%40er:p%2Fw%C3%B6rd@[::1]/my%20db?ssl_ca=/ca.pem")
    assert (place.host, place.port, place.database, place.user, place.password) == ("::1", 3306, "my db", "us@er", "p/wörd")
    assert place.arguments()["ssl"] == {"ca": "/ca.pem"}
    with pytest.raises(ValueError, match="no option 'tls'"):
        parse_address("mysql://u@h/d?tls=1")


async def test_a_password_may_have_any_characters(dsn: str) -> None:
    name = f"user_{os.urandom(4).hex()}"
    await ask(dsn, f"CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'pä$$/w@rd€😀'")
    await ask(dsn, f"GRANT ALL ON *.* TO {name}@'127.0.0.1'")
    store = MysqlStore(re.sub("//.*@", f"//{name}:p%C3%A4$$%2Fw%40rd%E2%82%AC%F0%9F%98%80@", dsn))
    await store.setup()
    await store.close()
    await ask(dsn, f"DROP USER {name}@'127.0.0.1'")


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "asyncmy":
            raise ImportError(name)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install perdure\[mysql\]"):
        MysqlStore("mysql://localhost/x")


def test_a_store_takes_a_dsn_or_a_pool() -> None:
    with pytest.raises(ValueError, match="one of them"):
        MysqlStore()


async def test_a_borrowed_pool_is_used_on_its_loop_and_left_open(dsn: str) -> None:
    pool = await pool_of(dsn)
    store = MysqlStore(pool=pool)
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    await in_another_loop(lambda: store.record(claim.lease, [entry(1)], now=NOW))
    sibling = store.sibling()
    assert sibling.key == store.key
    assert len(await in_another_loop(lambda: sibling.renew([claim.lease], TTL, now=NOW))) == 1
    async with store.transaction(claim.lease) as transaction:
        await transaction.record([entry(2)])
    await asyncio.wait_for(store.watch(0.01), 5)
    await sibling.close()
    await store.close()
    async with pool.acquire() as connection, connection.cursor() as cursor:
        await cursor.execute("SELECT seq FROM perdure_steps")
        assert [row[0] for row in await cursor.fetchall()] == [1, 2]
    await close(pool)


async def test_a_borrowed_pool_never_shows_what_is_old(dsn: str, store: MysqlStore) -> None:
    pool = await pool_of(dsn, maxsize=1)
    borrowed = MysqlStore(pool=pool)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    for seq in range(1, 6):
        assert len(await borrowed.journal("run")) == seq - 1
        await store.record(claim.lease, [entry(seq)])
    await borrowed.signal("run", "go", b"1")
    assert [row.seq for row in await store.inbox("run")] == [1]  # committed, though its pool commits nothing by itself
    arrived = await borrowed.suspend(claim.lease, wake_at=None, waiting_for=signals("go"))
    assert [row.seq for row in arrived] == [1]
    await borrowed.finish(claim.lease, "completed", b"1", consume=[1])
    assert await store.count(status="completed") == 1
    await borrowed.close()
    await close(pool)


async def test_a_borrowed_pool_is_left_as_it_was(dsn: str) -> None:
    pool = await pool_of(dsn, maxsize=1)
    borrowed = MysqlStore(pool=pool)
    await borrowed.setup()
    before = await _settings(pool)
    claim = (await borrowed.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    await borrowed.journal("run")
    await borrowed.signal("run", "go", b"1")
    with pytest.raises(RunNotFound):
        await borrowed.cancel("nobody")
    with pytest.raises(LeaseLost):
        await borrowed.record(msgspec.structs.replace(claim.lease, token="stale"), [entry(1)])
    assert await _settings(pool) == before
    await borrowed.close()
    await close(pool)


async def _settings(pool: Any) -> dict[str, str]:
    """What its one connection is set to, and which it is: a pool throws away one that comes back in a transaction."""
    names = "'tx_isolation', 'transaction_isolation', 'autocommit', 'sql_mode', 'pseudo_thread_id'"
    async with pool.acquire() as connection, connection.cursor() as cursor:
        await cursor.execute(f"SHOW VARIABLES WHERE Variable_name IN ({names})")
        settings = dict(await cursor.fetchall())
        await connection.rollback()
    assert "REPEATABLE-READ" in settings.values()
    return settings


async def test_each_statement_of_a_verb_sees_what_was_committed_before_it(dsn: str, store: MysqlStore) -> None:
    pool = await pool_of(dsn)
    borrowed = MysqlStore(pool=pool)
    await borrowed.setup()

    async def look(db: Session, _: bool) -> list[int]:
        numbers = []
        for n in range(3):
            numbers.append(await reading.count(db, "", None, None))
            await store.create(new_run(f"run-{n}"))
        return numbers

    assert await borrowed._connections.perform("", look) == [0, 1, 2]
    await borrowed.close()
    await close(pool)


async def test_a_borrowed_pool_with_other_escapes_writes_the_same(dsn: str, store: MysqlStore) -> None:
    modes = "SET sql_mode = 'STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT'"
    pool = await pool_of(dsn, init_command=modes, charset="latin1")
    borrowed = MysqlStore(pool=pool)
    run_id, payload = "\\' OR 1 = 1; -- 😀", bytes(range(256))
    claim = (await borrowed.create(new_run(run_id), ttl=TTL)).claim
    assert claim is not None
    await borrowed.record(claim.lease, [entry(1, payload=payload)])
    await store.record(claim.lease, [entry(2, payload=payload)])
    for handle in (borrowed, store):
        assert [line.payload for line in await handle.journal(run_id)] == [payload, payload]
    await borrowed.close()
    await close(pool)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"client_flag": 0}, "counts only changed rows; .*FOUND_ROWS"),
        ({"init_command": "SET sql_mode = ''"}, "cuts short what does not fit"),
    ],
)
async def test_a_pool_that_would_not_do_is_refused_with_the_remedy(dsn: str, options: dict[str, Any], reason: str) -> None:
    pool = await pool_of(dsn, **options)
    store = MysqlStore(pool=pool)
    with pytest.raises(PersistenceError, match=reason):
        await store.setup()
    with pytest.raises(PersistenceError, match=reason):
        await store.create(new_run())
    await store.close()
    await close(pool)


async def test_a_pool_that_was_closed_says_so(dsn: str) -> None:
    pool = await pool_of(dsn)
    store = MysqlStore(pool=pool)
    await store.setup()
    await close(pool)
    with pytest.raises(PersistenceError, match="its pool lends nothing any more"):
        await store.get("run")
    await store.close()


async def test_a_loop_that_blocks_the_renewals_of_its_pool_is_reported(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = await pool_of(dsn)
    store = MysqlStore(pool=pool)
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
    await close(pool)


async def test_a_heartbeat_does_not_depend_on_the_callers_loop(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    renewing = asyncio.ensure_future(store.sibling().renew([claim.lease], 10 * TTL))
    await asyncio.sleep(0)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:  # a step that computes
        pass
    assert (await renewing)[0] is not None
    row = await store.get("run")
    assert row is not None
    assert row.updated_at < time.time_ns() // 1000 - 100_000  # it was renewed while this loop was blocked


async def test_nothing_is_logged_of_what_the_server_warns(store: MysqlStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await store.create(new_run())
    await store.create(new_run())  # INSERT IGNORE of what is there
    assert [record for record in caplog.records if record.name.startswith("asyncmy")] == []


@pytest.mark.parametrize(
    ("settings", "durability"),
    [
        ([], "disk"),
        (["innodb-flush-log-at-trx-commit=2"], "process"),
        (["log-bin", "sync-binlog=0"], "process"),
        (["log-bin", "sync-binlog=1"], "disk"),
    ],
)
async def test_durability_is_what_the_server_is_set_to(settings: list[str], durability: str) -> None:
    server = MysqlServer(*settings, own=True)
    await asyncio.to_thread(server.start)
    store = MysqlStore(server.dsn)
    await store.setup()
    assert store.durability == durability
    await store.close()
    await asyncio.to_thread(server.remove)


async def test_cancelling_a_caller_leaves_the_store_usable(store: MysqlStore) -> None:
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    tasks = [asyncio.ensure_future(store.record(claim.lease, [entry(seq)])) for seq in range(1, 21)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks)
    assert {line.seq for line in await store.journal("run")} >= set(range(2, 21, 2))


async def test_children_and_their_parent_may_end_at_once(store: MysqlStore) -> None:
    parent = (await store.create(new_run("parent"), ttl=TTL)).claim
    assert parent is not None
    children = [
        (await store.create(new_run(f"child-{n}", parent_id="parent", parent_key=f"key-{n}"), ttl=TTL)).claim for n in range(10)
    ]
    ends = [store.finish(child.lease, "completed", b"1") for child in children if child is not None]
    async with asyncio.timeout(10):
        await asyncio.gather(*ends, store.finish(parent.lease, "completed", b"1"))
    assert await store.count(status="completed") == 11


def _in_a_fork(store: MysqlStore) -> int:
    """What a forked child's exit code says: 0 when it read the run and created another."""
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_work_in_fork(store))
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def _work_in_fork(store: MysqlStore) -> None:
    async with asyncio.timeout(10):
        if await store.get("run") is None:
            raise LookupError
        await store.create(new_run("child"))
        await store.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_store_can_be_used_on_both_sides_of_a_fork(dsn: str) -> None:
    store = MysqlStore(dsn)
    asyncio.run(_create(store, "run"))
    assert _in_a_fork(store) == 0
    asyncio.run(_create(store, "parent"))
    assert asyncio.run(_count_and_close(store)) == 3


async def _create(store: MysqlStore, run_id: str) -> None:
    await store.create(new_run(run_id))


async def _count_and_close(store: MysqlStore) -> int:
    number = await store.count()
    await store.close()
    return number


async def _connections(dsn: str) -> int:
    database = dsn.rpartition("/")[2]
    open_ones = "SELECT count(*) FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db"
    return int((await ask(dsn, f"{open_ones} = '{database}'"))[0][0])


async def _are_gone(dsn: str) -> None:
    async with asyncio.timeout(5):
        while await _connections(dsn):
            await asyncio.sleep(0.02)  # the server knows it, and tells nobody
            gc.collect()  # a timer of a lane may have held the store until now


async def test_a_store_that_is_only_dropped_gives_its_connections_back(dsn: str) -> None:
    store = MysqlStore(dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    async with store.transaction(claim.lease):
        assert await _connections(dsn) >= 2
    del store
    await _are_gone(dsn)


async def test_a_closed_store_has_no_connections(dsn: str) -> None:
    store = MysqlStore(dsn)
    claim = (await store.create(new_run(), ttl=TTL)).claim
    assert claim is not None
    async with store.transaction(claim.lease):
        pass
    await store.close()
    await _are_gone(dsn)


async def test_a_transaction_cancelled_while_it_begins_leaves_no_lock(store: MysqlStore) -> None:
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
    async with asyncio.timeout(10):
        assert await store.acquire("run", TTL, now=EXPIRED) is not None
