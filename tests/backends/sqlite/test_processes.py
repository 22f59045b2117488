from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from perdure.backends.sqlite import SQLiteStore
from perdure.backends.sqlite.database import _registry as registry
from perdure.model.journal import Entry
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased, record
from tests.backends.disk_processes import STRACE, StartChild, integrity, run_to_end
from tests.campaign import times
from tests.patience import PATIENCE


@pytest.mark.parametrize("when", range(1, 1 + times(100)))
def test_a_set_up_that_was_killed_is_done_by_the_next(path: Path, dsn: str, start_child: StartChild, when: int) -> None:
    calls = "pwrite64,fdatasync,fsync"
    process = start_child("setup", dsn, under=(*STRACE, f"trace={calls}", "-e", f"inject={calls}:signal=KILL:when={when}"))
    process.communicate("\n", timeout=60)
    store = SQLiteStore(path)

    async def use() -> int:
        await store.create(new_run("run"))
        return await store.count()

    assert asyncio.run(use()) == 1
    assert integrity(path) == "ok"


async def test_a_watcher_is_woken_by_another_process(store: SQLiteStore, dsn: str, start_child: StartChild) -> None:
    process = await asyncio.to_thread(start_child, "create", dsn, "run")
    await store.setup()
    watching = asyncio.create_task(store.watch(60))
    await asyncio.sleep(0)
    await store.renew([], 60)  # queued behind the watcher, which is in its place by now
    ended = asyncio.create_task(asyncio.to_thread(run_to_end, process))
    async with asyncio.timeout(PATIENCE):
        await watching
    assert await store.get("run") is not None
    await ended


def test_a_child_forked_inside_a_transaction_refuses_the_file(dsn: str, start_child: StartChild) -> None:
    said = run_to_end(start_child("fork_in_transaction", dsn, ready=False)).splitlines()
    # What the child inherited is never closed there: closing the last connection takes the parent's log away.
    assert said == ["child keeps 1", "child refused", "parent committed 1"]


def test_no_transaction_begins_while_the_process_is_being_forked(store: SQLiteStore) -> None:
    lease = asyncio.run(create_leased(store, "run"))
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


def test_leaving_without_closing_neither_hangs_nor_complains(dsn: str, start_child: StartChild) -> None:
    assert run_to_end(start_child("leave_open", dsn, ready=False)) == "2\n"


@pytest.mark.parametrize("when", [20, 21, 30])
def test_a_failed_sync_is_an_error_and_nothing_acknowledged_is_lost(
    path: Path, dsn: str, start_child: StartChild, when: int
) -> None:
    calls = "fsync,fdatasync"
    strace = (*STRACE, f"trace={calls}", "-e", f"inject={calls}:error=EIO:when={when}")
    said = run_to_end(start_child("fail_to_sync", dsn, 40, ready=False, under=strace))
    assert said.startswith("failed ")
    assert int(said.split()[1]) > 0
    store = SQLiteStore(path)

    async def seqs() -> list[int]:
        return [entry.seq for entry in await store.journal("run")]

    assert asyncio.run(seqs()) == list(range(1, 41))
    assert integrity(path) == "ok"


def test_one_store_serves_one_event_loop_after_another(store: SQLiteStore) -> None:
    lease = asyncio.run(create_leased(store, "run"))
    asyncio.run(record(store, lease, range(1, 3)))
    assert len(asyncio.run(store.journal("run"))) == 2
    asyncio.run(store.close())
