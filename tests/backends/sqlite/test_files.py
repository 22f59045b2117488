from __future__ import annotations

import asyncio
import gc
import os
import pickle
import shutil
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from perdure.backends.sqlite import SQLiteStore, connection
from perdure.errors import PersistenceError
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased
from tests.campaign import times
from tests.patience import PATIENCE

ODD_NAMES = ("a?mode=ro", "a#b", "50%25", "file:x", "a b;c", "ünï-😀", "'quoted\"", "-dash", "back\\slash")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_file_name_is_taken_literally(tmp_path: Path, name: str) -> None:
    store = SQLiteStore(tmp_path / name)

    async def use() -> None:
        await store.create(new_run("run"))
        await store.close()

    asyncio.run(use())
    assert (tmp_path / name).is_file()
    assert {file.name for file in tmp_path.iterdir()} <= {name, f"{name}-wal", f"{name}-shm"}


@pytest.mark.parametrize("path", ["", ":memory:", "a\0b", b"bytes"])
def test_a_path_must_name_a_file(path: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="path"):
        SQLiteStore(path)


@pytest.mark.parametrize(
    "table",
    ['x"; DROP TABLE y; --', "a b", "", "1a", "a-b", "ä", "sqlite_x", "a" * 64, "perdure\n", 'a"', "a;", None, b"a"],
)
def test_a_table_name_is_a_plain_word(path: Path, table: Any) -> None:
    with pytest.raises(ValueError, match="table"):
        SQLiteStore(path, table=table)
    assert not path.exists()


def test_the_longest_table_name_works(path: Path) -> None:
    store = SQLiteStore(path, table="T" + "a_9" * 20 + "ab")
    asyncio.run(_create(store))
    assert asyncio.run(store.count()) == 1


async def _create(store: SQLiteStore, run_id: str = "run") -> None:
    await store.create(new_run(run_id))


def test_tables_and_namespaces_of_one_file_are_apart(path: Path) -> None:
    stores = [SQLiteStore(path), SQLiteStore(path, table="other"), SQLiteStore(path, prefix="tenant")]

    async def use() -> list[int]:
        for n, store in enumerate(stores):
            await _create(store, f"run-{n}")
        return [await store.count() for store in stores]

    assert asyncio.run(use()) == [1, 1, 1]
    assert len({store.key for store in stores}) == 3


@pytest.mark.parametrize("prefix", ["a\0", "x" * 256, "é" * 128, None, {"$gt": ""}])
def test_a_prefix_is_checked(path: Path, prefix: Any) -> None:
    with pytest.raises(ValueError if isinstance(prefix, str) else TypeError, match="prefix"):
        SQLiteStore(path, prefix=prefix)


def test_a_new_file_belongs_to_its_owner_alone(store: SQLiteStore, path: Path) -> None:
    old = os.umask(0)
    try:
        asyncio.run(_create(store))
    finally:
        os.umask(old)
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "no" / "such" / "runs.db")
    with pytest.raises(PersistenceError, match=r"directory .*such.* does not exist"):
        asyncio.run(_create(store))
    (tmp_path / "no" / "such").mkdir(parents=True)
    asyncio.run(_create(store))


