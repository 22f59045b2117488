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
from perdure.errors import LeaseHeld, PersistenceError
from tests.backends.files.child import new_run, record, started
from tests.backends.files.conftest import Process, Start, end_of, go

STRACE: Final = ("strace", "-f", "-qq", "-o", os.devnull, "-e")
DESCRIPTORS: Final = Path("/proc/self/fd")


def test_sixteen_processes_set_up_one_directory_at_once(path: Path, start: Start) -> None:
    processes = [start("setup", path) for _ in range(16)]
    for process in processes:
        go(process)
    for process in processes:
        end_of(process)
    assert asyncio.run(FilesStore(path).count()) == 0


def test_eight_processes_write_at_once_without_an_error(path: Path, start: Start) -> None:
    processes = [start("write", path, f"p{n}", 10) for n in range(8)]
    for process in processes:
        go(process)
    for process in processes:
        end_of(process)
    store = FilesStore(path)

    async def lengths() -> set[int]:
        return {len(await store.journal(f"p{n}-{k}")) for n in range(8) for k in range(4)}

    assert asyncio.run(lengths()) == {10}
    assert asyncio.run(store.count()) == 32


async def _claimed(store: FilesStore) -> list[str]:
    return [claim.run.id for claim in (await store.claim(10, 60, [("flow", 1)])).claims]


async def _killed(process: Process) -> None:
    process.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has collected it yet


async def test_a_lease_is_free_at_once_when_its_process_was_killed(store: FilesStore, path: Path, start: Start) -> None:
    process = await asyncio.to_thread(start, "hold", path, "run")
    assert await _claimed(store) == []
    assert await store.due() == []
    with pytest.raises(LeaseHeld, match=f"process {process.pid} "):
        await store.acquire("run", 60)
    await _killed(process)
    async with asyncio.timeout(20):
        while await store.due() != ["run"]:  # noqa: ASYNC110 - another process's death is no event
            await asyncio.sleep(0.01)
    assert await _claimed(store) == ["run"]


async def test_a_stopped_process_keeps_its_lease(store: FilesStore, path: Path, start: Start) -> None:
    process = await asyncio.to_thread(start, "hold", path, "run")
    process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(3):
        assert await _claimed(store) == []
        await asyncio.sleep(0.25)  # longer than an answer about a process is believed
    with pytest.raises(LeaseHeld):
        await store.acquire("run", 60)


def test_a_forked_child_and_its_parent_both_go_on(path: Path, start: Start) -> None:
    assert end_of(start("fork", path, ready=False)) == "child 0\n"
    store = FilesStore(path)
    assert len(asyncio.run(store.journal("before"))) == 210
    assert len(asyncio.run(store.journal("child"))) == 20


@pytest.mark.parametrize("call", ["fdatasync:error=EIO:when=4+3", "pwrite64:error=ENOSPC:when=4+3", "write:error=ENOSPC:when=5"])
def test_what_could_not_be_written_is_told_and_can_be_written_again(path: Path, start: Start, call: str) -> None:
    process = start("fail_to_sync", path, 12, ready=False, under=(*STRACE, f"inject={call}"))
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
        lease = await started(store, "run")
        await record(store, lease, range(1, 20))
        await store.list()
        await store.close()

    asyncio.run(use())
    assert len(list(DESCRIPTORS.iterdir())) == before


async def test_a_process_stopped_in_the_middle_of_a_write_holds_up_only_its_own_run(
    store: FilesStore, path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create(new_run("ready"))
    process = await asyncio.to_thread(start, "stop_in_create", path)
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
    await asyncio.to_thread(end_of, process)
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
