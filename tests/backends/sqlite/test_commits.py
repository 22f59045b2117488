from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.backends.sqlite import SQLiteStore, connection
from perdure.backends.sqlite.session import SqliteSession
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Lease, Pulse
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased, record
from tests.campaign import times
from tests.patience import PATIENCE


def entry(seq: int, **fields: Any) -> Entry:
    return Entry(**{"seq": seq, "key": f"step-{seq}", **fields})


def commits(store: SQLiteStore) -> int:
    return store._database.writer.commits


async def test_a_hundred_records_at_once_share_commits(store: SQLiteStore) -> None:
    leases = [await create_leased(store, f"run-{n}") for n in range(100)]
    before = commits(store)
    await asyncio.gather(*(store.record(lease, [entry(1)]) for lease in leases))
    assert 0 < commits(store) - before < 20


async def test_a_one_step_run_costs_two_commits(store: SQLiteStore) -> None:
    await store.setup()
    before = commits(store)
    lease = await create_leased(store, "run")
    await store.finish(lease, "completed", b"1", entries=[entry(1)])
    assert commits(store) - before == 2


async def test_a_claim_of_nothing_takes_no_lock(store: SQLiteStore, path: Path) -> None:
    await store.create(new_run("later"), now=0)
    await store.hold("later")
    other = await asyncio.to_thread(_locking, path)
    try:
        assert (await store.claim(10, 60, [("flow", 1)])).claims == []
    finally:
        await asyncio.to_thread(other.close)


def _locking(path: Path) -> sqlite3.Connection:
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    return other


async def test_one_culprit_in_a_batch_fails_alone(store: SQLiteStore) -> None:
    leases = [await create_leased(store, f"run-{n}") for n in range(20)]
    too_large = entry(1, attempt=2**64)  # SQLite cannot hold it, and no check sees it before
    stale = Lease(run_id="run-7", epoch=1, token="", until=0)
    calls = [store.record(stale if n == 7 else lease, [too_large if n == 13 else entry(1)]) for n, lease in enumerate(leases)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers[7], LeaseLost)
    assert isinstance(answers[13], OverflowError)
    assert [n for n, answer in enumerate(answers) if not isinstance(answer, Pulse)] == [7, 13]
    assert [len(await store.journal(f"run-{n}")) for n in range(20)] == [0 if n in {7, 13} else 1 for n in range(20)]


