"""Several processes on one file. Leases end with the process that holds them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from perdure.errors import LeaseHeld
from perdure.store import FullStore
from tests.backends.disk_processes import StartChild, go, integrity, kill_unreaped, run_to_end
from tests.backends.opening import store_at
from tests.patience import PATIENCE

ENTRIES: Final = 25


@pytest.fixture
def sound_dsn(path: Path, dsn: str) -> Iterator[str]:
    """An empty place. The database that the test has left there is sound."""
    yield dsn
    assert integrity(path) == "ok"


async def journal_lengths(dsn: str, run_ids: list[str]) -> list[int]:
    async with store_at(dsn) as store:
        return [len(await store.journal(run_id)) for run_id in run_ids]


async def count(dsn: str) -> int:
    async with store_at(dsn) as store:
        return await store.count()


def test_a_place_that_sixteen_processes_set_up_at_once_is_sound(sound_dsn: str, start_child: StartChild) -> None:
    processes = [start_child("setup", sound_dsn) for _ in range(16)]
    for process in processes:
        go(process)
    for process in processes:
        run_to_end(process)
    assert asyncio.run(count(sound_dsn)) == 0


def test_eight_processes_write_at_once_without_an_error(sound_dsn: str, start_child: StartChild) -> None:
    processes = [start_child("write", sound_dsn, f"p{n}", ENTRIES) for n in range(8)]
    for process in processes:
        go(process)
    for process in processes:
        run_to_end(process)
    run_ids = [f"p{n}-{k}" for n in range(8) for k in range(4)]
    assert asyncio.run(journal_lengths(sound_dsn, run_ids)) == [ENTRIES] * 32
    assert asyncio.run(count(sound_dsn)) == 32


def test_a_forked_child_and_its_parent_both_go_on(sound_dsn: str, start_child: StartChild) -> None:
    process = start_child("fork", sound_dsn, ready=False)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"ready\n", "parent closed\n"}  # the child has begun to write
    assert run_to_end(process) == "child 0\n"
    assert asyncio.run(journal_lengths(sound_dsn, ["before", "child"])) == [210, 40]


async def claimed_ids(store: FullStore) -> list[str]:
    return [claim.run.id for claim in (await store.claim(10, 60, [("flow", 1)])).claims]


async def test_a_lease_is_free_at_once_when_its_process_was_killed(store: FullStore, dsn: str, start_child: StartChild) -> None:
    process = await asyncio.to_thread(start_child, "hold", dsn, "run")
    assert await claimed_ids(store) == []
    assert await store.due() == []
    with pytest.raises(LeaseHeld, match=f"process {process.pid} "):
        await store.acquire("run", 60)
    await kill_unreaped(process)
    async with asyncio.timeout(PATIENCE):
        while not (ids := await claimed_ids(store)):  # noqa: ASYNC110 - another process's death is no event
            await asyncio.sleep(0.01)
    assert ids == ["run"]


async def test_a_killed_holders_run_is_due_and_can_be_acquired(store: FullStore, dsn: str, start_child: StartChild) -> None:
    process = await asyncio.to_thread(start_child, "hold", dsn, "run")
    assert await store.due() == []
    await kill_unreaped(process)
    async with asyncio.timeout(PATIENCE):
        while await store.due() != ["run"]:  # noqa: ASYNC110 - another process's death is no event
            await asyncio.sleep(0.01)
    assert await store.acquire("run", 60) is not None


async def test_a_stopped_process_keeps_its_lease(store: FullStore, dsn: str, start_child: StartChild) -> None:
    process = await asyncio.to_thread(start_child, "hold", dsn, "run")
    process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(3):
        assert await claimed_ids(store) == []
        await asyncio.sleep(0.25)  # longer than an answer about a process is believed
    with pytest.raises(LeaseHeld):
        await store.acquire("run", 60)
    process.send_signal(signal.SIGCONT)