@pytest.mark.parametrize(
    "content", [b"this is no database, but a text that is long enough" * 40, b"SQLite format 3\0" + b"\xff" * 4000]
)
def test_a_file_that_is_no_database_is_refused_and_left_alone(store: SQLiteStore, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(PersistenceError, match=r"runs\.db"):
        asyncio.run(_create(store))
    assert path.read_bytes() == content


def test_a_damaged_database_is_an_error_that_names_the_file(store: SQLiteStore, path: Path) -> None:
    asyncio.run(_create(store))
    asyncio.run(store.close())
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(PersistenceError, match=r"runs\.db"):
        asyncio.run(SQLiteStore(path).list())


@pytest.mark.parametrize(
    "use", [lambda store: _create(store, "b"), lambda store: store.get("a"), lambda store: store.claim(1, 60, [("flow", 1)])]
)
def test_a_deleted_file_is_an_error_and_no_new_database(store: SQLiteStore, path: Path, use: Any) -> None:
    asyncio.run(_create(store, "a"))
    asyncio.run(store.count())
    moved = path.rename(path.with_name("moved.db"))
    with pytest.raises(PersistenceError, match="deleted or replaced"):
        asyncio.run(use(store))
    assert not path.exists()
    moved.rename(path)
    assert asyncio.run(store.count()) == 1


def test_a_replaced_file_is_an_error(store: SQLiteStore, path: Path) -> None:
    asyncio.run(_create(store, "a"))
    shutil.copy(path, path.with_name("copy.db"))
    path.with_name("copy.db").rename(path)
    for _ in range(2):
        with pytest.raises(PersistenceError, match="deleted or replaced"):
            asyncio.run(_create(store, "b"))
    asyncio.run(store.close())


def _delete(file: Path) -> None:
    file.unlink()


def _replace(file: Path) -> None:
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").rename(file)


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("lose", [_delete, _replace])
@pytest.mark.parametrize(
    "use", [lambda store: _create(store, "b"), lambda store: store.get("a"), lambda store: store.claim(1, 60, [("flow", 1)])]
)
def test_a_log_that_was_deleted_or_replaced_stops_the_store_and_nothing_acknowledged_is_lost(
    store: SQLiteStore, path: Path, suffix: str, lose: Callable[[Path], None], use: Any
) -> None:
    async def work() -> None:
        await _create(store, "a")
        await store.count()  # opens the reader
        await asyncio.to_thread(lose, Path(f"{path}{suffix}"))
        for _ in range(2):
            with pytest.raises(PersistenceError, match=rf"runs\.db{suffix}.* deleted or replaced while .*tried again"):
                await use(store)
        await store.close()

    asyncio.run(work())
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    reopened = SQLiteStore(path)
    assert asyncio.run(reopened.get("a")) is not None
    asyncio.run(_create(reopened, "b"))


async def test_a_transaction_in_a_log_that_was_deleted_is_refused(store: SQLiteStore, path: Path) -> None:
    created = await store.create(new_run("a"), ttl=60)
    assert created.claim is not None
    await asyncio.to_thread(Path(f"{path}-wal").unlink)
    with pytest.raises(PersistenceError, match="deleted or replaced"):
        async with store.transaction(created.claim.lease):
            pass
    await store.close()


OPERATE: Final = """
import sqlite3, sys
for _ in range(3):
    database, copy = sqlite3.connect(sys.argv[1], isolation_level=None), sqlite3.connect(":memory:")
    for statement in sys.argv[2:]:
        try:
            database.execute(statement).fetchall()
        except sqlite3.OperationalError as busy:
            assert "locked" in str(busy), busy
    database.backup(copy)
    database.close()
"""


async def test_what_operators_do_to_a_database_in_use_is_no_alarm(store: SQLiteStore, path: Path) -> None:
    """Another process opens and closes it, checkpoints, vacuums, backs up, and tries to change the journal mode."""
    statements = ("PRAGMA wal_checkpoint(TRUNCATE)", "VACUUM", "PRAGMA journal_mode = DELETE", "PRAGMA journal_mode = WAL")
    for number in range(3):
        await _create(store, f"run-{number}")
        operator = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OPERATE, str(path), "PRAGMA busy_timeout = 100", *statements
        )
        assert await operator.wait() == 0
    assert await store.count() == 3
    other = SQLiteStore(path)
    created = await other.create(new_run("leased"), ttl=60)
    assert created.claim is not None
    for _ in range(3):  # a connection of this process that comes and goes
        async with store.transaction(created.claim.lease):
            pass
    await other.close()
    await store.close()
    await _create(SQLiteStore(path), "after all had closed, and the log was removed")


async def test_stores_that_are_opened_and_closed_together_see_one_log(path: Path) -> None:
    async def use(number: int) -> None:
        for turn in range(times(20)):
            store = SQLiteStore(path)
            await store.create(new_run(f"{number}-{turn}"))
            await store.close()

    await asyncio.gather(*(use(number) for number in range(4)))


def test_a_watcher_does_not_outlive_the_file_for_long(store: SQLiteStore, path: Path) -> None:
    async def watch() -> None:
        await store.setup()
        watching = asyncio.create_task(store.watch(60))
        await asyncio.sleep(0)
        await store.renew([], 60)  # queued behind the watcher, which is in its place by now
        await asyncio.to_thread(path.unlink)
        async with asyncio.timeout(PATIENCE):
            await watching

    asyncio.run(watch())


