"""A thousand children: the parent is a row meanwhile, each runs once although a worker is killed, and a cancel reaches all."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from perdure import Runtime
from perdure.errors import RunCancelled
from tests.backends.child_jobs import drive_family, family_in
from tests.backends.conftest import Start
from tests.backends.ledger import Ledger, lines_of
from tests.backends.opening import store_at
from tests.backends.processes import Child
from tests.backends.registry import POSTGRES, SQLITE, Backend, on
from tests.campaign import IS_FULL, times

COUNT: Final = times(1000)
PATIENCE: Final = 300.0 if IS_FULL else 90.0
LEASE_TTL: Final = 2.0


async def until(is_so: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - what another process writes
        await asyncio.sleep(0.02)


def is_idle(worker: Child) -> bool:
    """Whether the worker has no run in its memory."""
    worker.send("how many")
    return bool(worker.receive() == 0)


def check_once(ledger: Path, killed: str) -> int:
    """Each child ran its step once; again only if the process that had run it was killed before the step was recorded.

    How often the parent was driven.
    """
    calls = defaultdict(list)
    for line in lines_of(ledger):
        calls[line.run].append(line.generation)
    drives = len(calls.pop("family"))
    assert len(calls) == COUNT
    assert not {run: by for run, by in calls.items() if any(generation != killed for generation in by[:-1])}
    return drives


@on(POSTGRES, SQLITE)
@pytest.mark.timeout(PATIENCE)
async def test_each_child_runs_once_and_the_parent_is_not_in_memory(
    backend: Backend, dsn: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger"
    async with store_at(dsn) as store, Runtime(store, family_in(Ledger(ledger, 0)), concurrency=0) as client:
        await store.setup()
        first = await asyncio.to_thread(start, drive_family, dsn, ledger, 1, ["parents"], LEASE_TTL)
        assert await asyncio.to_thread(first.receive) == "ready"
        run = await client.start("gather", COUNT, id="family", queue="parents")
        while await run.status() != "suspended":
            await store.watch(0.05)
        row = await store.get("family")
        assert row is not None
        assert len(row.waiting_for) == COUNT
        assert await client.count(prefix="family/", status="pending") == COUNT
        await until(lambda: is_idle(first))  # its tasks take a moment to end
        second = await asyncio.to_thread(start, drive_family, dsn, ledger, 2, ["parents", "pieces"], LEASE_TTL)
        third = await asyncio.to_thread(start, drive_family, dsn, ledger, 3, ["parents", "pieces"], LEASE_TTL)
        await asyncio.to_thread(first.kill)  # so that one of two that work is killed
        await until(lambda: len(lines_of(ledger)) > COUNT // 4)
        await asyncio.to_thread(second.kill)
        assert await run == sum(range(COUNT))
        assert await client.count(prefix="family/", status="completed") == COUNT
        await asyncio.to_thread(third.send, "stop")
    drives = await asyncio.to_thread(check_once, ledger, "2")
    with capsys.disabled():
        print(f"\n{backend}: the parent of {COUNT} children was driven {drives} times")
    assert drives < 30


@on(POSTGRES, SQLITE)
@pytest.mark.timeout(PATIENCE)
async def test_cancelling_the_parent_reaches_all_children(backend: Backend, dsn: str, start: Start, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with store_at(dsn) as store, Runtime(store, family_in(Ledger(ledger, 0)), concurrency=0) as client:
        await store.setup()
        workers = [await asyncio.to_thread(start, drive_family, dsn, ledger, n, ["parents", "pieces"], LEASE_TTL) for n in (1, 2)]
        run = await client.start("hold", COUNT, id="family", queue="parents")
        await until(lambda: len({line.run for line in lines_of(ledger)}) == COUNT)
        await run.cancel()
        await asyncio.to_thread(workers[0].kill)
        with pytest.raises(RunCancelled):
            await run
        assert await client.count(prefix="family/", status="cancelled") == COUNT
        await asyncio.to_thread(workers[1].send, "stop")