async def test_a_refusal_leaves_its_batch_one_commit(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    await create_leased(store, "other")
    before = commits(store)
    stale = Lease(run_id="other", epoch=1, token="", until=0)
    answers = await asyncio.gather(  # all called in one turn, when they are awaited
        record(store, stale, range(1, 2)),
        record(store, lease, range(1, 2)),
        store.signal("nobody", "go", b""),
        return_exceptions=True,
    )
    assert [type(answer).__name__ for answer in answers] == ["LeaseLost", "NoneType", "RunNotFound"]
    assert commits(store) - before == 1


async def test_a_caller_that_is_cancelled_disturbs_nobody(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    randomness = random.Random(7)
    for round_ in range(times(300)):
        tasks = [asyncio.ensure_future(store.record(lease, [entry(round_ * 10 + n + 1)])) for n in range(10)]
        cancelled = randomness.sample(range(10), 5)
        for _ in range(randomness.randrange(4)):
            await asyncio.sleep(0)
        for n in cancelled:
            tasks[n].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        kept = [answer for n, answer in enumerate(answers) if n not in cancelled]
        assert kept == [Pulse(0, False)] * 5
    written = {entry.seq for entry in await store.journal("run")}
    assert len(written) >= times(300) * 5
    await store.finish(lease, "completed", b"1")


async def test_a_cancelled_verb_leaves_the_store_closable(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    tasks: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(store.record(lease, [entry(1)])),
        asyncio.create_task(store.claim(1, 60, [("flow", 1)])),
        asyncio.create_task(store.acquire("run", 60)),
        asyncio.create_task(store.watch(60)),
        asyncio.create_task(store.list()),
    ]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(PATIENCE):
        await store.close()


def test_a_loop_that_was_closed_meanwhile_disturbs_nobody(store: SQLiteStore) -> None:
    lease = asyncio.run(create_leased(store, "run"))
    loop = asyncio.new_event_loop()
    task = loop.create_task(record(store, lease, range(1, 2)))
    loop.call_soon(loop.stop)
    loop.run_forever()  # one turn: the record is with the thread
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    asyncio.run(record(store, lease, range(2, 4)))
    assert [line.seq for line in asyncio.run(store.journal("run"))][-2:] == [2, 3]


def test_thirty_two_threads_share_one_store(store: SQLiteStore) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            lease = asyncio.run(create_leased(store, name))
            asyncio.run(record(store, lease, range(1, 6)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"run-{n}",)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert asyncio.run(store.count()) == 32


class _FailingCommit:
    """A connection whose next COMMIT fails as the disk would."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, sql: str, *rest: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return self._real.execute(sql, *rest)


async def test_a_failed_commit_fails_the_batch_and_the_next_one_goes_on(store: SQLiteStore) -> None:
    leases = [await create_leased(store, f"run-{n}") for n in range(5)]
    writer = store._database.writer
    opened = writer._connection
    assert opened is not None
    failing: Any = _FailingCommit(opened.connection)
    opened.connection = failing
    answers = await asyncio.gather(*(store.record(lease, [entry(1)]) for lease in leases), return_exceptions=True)
    assert {type(answer) for answer in answers} == {PersistenceError}
    assert "input/output" in str(answers[0])
    assert isinstance(answers[0], PersistenceError)
    assert isinstance(answers[0].__cause__, sqlite3.OperationalError)
    assert writer._connection is not opened
    await asyncio.gather(*(store.record(lease, [entry(1)]) for lease in leases))
    assert [len(await store.journal(lease.run_id)) for lease in leases] == [1] * 5


async def test_a_database_locked_for_too_long_is_an_error_and_then_works_again(store: SQLiteStore, path: Path) -> None:
    store._database.file.busy_timeout = 0.05
    lease = await create_leased(store, "run")
    other = await asyncio.to_thread(_locking, path)
    with pytest.raises(PersistenceError, match="locked"):
        await store.record(lease, [entry(1)])
    await asyncio.to_thread(other.close)
    await store.record(lease, [entry(1)])


async def test_a_full_disk_is_an_error_and_keeps_what_was_acknowledged(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    await store.record(lease, [entry(1)])
    pages = await store._write(_limit_pages)
    assert pages > 0
    with pytest.raises(PersistenceError, match="full"):
        await store.record(lease, [entry(2, payload=b"x" * 2_000_000)])
    assert [line.seq for line in await store.journal("run")] == [1]
    await store.record(lease, [entry(2)])
    assert [line.seq for line in await store.journal("run")] == [1, 2]


async def _limit_pages(db: SqliteSession) -> int:
    database = db.channel.connection
    (pages,) = database.execute("PRAGMA page_count").fetchall()[0]
    database.execute(f"PRAGMA max_page_count = {pages + 20}").fetchall()
    return int(pages)


async def test_reads_go_on_while_a_write_waits_for_the_lock(store: SQLiteStore, path: Path) -> None:
    lease = await create_leased(store, "run")
    other = await asyncio.to_thread(_locking, path)
    waiting = asyncio.ensure_future(store.record(lease, [entry(1)]))
    async with asyncio.timeout(PATIENCE):
        assert await store.get("run") is not None
        assert await store.journal("run") == []
    await asyncio.to_thread(other.close)
    await waiting


async def test_an_error_of_sqlite_is_mapped_in_one_place(store: SQLiteStore) -> None:
    error = sqlite3.DatabaseError("file is not a database")
    error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
    assert "not an SQLite database" in str(connection.map_error(error, "x.db"))
    own = ValueError("own")
    assert connection.map_error(own, "x.db") is own


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), 1e18])
async def test_a_lease_of_no_sensible_length_is_refused_before_anything_is_asked_of_the_disk(
    store: SQLiteStore, ttl: float
) -> None:
    lease = await create_leased(store, "run")
    before = commits(store)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.create(new_run("other"), ttl=ttl),
        lambda: store.claim(1, ttl, [("flow", 1)]),
        lambda: store.acquire("run", ttl),
        lambda: store.renew([lease], ttl),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="ttl"):
            await call()
    assert commits(store) == before


async def test_entries_passed_to_record_may_be_changed_while_it_runs(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    entries = [entry(1)]
    recording = asyncio.ensure_future(store.record(lease, entries))
    await asyncio.sleep(0)
    entries.clear()
    await recording
    assert [line.seq for line in await store.journal("run")] == [1]


async def test_what_others_did_to_a_lease_is_seen_by_the_next_record(store: SQLiteStore, path: Path) -> None:
    lease = await create_leased(store, "run")
    assert await store.record(lease, [entry(1)]) == Pulse(0, False)
    other = await asyncio.to_thread(_changed, path, "UPDATE perdure_runs SET cancel_requested = 1")
    assert await store.record(lease, [entry(2)]) == Pulse(0, True)
    await asyncio.to_thread(_changed, path, "UPDATE perdure_runs SET epoch = epoch + 1")
    with pytest.raises(LeaseLost):
        await store.record(lease, [entry(3)])
    assert [line.seq for line in await store.journal("run")] == [1, 2]
    assert other == 1


def _changed(path: Path, sql: str) -> int:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        return other.execute(sql).rowcount


async def test_what_a_store_of_this_process_did_to_a_lease_is_seen_by_the_next_record(store: SQLiteStore) -> None:
    lease = await create_leased(store, "run")
    assert await store.record(lease, [entry(1)]) == Pulse(0, False)
    seq = await store.signal("run", "go", b"")
    assert await store.record(lease, [entry(2)]) == Pulse(seq, False)
    await store.cancel("run")
    assert await store.record(lease, [entry(3)]) == Pulse(seq, True)
    await store.release(lease)
    with pytest.raises(LeaseLost):
        await store.record(lease, [entry(4)])


async def test_a_parent_is_told_in_the_commit_that_ends_its_child(store: SQLiteStore) -> None:
    parent = await create_leased(store, "parent")
    created = await store.create(replace(new_run("child"), parent_id="parent", parent_key="child"), ttl=60)
    assert created.claim is not None
    await store.record(parent, [entry(1)])
    _, pulse = await asyncio.gather(store.finish(created.claim.lease, "completed", b"1"), store.record(parent, [entry(2)]))
    assert pulse == Pulse(1, False)


async def test_a_lease_is_for_its_own_tables_and_prefix(store: SQLiteStore, path: Path) -> None:
    lease = await create_leased(store, "run")
    await store.record(lease, [entry(1)])
    for elsewhere in (SQLiteStore(path, prefix="other"), SQLiteStore(path, table="other")):
        with pytest.raises(LeaseLost):
            await elsewhere.record(lease, [entry(2)])
        await elsewhere.close()
    assert [line.seq for line in await store.journal("run")] == [1]


async def test_lost_replies_and_new_records_in_one_batch(store: SQLiteStore) -> None:
    leases = [await create_leased(store, f"run-{n}") for n in range(20)]
    for lease in leases[::2]:
        await store.record(lease, [entry(1)])
    before = commits(store)
    calls = [store.record(lease, [entry(1), entry(2)] if n % 4 else [entry(1, ok=n != 8)]) for n, lease in enumerate(leases)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if answer != Pulse(0, False)] == [8]
    assert "something else is recorded under seq 1" in str(answers[8])
    assert [len(await store.journal(lease.run_id)) for lease in leases] == [2 if n % 4 else 1 for n in range(20)]
    assert commits(store) - before <= 2
