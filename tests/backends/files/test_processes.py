from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from perdure.backends.files import FilesStore, disk, locks
from perdure.errors import PersistenceError
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased, record
from tests.backends.disk_processes import STRACE, StartChild, go, run_to_end

DESCRIPTORS: Final = Path("/proc/self/fd")


async def _claimed(store: FilesStore) -> list[str]:
    return [claim.run.id for claim in (await store.claim(10, 60, [("flow", 1)])).claims]


@pytest.mark.parametrize("call", ["fdatasync:error=EIO:when=4+3", "pwrite64:error=ENOSPC:when=4+3", "write:error=ENOSPC:when=5"])
def test_what_could_not_be_written_is_told_and_can_be_written_again(
    path: Path, dsn: str, start_child: StartChild, call: str
) -> None:
    process = start_child("fail_to_sync", dsn, 12, ready=False, under=(*STRACE, f"inject={call}"))
    said = process.communicate(timeout=50)
    assert said[0].startswith("failed "), said[1]
    assert [line.seq for line in asyncio.run(FilesStore(path).journal("run"))] == list(range(1, 13))


@pytest.mark.parametrize("magic", [0x6969, 0xFF534D42, 0x65735546])
async def test_file_systems_of_the_network_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch, magic: int) -> None:
    monkeypatch.setattr(disk, "file_system_magic", lambda _: magic)
    store = await asyncio.to_thread(FilesStore, path)
    with pytest.raises(PersistenceError, match="use a directory on a local disk"):
        await store.create(new_run("run"))
    assert not await asyncio.to_thread(path.exists)


def test_the_file_system_is_asked(tmp_path: Path) -> None:
    assert disk.file_system_magic(str(tmp_path)) in {0xEF53, 0x01021994, 0x58465342, 0x9123683E, 0x794C7630}
    assert disk.file_system_magic("/proc") == 0x9FA0


async def test_files_are_for_their_owner_alone(path: Path, store: FilesStore) -> None:
    await store.create(new_run("run"))
    files = await asyncio.to_thread(lambda: [found.stat().st_mode & 0o077 for found in path.rglob("*") if found.name != "wake"])
    assert set(files) == {0}


def test_a_store_that_was_dropped_leaves_no_threads(path: Path) -> None:
    asyncio.run(FilesStore(path).count())
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("perdure-files"):
            thread.join(10)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("perdure-files")]


def test_no_descriptor_is_left_open(path: Path) -> None:
    before = len(list(DESCRIPTORS.iterdir()))
    store = FilesStore(path)

    async def use() -> None:
        lease = await create_leased(store, "run")
        await record(store, lease, range(1, 20))
        await store.list()
        await store.close()

    asyncio.run(use())
    assert len(list(DESCRIPTORS.iterdir())) == before


async def test_a_process_stopped_in_the_middle_of_a_write_holds_up_only_its_own_run(
    store: FilesStore, dsn: str, start_child: StartChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create(new_run("ready"))
    process = await asyncio.to_thread(start_child, "stop_in_create", dsn)
    await asyncio.to_thread(go, process)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    async with asyncio.timeout(5):
        assert await _claimed(store) == ["ready"]
        assert [line.id for line in await store.list()] == ["ready"]
    before = asyncio.get_running_loop().time()
    assert await _claimed(store) == []
    assert asyncio.get_running_loop().time() - before < 0.5, "nobody waits for it a second time"
    with monkeypatch.context() as impatient:
        impatient.setattr(locks, "PATIENCE", 0.05)
        with pytest.raises(PersistenceError, match="kept a lock"):
            await store.create(new_run("stopped"))
    process.send_signal(signal.SIGCONT)
    await asyncio.to_thread(run_to_end, process)
    assert {line.id for line in await store.list()} == {"ready", "stopped"}


async def test_whoever_waited_for_a_run_that_was_deleted_begins_a_new_one(path: Path, store: FilesStore) -> None:
    await store.create(new_run("run"))
    directory = path / "n-" / "runs" / "r-run"
    with ExitStack() as held:
        await asyncio.to_thread(held.enter_context, locks.file_lock(str(directory / "lock")))
        creating = asyncio.create_task(store.create(new_run("run", input=b"2", input_hash=b"2")))
        await store.create(new_run("other"))
        await asyncio.sleep(0.05)  # until it waits for the lock; if it does not yet the test shows less, but does not fail
        await asyncio.to_thread(directory.rename, path / "gone")
        await asyncio.to_thread(held.close)
        assert (await creating).is_new
    row = await store.get("run")
    assert row is not None
    assert row.input == b"2"
