from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Final

import pytest

from perdure.backends.sqlite import SQLiteStore
from perdure.backends.sqlite.database import _registry as registry
from perdure.errors import LeaseHeld
from perdure.model.journal import Entry
from tests.backends.sqlite.child import new_run, record, started
from tests.backends.sqlite.conftest import Process, Start, end_of, go
from tests.campaign import times

STRACE: Final = ("strace", "-f", "-qq", "-o", os.devnull, "-e")


def integrity(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA integrity_check").fetchall()[0][0])
    finally:
        connection.close()


def test_sixteen_processes_set_up_one_database_at_once(path: Path, start: Start) -> None:
    processes = [start("setup", path) for _ in range(16)]
    for process in processes:
        go(process)
    for process in processes:
        end_of(process)
    assert integrity(path) == "ok"


@pytest.mark.parametrize("when", range(1, 1 + times(100)))
def test_a_set_up_that_was_killed_is_done_by_the_next(path: Path, start: Start, when: int) -> None:
    calls = "pwrite64,fdatasync,fsync"
    process = start("setup", path, under=(*STRACE, f"trace={calls}", "-e", f"inject={calls}:signal=KILL:when={when}"))
    process.communicate("\n", timeout=60)
    store = SQLiteStore(path)

    async def use() -> int:
        await store.create(new_run("run"))
        return await store.count()

    assert asyncio.run(use()) == 1
    assert integrity(path) == "ok"


def test_eight_processes_write_at_once_without_an_error(path: Path, start: Start) -> None:
    processes = [start("write", path, f"p{n}", 25) for n in range(8)]
    for process in processes:
        go(process)
    for process in processes:
        end_of(process)
    store = SQLiteStore(path)

    async def lengths() -> set[int]:
        return {len(await store.journal(f"p{n}-{k}")) for n in range(8) for k in range(4)}

    assert asyncio.run(lengths()) == {25}


async def _claimed(store: SQLiteStore) -> list[str]:
    return [claim.run.id for claim in (await store.claim(10, 60, [("flow", 1)])).claims]


async def _until_claimed(store: SQLiteStore) -> list[str]:
    async with asyncio.timeout(20):
        while not (got := await _claimed(store)):  # noqa: ASYNC110 - another process's death is no event
            await asyncio.sleep(0.01)
        return got


async def _killed(process: Process) -> None:
    process.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has collected it yet


async def test_a_lease_is_free_at_once_when_its_process_was_killed(store: SQLiteStore, path: Path, start: Start) -> None:
    process = await asyncio.to_thread(start, "hold", path, "run")
    assert await _claimed(store) == []
    with pytest.raises(LeaseHeld, match=f"process {process.pid} "):
        await store.acquire("run", 60)
    await _killed(process)
    assert await _until_claimed(store) == ["run"]


async def test_a_killed_holders_run_can_be_acquired_and_is_due(store: SQLiteStore, path: Path, start: Start) -> None:
    process = await asyncio.to_thread(start, "hold", path, "run")
    assert await store.due() == []
    await _killed(process)
    async with asyncio.timeout(20):
        while await store.due() != ["run"]:  # noqa: ASYNC110 - another process's death is no event
            await asyncio.sleep(0.01)
    assert await store.acquire("run", 60) is not None


async def test_a_stopped_process_keeps_its_lease(store: SQLiteStore, path: Path, start: Start) -> None:
    process = await asyncio.to_thread(start, "hold", path, "run")
    process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(3):
        assert await _claimed(store) == []
        await asyncio.sleep(0.25)  # longer than an answer about a process is believed
    with pytest.raises(LeaseHeld):
        await store.acquire("run", 60)
    process.send_signal(signal.SIGCONT)


async def test_a_watcher_is_woken_by_another_process(store: SQLiteStore, path: Path, start: Start) -> None:
    process = await asyncio.to_thread(start, "create", path, "run")
    await store.setup()
    watching = asyncio.create_task(store.watch(60))
    await asyncio.sleep(0)
    await store.renew([], 60)  # queued behind the watcher, which is in its place by now
    ended = asyncio.create_task(asyncio.to_thread(end_of, process))
    async with asyncio.timeout(20):
        await watching
    assert await store.get("run") is not None
    await ended


def test_a_forked_child_opens_anew_and_the_parent_goes_on(path: Path, start: Start) -> None:
    process = start("fork", path, ready=False)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"ready\n", "parent closed\n"}  # the child has begun to write
    assert end_of(process) == "child 0\n"
    store = SQLiteStore(path)

    async def lengths() -> list[int]:
        return [len(await store.journal(run_id)) for run_id in ("before", "child")]

    assert asyncio.run(lengths()) == [210, 40]
    assert integrity(path) == "ok"


def test_a_child_forked_inside_a_transaction_refuses_the_file(path: Path, start: Start) -> None:
    said = end_of(start("fork_in_transaction", path, ready=False)).splitlines()
    # What the child inherited is never closed there: closing the last connection takes the parent's log away.
    assert said == ["child keeps 1", "child refused", "parent committed 1"]


def test_no_transaction_begins_while_the_process_is_being_forked(store: SQLiteStore) -> None:
    lease = asyncio.run(started(store, "run"))
    began = threading.Event()

    async def transact() -> None:
        async with store.transaction(lease) as transaction:
            began.set()
            await transaction.record([Entry(seq=1, key="step")])

    thread = threading.Thread(target=lambda: asyncio.run(transact()))
    registry.before_fork()
    try:
        thread.start()
        assert not began.wait(0.3)
        assert not store._database.open_transactions()
    finally:
        registry.after_fork_in_parent()
    thread.join()
    assert len(asyncio.run(store.journal("run"))) == 1


def test_leaving_without_closing_neither_hangs_nor_complains(path: Path, start: Start) -> None:
    before = time.monotonic()
    assert end_of(start("leave_open", path, ready=False)) == "2\n"
    assert time.monotonic() - before < 20


@pytest.mark.parametrize("when", [20, 21, 30])
def test_a_failed_sync_is_an_error_and_nothing_acknowledged_is_lost(path: Path, start: Start, when: int) -> None:
    calls = "fsync,fdatasync"
    strace = (*STRACE, f"trace={calls}", "-e", f"inject={calls}:error=EIO:when={when}")
    said = end_of(start("fail_to_sync", path, 40, ready=False, under=strace))
    assert said.startswith("failed ")
    assert int(said.split()[1]) > 0
    store = SQLiteStore(path)

    async def seqs() -> list[int]:
        return [entry.seq for entry in await store.journal("run")]

    assert asyncio.run(seqs()) == list(range(1, 41))
    assert integrity(path) == "ok"


def test_one_store_serves_one_event_loop_after_another(store: SQLiteStore) -> None:
    lease = asyncio.run(started(store, "run"))
    asyncio.run(record(store, lease, range(1, 3)))
    assert len(asyncio.run(store.journal("run"))) == 2
    asyncio.run(store.close())
