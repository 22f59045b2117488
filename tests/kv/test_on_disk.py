"""On disk: what is written there, in which order, and what killed processes leave."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import PersistenceError
from perdure.kv import FilesKeyValueStore, SQLiteKeyValueStore
from perdure.kv import files as in_files
from perdure.stores import sqlite
from perdure.testing.contract.world import new_run
from tests.patience import PATIENCE

PROGRAM = """
import asyncio, sys
from perdure.kv import FilesKeyValueStore

async def main():
    kv = FilesKeyValueStore(sys.argv[1])
    await kv.set("first", "1")
    print("begin", flush=True)
    await kv.set("key", "text")
    print("acknowledged", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def files(tmp_path: Path) -> FilesKeyValueStore:
    return FilesKeyValueStore(tmp_path)


def under(tmp_path: Path, name: str) -> list[str]:
    return sorted(str(path.relative_to(tmp_path / "values/n-")) for path in (tmp_path / "values/n-" / name).rglob("*"))


def test_a_text_is_acknowledged_once_file_and_directory_are_synced(tmp_path: Path) -> None:
    log = tmp_path / "trace"
    watched = "trace=openat,pwrite64,fdatasync,fsync,rename,renameat,renameat2,write"
    strace = shutil.which("strace")
    assert strace is not None
    command = [
        strace,
        "-f",
        "-y",
        "-s",
        "200",
        "-e",
        watched,
        "-o",
        str(log),
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path / "kv"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    lines = log.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if '"begin' in line)
    end = next(n for n, line in enumerate(lines) if '"acknowledged' in line)
    calls = [match for line in lines[begin:end] if (match := _telling(line))]
    assert calls == ["write draft", "sync draft", "rename", "sync kept"]


def _telling(line: str) -> str | None:
    for pattern, told in (
        (r"pwrite64\(\d+<[^>]*/drafts/", "write draft"),
        (r"fdatasync\(\d+<[^>]*/drafts/", "sync draft"),
        (r"rename(?:at2?)?\(.*/drafts/.*/kept/", "rename"),
        (r"fsync\(\d+<[^>]*/kept>", "sync kept"),
    ):  # fmt: skip
        if re.search(pattern, line):
            return told
    return None


async def test_files_are_for_their_owner_alone(files: FilesKeyValueStore, tmp_path: Path) -> None:
    await files.set("a", "secret", 3600)

    def modes() -> set[int]:
        return {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (tmp_path / "values").rglob("*")}

    assert await asyncio.to_thread(modes) == {0}


async def test_drafts_of_killed_processes_are_swept_when_they_are_old(tmp_path: Path) -> None:
    drafts = tmp_path / "values/n-/drafts"

    def leave() -> None:
        drafts.mkdir(parents=True)
        for name in ("old", "new"):
            (drafts / name).write_text("half")
        os.utime(drafts / "old", (time.time() - 4000, time.time() - 4000))

    await asyncio.to_thread(leave)
    kv = await asyncio.to_thread(FilesKeyValueStore, tmp_path)
    await kv.set("a", "1")
    assert await asyncio.to_thread(under, tmp_path, "drafts") == ["drafts/new"]
    assert await kv.keys("*") == ["a"]


@pytest.mark.parametrize("content", [b"", b"{", b"null\n", b'{"key":"a","size":1}\n', b'{"key":"b","size":1}\nx', b"\xff\n"])
async def test_a_damaged_file_is_told_and_left_as_it_is(content: bytes, files: FilesKeyValueStore, tmp_path: Path) -> None:
    await files.set("a", "1", 3600)
    await files.set("good", "1")
    path = tmp_path / "values/n-/kept/k-a"
    await asyncio.to_thread(path.write_bytes, content)
    with pytest.raises(PersistenceError, match=r"cannot be read .* it was left as it is"):
        await files.get("a")
    assert await asyncio.to_thread(path.read_bytes) == content
    assert await files.get("good") == "1"
    await files.set("a", "2")
    assert await files.get("a") == "2"


async def test_markers_and_their_minutes_go_with_what_they_are_about(
    files: FilesKeyValueStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_files, "_MINUTE", 20_000)
    monkeypatch.setattr(in_files, "_SWEEP_EVERY", 0)
    for n in range(120):
        await files.set(f"{n}", "x", 0.01)
    await files.set("renewed", "1", 0.01)
    await files.set("renewed", "2")
    await files.set("writer", "1")
    async with asyncio.timeout(PATIENCE):
        while await asyncio.to_thread(under, tmp_path, "expiring"):
            await files.set("writer", "1")
    assert await asyncio.to_thread(under, tmp_path, "kept") == ["kept/k-renewed", "kept/k-writer"]


async def test_what_expires_later_in_this_minute_is_left_with_its_marker(
    files: FilesKeyValueStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_files, "_MINUTE", 10**18)  # it lasts for thirty thousand years, and is always this one
    monkeypatch.setattr(in_files, "_SWEEP_EVERY", 0)
    await files.set("live", "1", 3600)
    for _ in range(3):
        await files.set("writer", "1")
    assert await files.get("live") == "1"
    assert await asyncio.to_thread(under, tmp_path, "expiring") == ["expiring/0", "expiring/0/k-live"]


async def test_what_was_renewed_is_left_and_only_its_marker_goes(
    files: FilesKeyValueStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_files, "_SWEEP_EVERY", 10**18)  # nothing is swept but by the first write
    await files.set("first", "1")
    for key in ("good", "longer"):
        await files.set(key, "1", 0.001)
    await files.set("good", "2")
    await files.set("longer", "2", 3600)
    sweeping = await asyncio.to_thread(FilesKeyValueStore, tmp_path)
    await sweeping.set("writer", "1")
    assert [await files.get(key) for key in ("good", "longer")] == ["2", "2"]
    markers = [name for name in await asyncio.to_thread(under, tmp_path, "expiring") if "/k-" in name]
    assert [name.rpartition("/")[2] for name in markers] == ["k-longer"]


def test_a_key_that_is_renewed_while_it_is_swept_is_not_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_files, "_SWEEP_EVERY", 10**18)  # nothing is swept but by the first write of each
    files = FilesKeyValueStore(tmp_path)
    asyncio.run(files.set("first", "1"))
    asyncio.run(files.set("key", "old", 0.001))
    renewing = threading.Thread(target=lambda: asyncio.run(FilesKeyValueStore(tmp_path).set("key", "new")))
    peek = in_files._Files._peek

    def peek_and_wait(files: Any, path: str) -> Any:
        head = peek(files, path)
        if path.endswith("/k-key") and head is not None and not head.is_live and renewing.ident is None:
            renewing.start()
            renewing.join(0.3)  # without a lock it would be done by now
        return head

    monkeypatch.setattr(in_files._Files, "_peek", peek_and_wait)
    asyncio.run(FilesKeyValueStore(tmp_path).set("writer", "1"))
    renewing.join()
    assert asyncio.run(FilesKeyValueStore(tmp_path).get("key")) == "new"