def test_without_auto_migrate_neither_the_file_nor_a_table_is_created(path: Path) -> None:
    store = SQLiteStore(path, auto_migrate=False)
    with pytest.raises(PersistenceError, match="setup"):
        asyncio.run(store.list())
    assert not path.exists()
    sqlite3.connect(path).close()
    with pytest.raises(PersistenceError, match="setup"):
        asyncio.run(store.list())
    asyncio.run(store.setup())
    asyncio.run(_create(store))


def test_a_newer_schema_is_refused(store: SQLiteStore, path: Path) -> None:
    asyncio.run(_create(store))
    asyncio.run(store.close())
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE perdure_meta SET value = 99")
    database.close()
    with pytest.raises(PersistenceError, match=r"version 99 .* upgrade"):
        asyncio.run(_create(SQLiteStore(path), "b"))


def test_a_database_without_wal_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_use_wal", lambda _: "delete")
    with pytest.raises(PersistenceError, match="local disk"):
        asyncio.run(_create(SQLiteStore(path)))


def test_a_database_in_another_encoding_is_refused(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA encoding = 'UTF-16'")
    database.execute("CREATE TABLE t (a)")
    database.close()
    with pytest.raises(PersistenceError, match="UTF-8"):
        asyncio.run(_create(SQLiteStore(path)))


def test_durability_is_what_the_database_says(path: Path) -> None:
    store = SQLiteStore(path, synchronous="normal")
    asyncio.run(_create(store))
    assert store.durability == "process"
    stricter = SQLiteStore(path)
    asyncio.run(_create(stricter, "b"))
    assert (store.durability, stricter.durability) == ("disk", "disk")
    assert store._database.writer.synchronous == 2


def test_synchronous_is_checked(path: Path) -> None:
    with pytest.raises(ValueError, match="synchronous"):
        SQLiteStore(path, synchronous="off")  # type: ignore[arg-type]


def test_stores_on_one_real_path_share_their_threads(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    one, two = SQLiteStore(path), SQLiteStore(tmp_path / "link" / "runs.db")
    assert one.key == two.key
    asyncio.run(_create(one))
    asyncio.run(_create(two, "b"))
    assert one._database is two._database
    threads = _threads(one)
    asyncio.run(one.close())
    asyncio.run(two.count())
    asyncio.run(two.close())
    _wait_for(lambda: not any(thread.is_alive() for thread in threads))


def _threads(store: SQLiteStore) -> list[threading.Thread]:
    threads = [thread._thread for thread in store._database.threads]
    return [thread for thread in threads if thread is not None]


def test_a_store_that_is_only_dropped_ends_its_threads(path: Path) -> None:
    store = SQLiteStore(path)
    asyncio.run(_create(store))
    asyncio.run(store.count())
    threads = _threads(store)
    assert [thread.daemon for thread in threads] == [True, True]
    del store
    gc.collect()
    _wait_for(lambda: not any(thread.is_alive() for thread in threads))


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_closing_leaves_one_file(store: SQLiteStore, path: Path) -> None:
    asyncio.run(_create(store))
    asyncio.run(store.count())
    asyncio.run(store.close())
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]


def test_a_store_cannot_be_pickled(store: SQLiteStore) -> None:
    with pytest.raises(TypeError, match="path"):
        pickle.dumps(store)


def test_a_new_store_works_after_the_last_was_closed(path: Path) -> None:
    for n in range(5):
        store = SQLiteStore(path)
        asyncio.run(_create(store, f"run-{n}"))
        asyncio.run(store.close())
    assert asyncio.run(SQLiteStore(path).count()) == 5


async def test_the_log_does_not_grow_without_bound(store: SQLiteStore, path: Path) -> None:
    lease = await create_leased(store, "run")
    for n in range(200):
        await store.report(lease, b"x" * 100_000 + b"%d" % n)
        await store.get("run")
    size = (await asyncio.to_thread(Path(f"{path}-wal").stat)).st_size
    assert size < 64 << 20
