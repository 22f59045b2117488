"""Many processes on one server, and processes that stop or die."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from perdure.journal import Entry
from perdure.records import Lease, RunRow
from perdure.stores.redis_store import RedisStore
from perdure.testing.contract.world import new_run
from perdure.testing.servers.redis import RedisServer
from tests.campaign import times

CHILD: Final = Path(__file__).with_name("child.py")

Process = subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture
def start(server: RedisServer, table: str) -> Iterator[Start]:
    started: list[Process] = []

    def one(job: str, *arguments: object) -> Process:
        command = [sys.executable, str(CHILD), job, server.url, table, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


def line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_many_processes_that_start_one_run_make_one(start: Start) -> None:
    processes = [start("start") for _ in range(max(8, times(32)))]
    assert {line(process) for process in processes} == {"ready"}
    said = [process.communicate("\n", timeout=60)[0].strip() for process in processes]
    assert sorted(said) == ["found"] * (len(processes) - 1) + ["new"]


async def test_what_killed_workers_were_told_is_recorded_is(start: Start, store: RedisStore) -> None:
    await store.create(new_run())
    acknowledged = 0
    for n in range(times(100)):
        worker = await asyncio.to_thread(start, "drive", 0.2)
        found = int((await asyncio.to_thread(line, worker)).removeprefix("ready"))
        assert found >= acknowledged
        for _ in range(n % 7 + 1):
            acknowledged = int(await asyncio.to_thread(line, worker))
        worker.kill()
    assert [entry.seq for entry in await store.journal("run")][:acknowledged] == list(range(1, acknowledged + 1))


async def test_a_worker_that_was_stopped_cannot_write_when_it_goes_on(start: Start, store: RedisStore) -> None:
    await store.create(new_run())
    worker = await asyncio.to_thread(start, "drive", 0.3)
    await asyncio.to_thread(line, worker)
    worker.send_signal(signal.SIGSTOP)
    lease, journal = await _taken_over(store)
    worker.send_signal(signal.SIGCONT)
    said, _ = await asyncio.to_thread(worker.communicate, timeout=30)
    assert said.split()[-1] == "lost"
    assert await store.journal("run") == journal
    await store.finish(lease, "completed", b"1")
    row = await store.get("run")
    assert isinstance(row, RunRow)
    assert row.status == "completed"


async def _taken_over(store: RedisStore) -> tuple[Lease, list[Entry]]:
    async with asyncio.timeout(20):
        while not (claims := (await store.claim(1, 600, ["flow"])).claims):  # noqa: ASYNC110 - a lease's end is no event
            await asyncio.sleep(0.02)
    return claims[0].lease, claims[0].journal
