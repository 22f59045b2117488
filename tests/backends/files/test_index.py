"""The index can be lost, old, large or wrong, and is made anew from the runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure.backends.files import FilesStore, index
from perdure.backends.files.disk import namespace_name
from perdure.model.run_filter import RunFilter
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased


def index_of(path: Path) -> Path:
    return path / namespace_name("") / "index"


async def _filled(store: FilesStore) -> None:
    for n in range(10):
        lease = await create_leased(store, f"run-{n}")
        if n % 2:
            await store.finish(lease, "completed", b"1")
        else:
            await store.suspend(lease, wake_at=1)


async def _check(store: FilesStore) -> None:
    assert await store.count(RunFilter(status=("completed",))) == 5
    assert await store.due() == [f"run-{n}" for n in range(0, 10, 2)]


async def test_an_index_that_was_taken_away_is_made_anew(path: Path, store: FilesStore) -> None:
    await _filled(store)
    for _ in range(2):
        await asyncio.to_thread(index_of(path).unlink)
        await _check(store)
    await asyncio.to_thread(index_of(path).unlink)
    await store.create(new_run("run-99"))
    assert await store.count() == 11


async def test_an_index_of_another_boot_is_made_anew(path: Path, store: FilesStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await _filled(store)
    await store.close()
    await asyncio.to_thread(_lose_the_end, index_of(path))
    monkeypatch.setattr(index, "boot_id", lambda: "another")
    await _check(await asyncio.to_thread(FilesStore, path))


def _lose_the_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:700])


async def test_half_a_line_is_passed_over(path: Path, store: FilesStore) -> None:
    await _filled(store)
    await asyncio.to_thread(_append, index_of(path), b'\n12345678 ["r-run-3",["ru')
    await _check(store)
    await store.create(new_run("run-99"))
    assert await store.count() == 11
    await store.close()
    assert await (await asyncio.to_thread(FilesStore, path)).count() == 11


def _append(file: Path, data: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(data)


async def test_an_index_is_cut_back_when_it_has_grown(path: Path, store: FilesStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_SLACK", 1000)
    lease = await create_leased(store, "run")
    other = await asyncio.to_thread(FilesStore, path)
    for n in range(100):
        await store.renew([lease], 600 + n)
        assert await other.count() == await store.count() == 1
    assert (await asyncio.to_thread(index_of(path).stat)).st_size < 5000
    row = await store.get("run")
    assert row is not None
    assert (await other.claim(1, 60, [("flow", 1)])).next_wake_at == row.wake_at
