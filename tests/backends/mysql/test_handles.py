import asyncio
import logging
import os
import re
import time
from typing import Any

import asyncmy
import msgspec
import pytest

from perdure.backends.mysql import MysqlStore
from perdure.backends.mysql.address import parse_address
from perdure.backends.mysql.errors import map_error
from perdure.backends.sql import Session, listing
from perdure.errors import LeaseLost, PersistenceError, RunNotFound
from perdure.model.run_filter import EVERY_RUN, RunFilter
from perdure.testing.contract.world import TTL, entry, new_run, signals
from tests.backends.mysql.conftest import ask
from tests.backends.operators import close_mysql_pool, mysql_pool
from tests.servers.mysql import MysqlServer


async def test_a_schema_that_was_begun_by_somebody_who_was_killed_is_completed(dsn: str, store: MysqlStore) -> None:
    await store.setup()
    await ask(dsn, "DELETE FROM perdure_meta")
    await ask(dsn, "DROP TABLE perdure_items")
    other = MysqlStore(dsn)
    await other.setup()
    assert await other.items("run", "out") == []
    await other.close()


async def test_tables_that_cannot_roll_back_are_refused(dsn: str, store: MysqlStore) -> None:
    await store.setup()
    await ask(dsn, "ALTER TABLE perdure_meta ENGINE = MyISAM")
    other = MysqlStore(dsn)
    with pytest.raises(PersistenceError, match=r"perdure_meta \(MyISAM\) cannot roll back"):
        await other.get("run")
    await other.close()


def test_a_password_that_an_error_repeats_is_taken_out() -> None:
    place = parse_address("mysql://user:secret@host/database")
    told = map_error(asyncmy.errors.OperationalError(2003, "cannot reach user:secret@host"), place.label, place.password)
    assert isinstance(told, PersistenceError)
    assert "secret" not in f"{told!r} {told} {told.__cause__!r}"
    assert "***" in str(told)


def test_a_dsn_is_read_without_loss() -> None:
    place = parse_address("mariadb://us%40er:p%2Fw%C3%B6rd@[::1]/my%20db?ssl_ca=/ca.pem")
    assert (place.host, place.port, place.database, place.user, place.password) == ("::1", 3306, "my db", "us@er", "p/wörd")
    assert (place.options["ssl_ca"], place.ssl_mode) == ("/ca.pem", "VERIFY_IDENTITY")
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


def test_a_store_takes_a_dsn_or_a_pool() -> None:
    with pytest.raises(ValueError, match="one of them"):
        MysqlStore()


async def test_a_borrowed_pool_never_shows_what_is_old(dsn: str, store: MysqlStore) -> None:
    pool = await mysql_pool(dsn, maxsize=1)
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
    assert await store.count(RunFilter(status=("completed",))) == 1
    await borrowed.close()
    await close_mysql_pool(pool)


async def test_a_borrowed_pool_is_left_as_it_was(dsn: str) -> None:
    pool = await mysql_pool(dsn, maxsize=1)
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
    await close_mysql_pool(pool)


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
    pool = await mysql_pool(dsn)
    borrowed = MysqlStore(pool=pool)
    await borrowed.setup()

    async def look(db: Session, _: bool) -> list[int]:
        numbers = []
        for n in range(3):
            numbers.append(await listing.count(db, EVERY_RUN))
            await store.create(new_run(f"run-{n}"))
        return numbers

    assert await borrowed._connections.perform("", look) == [0, 1, 2]
    await borrowed.close()
    await close_mysql_pool(pool)


async def test_a_borrowed_pool_with_other_escapes_writes_the_same(dsn: str, store: MysqlStore) -> None:
    modes = "SET sql_mode = 'STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT'"
    pool = await mysql_pool(dsn, init_command=modes, charset="latin1")
    borrowed = MysqlStore(pool=pool)
    run_id, payload = "\\' OR 1 = 1; -- 😀", bytes(range(256))
    claim = (await borrowed.create(new_run(run_id), ttl=TTL)).claim
    assert claim is not None
    await borrowed.record(claim.lease, [entry(1, payload=payload)])
    await store.record(claim.lease, [entry(2, payload=payload)])
    for handle in (borrowed, store):
        assert [line.payload for line in await handle.journal(run_id)] == [payload, payload]
    await borrowed.close()
    await close_mysql_pool(pool)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"client_flag": 0}, "counts only changed rows; .*FOUND_ROWS"),
        ({"init_command": "SET sql_mode = ''"}, "cuts short what does not fit"),
    ],
)
async def test_a_pool_that_would_not_do_is_refused_with_the_remedy(dsn: str, options: dict[str, Any], reason: str) -> None:
    pool = await mysql_pool(dsn, **options)
    store = MysqlStore(pool=pool)
    with pytest.raises(PersistenceError, match=reason):
        await store.setup()
    with pytest.raises(PersistenceError, match=reason):
        await store.create(new_run())
    await store.close()
    await close_mysql_pool(pool)


async def test_a_pool_that_was_closed_says_so(dsn: str) -> None:
    pool = await mysql_pool(dsn)
    store = MysqlStore(pool=pool)
    await store.setup()
    await close_mysql_pool(pool)
    with pytest.raises(PersistenceError, match="its pool lends nothing any more"):
        await store.get("run")
    await store.close()


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