@pytest.mark.parametrize("kind", [FilesKeyValueStore, SQLiteKeyValueStore])
async def test_renewing_and_sweeping_the_same_keys_at_once_ends_well(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_files, "_SWEEP_EVERY", 0)
    monkeypatch.setattr(in_files, "_MINUTE", 5_000)
    stores = [await asyncio.to_thread(kind, tmp_path / "place") for _ in range(3)]

    async def renew(kv: Any, name: str) -> None:
        for n in range(15):
            await asyncio.gather(*(kv.set(f"key {key}", f"{name} {n}", 0.001) for key in range(6)))
        await asyncio.gather(*(kv.set(f"key {key}", "for good") for key in range(6)))

    await asyncio.gather(*(renew(kv, name) for kv, name in zip(stores, "abc", strict=True)))
    for _ in range(20):
        await stores[0].set("writer", "")
    assert [await stores[1].get(f"key {key}") for key in range(6)] == ["for good"] * 6
    for kv in stores:
        await kv.close()


async def test_runs_and_texts_may_share_an_sqlite_file_and_its_threads(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    store, kv = await asyncio.to_thread(lambda: (sqlite(path), SQLiteKeyValueStore(path)))
    await asyncio.gather(store.create(new_run()), *(kv.set(f"{n}", "x") for n in range(50)))
    assert kv._database is store._database
    assert kv._database.writer.commits < 40, "texts that were set at once share commits"
    await store.close()
    assert await kv.get("49") == "x"
    await kv.close()
    assert await asyncio.to_thread(_tables, path) >= {"perdure_runs", "perdure_values"}


def _tables(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    try:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    finally:
        connection.close()


async def test_a_key_and_a_range_of_keys_are_found_by_an_index(tmp_path: Path) -> None:
    kv = await asyncio.to_thread(SQLiteKeyValueStore, tmp_path / "app.db")
    await kv.set("a", "1")
    rows = kv._rows

    def plans() -> list[str]:
        connection = sqlite3.connect(tmp_path / "app.db")
        try:
            asked = [
                (rows._get, ("", "a", 1)),
                (rows._keys, ("", 1, "a", "b")),
                (rows._sweep, (1, 100)),
                (rows._delete, ("", "a")),
            ]
            return [str(row[3]) for sql, values in asked for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        finally:
            connection.close()

    assert [plan for plan in await asyncio.to_thread(plans) if plan.startswith("SCAN")] == []
    await kv.close()


def test_a_path_must_name_a_file() -> None:
    for path in ("", ":memory:", "a\0b"):
        with pytest.raises(ValueError, match="must name a file"):
            SQLiteKeyValueStore(path)
    for directory in ("", "a\0b"):
        with pytest.raises(ValueError, match="must name a directory"):
            FilesKeyValueStore(directory)
