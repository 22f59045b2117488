"""What verbs cost: syncs, which are what a disk is slow at, and what a run's length or the number of runs changes about that."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from perdure.backends.files import FilesStore, disk, index, log, namespace, threads
from perdure.model.journal import Entry
from perdure.model.records import Awaited, Schedule
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased, entry


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many syncs there were, of files and of directories."""
    counted: Counter[str] = Counter()
    plain_sync, plain_directory = disk.sync, disk.sync_directory

    def sync(fd: int) -> None:
        counted["file"] += 1
        plain_sync(fd)

    def sync_directory(path: str) -> None:
        counted["directory"] += 1
        plain_directory(path)

    for module in (disk, log):
        monkeypatch.setattr(module, "sync", sync)
    for module in (disk, log, namespace):
        monkeypatch.setattr(module, "sync_directory", sync_directory)
    return counted


async def test_each_verb_has_its_price(store: FilesStore, syncs: Counter[str]) -> None:
    await store.setup()

    def price() -> tuple[int, int]:
        spent = (syncs["file"], syncs["directory"])
        syncs.clear()
        return spent

    price()
    lease = await create_leased(store, "run")
    assert price() == (1, 2), "create"
    await store.record(lease, [entry(1)])
    assert price() == (1, 0), "record"
    await store.record(lease, [entry(1)])
    assert price() == (0, 0), "a record that is there already"
    await store.renew([lease], 60)
    assert price() == (1, 0), "renew"
    await store.signal("run", "go", b"1")
    assert price() == (1, 0), "signal"
    assert len(await store.suspend(lease, wake_at=None, waiting_for=[Awaited("signal", "go")])) == 1
    assert price() == (0, 0), "a suspend that did not come about"
    await store.suspend(lease, wake_at=1, entries=[entry(2)])
    assert price() == (1, 0), "suspend"
    (claim,) = (await store.claim(1, 60, [("flow", 1)])).claims
    assert price() == (1, 0), "claim"
    await store.get("run")
    await store.list()
    await store.due()
    await store.claim(1, 60, [("flow", 1)])
    assert price() == (0, 0), "reading, and a claim that finds nothing"
    await store.finish(claim.lease, "completed", b"1", entries=[entry(3)])
    assert price() == (1, 0), "finish"
    await store.delete("run")
    assert price() == (0, 1), "delete"


async def test_a_child_that_ends_costs_three_syncs(store: FilesStore, syncs: Counter[str]) -> None:
    await create_leased(store, "parent")
    child = await create_leased(store, "child", parent_id="parent", parent_key="pay")
    syncs.clear()
    await store.finish(child, "completed", b"1")
    assert dict(syncs) == {"file": 3}


async def test_a_schedule_that_fires_is_on_disk_before_its_run(store: FilesStore, syncs: Counter[str]) -> None:
    await store.put_schedule(Schedule(id="daily", workflow="flow", spec="", input=b"[]", next_at=1))
    syncs.clear()
    await store.fire("daily", expected_at=1, next_at=2, run=new_run("run"))
    assert dict(syncs) == {"file": 3, "directory": 4}


async def test_records_of_one_run_share_a_sync(store: FilesStore, syncs: Counter[str]) -> None:
    lease = await create_leased(store, "run")
    syncs.clear()
    await asyncio.gather(*(store.record(lease, [entry(seq)]) for seq in range(1, 201)))
    assert syncs["file"] <= 40
    assert len(await store.journal("run")) == 200


async def test_only_the_culprit_of_a_batch_fails(store: FilesStore) -> None:
    lease = await create_leased(store, "run")
    wrong = Entry(seq=1000, key="x", payload=2**70)  # type: ignore[arg-type]
    records = [store.record(lease, [wrong if n == 7 else entry(n)]) for n in range(1, 20)]
    answers = await asyncio.gather(*records, return_exceptions=True)
    assert [n for n, answer in enumerate(answers, 1) if isinstance(answer, BaseException)] == [7]
    assert [line.seq for line in await store.journal("run")] == [n for n in range(1, 20) if n != 7]


async def test_a_record_costs_the_same_in_a_long_run(store: FilesStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = disk.read_all

    def read_all(fd: int, offset: int) -> bytes:
        read.append(offset)
        return plain(fd, offset)

    monkeypatch.setattr(log, "read_all", read_all)
    lease = await create_leased(store, "run")
    await store.record(lease, [entry(seq) for seq in range(1, 5000)])
    await store.record(lease, [entry(5000)])
    assert read == []


async def test_a_claim_opens_no_log_but_those_it_takes(path: Path, store: FilesStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(50):
        await store.create(new_run(f"run-{n:02}", start_at=1 if n == 7 else 4 * 10**15))
    await store.close()
    again = await asyncio.to_thread(FilesStore, path)
    paths: list[str] = []

    def opened(path: str, flags: int) -> AbstractContextManager[int]:
        paths.append(path)
        return disk.open_file(path, flags)

    monkeypatch.setattr(log, "open_file", opened)
    assert [claim.run.id for claim in (await again.claim(10, 60, [("flow", 1)])).claims] == ["run-07"]
    assert {found for path in paths for found in re.findall(r"run-\d+", path)} == {"run-07"}


def test_the_index_reads_only_what_is_new(store: FilesStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = disk.read_all

    def read_all(fd: int, offset: int) -> bytes:
        data = plain(fd, offset)
        sizes.append(len(data))
        return data

    async def use() -> None:
        await asyncio.gather(*(store.create(new_run(f"run-{n}")) for n in range(100)))
        await store.count()
        monkeypatch.setattr(index, "read_all", read_all)
        await store.count()
        await store.create(new_run("new"))
        await store.count()

    asyncio.run(use())
    assert len(sizes) == 1
    assert sizes[0] < 400


def test_there_are_no_more_threads_than_said() -> None:
    assert threads.THREADS == 16
