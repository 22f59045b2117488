"""Names of files, and what becomes of a disk that cannot be trusted or does not take what is written."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import PersistenceError
from perdure.kv import FilesKeyValueStore, disk, locks
from perdure.kv.disk import key_name, namespace_name
from perdure.testing.contract.identity import NAMES
from tests.patience import PATIENCE

KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=300)
SAFE = re.compile(r"[a-z]-[a-z0-9_-]{0,200}")
DESCRIPTORS: Final = Path("/proc/self/fd")
# Sets ten keys, each until it is acknowledged, and prints how many attempts failed.
PROGRAM = """
import asyncio, sys
from perdure import FilesKeyValueStore
from perdure.errors import PersistenceError

async def main():
    kv, failed = FilesKeyValueStore(sys.argv[1]), 0
    for n in range(10):
        while True:
            try:
                await kv.set(f"{n}", f"text {n}")
                break
            except PersistenceError:
                failed += 1
    print(failed)

asyncio.run(main())
"""

# Is killed while it has the lock, as its disk does not answer; but before that it forks, and the child lives on.
FORKING = """
import asyncio, os, signal, sys, threading
from perdure import FilesKeyValueStore

def hang(*_):
    has_lock.set()
    threading.Event().wait()

def write():
    asyncio.run(FilesKeyValueStore(sys.argv[1]).set("key", "lost"))

os.rename, has_lock = hang, threading.Event()
threading.Thread(target=write, daemon=True).start()
has_lock.wait()
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
print("forked", flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def kv(directory: Path) -> FilesKeyValueStore:
    return FilesKeyValueStore(directory)


@given(KEYS)
def test_a_name_is_safe_on_every_file_system(key: str) -> None:
    for name in (key_name(key), namespace_name(key)):
        assert SAFE.fullmatch(name)
        assert len(name) <= 140


@given(KEYS, KEYS)
def test_keys_that_differ_have_names_that_differ(one: str, other: str) -> None:
    assert (key_name(one) == key_name(other)) == (one == other)


def test_names_differ_also_where_case_does_not_count() -> None:
    assert len({key_name(name).casefold() for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("key", ["..", ".", "../../x", "/etc/passwd", "con", "NUL", "a/b", "a\\b", "C:x", "x" * 1024, "~"])
async def test_no_key_leaves_its_place(key: str, directory: Path) -> None:
    kv = await asyncio.to_thread(FilesKeyValueStore, directory, namespace=key[:255])
    await kv.set(key, "text")

    def names(path: Path) -> list[str]:
        return sorted(found.name for found in path.iterdir())

    assert await asyncio.to_thread(names, directory.parent) == ["kept"]
    assert await asyncio.to_thread(names, directory / "values") == [namespace_name(key[:255])]
    assert await asyncio.to_thread(names, directory / "values" / namespace_name(key[:255]) / "kept") == [key_name(key)]


async def test_a_text_in_the_wrong_file_is_not_taken_for_that_of_another_key(kv: FilesKeyValueStore, directory: Path) -> None:
    await kv.set("x" * 1024, "text")
    kept = directory / "values" / namespace_name("") / "kept"
    await asyncio.to_thread((kept / key_name("x" * 1024)).rename, kept / key_name("y" * 1024))
    with pytest.raises(PersistenceError, match="cannot be read"):
        await kv.get("y" * 1024)
    assert await kv.get("x" * 1024) is None


async def test_a_link_is_not_followed(kv: FilesKeyValueStore, directory: Path, tmp_path: Path) -> None:
    await kv.set("a", "text")
    file, elsewhere = directory / "values" / namespace_name("") / "kept" / key_name("a"), tmp_path / "elsewhere"
    await asyncio.to_thread(file.rename, elsewhere)
    await asyncio.to_thread(file.symlink_to, elsewhere)
    with pytest.raises(PersistenceError, match="symbolic links"):
        await kv.get("a")


async def test_no_file_is_locked_through_a_link(kv: FilesKeyValueStore, directory: Path, tmp_path: Path) -> None:
    await kv.set("a", "text")
    lock, elsewhere = directory / "values" / namespace_name("") / "lock", tmp_path / "elsewhere"
    await asyncio.to_thread(lock.unlink)
    await asyncio.to_thread(lock.symlink_to, elsewhere)
    for change in (kv.set("a", "other"), kv.delete("a")):
        with pytest.raises(PersistenceError, match="symbolic links"):
            await change
    assert await kv.get("a") == "text"
    assert not await asyncio.to_thread(elsewhere.exists)


@pytest.mark.parametrize("magic", [0x6969, 0xFF534D42, 0x65735546])
async def test_file_systems_of_the_network_are_refused(
    magic: int, kv: FilesKeyValueStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "file_system_magic", lambda _: magic)
    with pytest.raises(PersistenceError, match="use a directory on a local disk"):
        await kv.set("a", "text")
    assert not await asyncio.to_thread(directory.exists)


def test_the_file_system_is_asked(tmp_path: Path) -> None:
    assert disk.file_system_magic(str(tmp_path)) in {0xEF53, 0x01021994, 0x58465342, 0x9123683E, 0x794C7630}
    assert disk.file_system_magic("/proc") == 0x9FA0


@pytest.mark.parametrize("call", ["fdatasync:error=EIO:when=4+3", "pwrite64:error=ENOSPC:when=4+3", "rename:error=EIO:when=4+3"])
def test_what_could_not_be_written_is_told_and_can_be_written_again(call: str, directory: Path) -> None:
    strace = ("strace", "-f", "-qq", "-o", os.devnull, "-e", f"inject={call}")
    command = [*strace, sys.executable, "-c", PROGRAM, str(directory)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(said) > 0
    kv = FilesKeyValueStore(directory)
    assert [asyncio.run(kv.get(f"{n}")) for n in range(10)] == [f"text {n}" for n in range(10)]


def test_no_descriptor_is_left_open(directory: Path) -> None:
    before = len(list(DESCRIPTORS.iterdir()))
    kv = FilesKeyValueStore(directory)

    async def use() -> None:
        for n in range(20):
            await kv.set(f"{n}", "text", 3600)
        await kv.keys("*")
        await kv.delete("1")
        await kv.close()

    asyncio.run(use())
    assert len(list(DESCRIPTORS.iterdir())) == before


@pytest.fixture
def held(kv: FilesKeyValueStore) -> Iterator[None]:
    """Another thread has the lock of this place."""
    asyncio.run(kv.set("before", "text"))
    has_it, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.file_lock(kv._files._lock):
            has_it.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_it.wait(60)
    yield
    let_go.set()
    thread.join()


@pytest.mark.usefixtures("held")
def test_a_lock_that_another_process_keeps_holds_up_writers_for_a_while_and_readers_not_at_all(
    kv: FilesKeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asyncio.run(kv.get("before")) == "text"
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    with pytest.raises(PersistenceError, match="kept a lock"):
        asyncio.run(kv.set("after", "text"))


def test_the_lock_of_a_process_that_is_killed_does_not_live_on_in_a_child_that_it_forked(
    kv: FilesKeyValueStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, pipe = [sys.executable, "-c", FORKING, str(directory)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:  # the child ends with its stdin
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        assert process.wait(PATIENCE) == -signal.SIGKILL
        monkeypatch.setattr(locks, "PATIENCE", 1.0)
        asyncio.run(kv.set("key", "text"))
        assert asyncio.run(kv.get("key")) == "text"
