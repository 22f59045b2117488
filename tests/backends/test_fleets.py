"""Two worker processes on one store, killed at random and replaced: every run ends once, with its value, and soon."""

from __future__ import annotations

import asyncio
import math
import random
import time
from pathlib import Path
from typing import Final

import pytest

from perdure import Runtime
from perdure.options import LEASE_TTL
from perdure.store import FullStore
from tests.backends.conftest import Start
from tests.backends.errands import SHAPES, check_errands, drive_errands, errand_in, stranded_in, value_of
from tests.backends.ledger import Ledger, lines_of
from tests.backends.opening import store_at
from tests.backends.processes import Child
from tests.backends.registry import MONGO, MYSQL, POSTGRES, REDIS, SQLITE, Backend, by_default, on
from tests.campaign import IS_FULL

PATIENCE: Final = 90.0 if not IS_FULL else 240.0
# Runs at a time, of which the workers have some, and others wait.
AT_ONCE: Final = 100
STORES: Final = (SQLITE, POSTGRES, MYSQL, MONGO, REDIS)
# 2,000 runs on each store under `make chaos`, in batches that take about a minute each.
BATCHES: Final = [(backend, batch) for backend in STORES for batch in range(round(4 * backend.pace) if IS_FULL else 1)]
# How much of the default lease's length may pass after the end of a lease until the run goes on: it does within 12 s by default.
MARGIN: Final = 0.2


class Fleet:
    """Two workers, one of which is killed and replaced now and then. Their generations are counted."""

    def __init__(self, start: Start, dsn: str, ledger: Path, lease_ttl: float) -> None:
        self._start = start
        self._arguments = dsn, ledger
        self._lease_ttl = lease_ttl
        self.killed: set[int] = set()
        self._generations = 0
        self._workers = [self._new_worker(), self._new_worker()]

    def _new_worker(self) -> tuple[int, Child]:
        self._generations += 1
        return self._generations, self._start(drive_errands, *self._arguments, self._generations, self._lease_ttl)

    def kill(self, place: int) -> None:
        """SIGKILL for one of the two, and another in its place."""
        generation, worker = self._workers[place]
        worker.kill()
        self.killed.add(generation)
        self._workers[place] = self._new_worker()

    def stop(self) -> None:
        """Let both end by themselves."""
        for _, worker in self._workers:
            assert worker.receive() == "ready"
            worker.send("stop")
            assert worker.receive() == "done"
            worker.wait_for_exit()


async def start_and_await(store: FullStore, ledger: Path, numbers: range) -> None:
    """Start these runs and signal those that wait for a word, a few at a time, and check the value of each."""
    errand = errand_in(Ledger(ledger, 0))
    places = asyncio.Semaphore(AT_ONCE)

    async def one(runtime: Runtime, number: int) -> None:
        async with places:
            run = await runtime.start(errand, number, id=f"run-{number}")
            if number % SHAPES == 2:
                await run.signal("word", f"word for {number}", dedupe="once")
            assert await run == value_of(number)

    async with Runtime(store, concurrency=0) as runtime, asyncio.timeout(PATIENCE):
        await asyncio.gather(*(one(runtime, number) for number in numbers))
        assert await runtime.list(status="running") == []


@pytest.mark.parametrize(("backend", "batch"), BATCHES, ids=[f"{backend}-{batch}" for backend, batch in BATCHES], scope="session")
async def test_every_run_ends_once_with_its_value_however_often_workers_are_killed(
    backend: Backend, batch: int, dsn: str, start: Start, tmp_path: Path
) -> None:
    runs = math.ceil((500 if IS_FULL else 60) / backend.pace)
    ledger, rng = tmp_path / "ledger", random.Random(f"{backend} {batch}")
    async with store_at(dsn) as store:
        await store.setup()
        fleet = await asyncio.to_thread(Fleet, start, dsn, ledger, 2.5 * backend.lease_ttl)
        work = asyncio.create_task(start_and_await(store, ledger, range(runs)))
        while not work.done():
            await asyncio.wait([work], timeout=rng.uniform(0.3, 1.5) * backend.pace if fleet.killed else 0.2)
            if not work.done() and (IS_FULL or len(fleet.killed) < 3):
                await asyncio.to_thread(fleet.kill, rng.randrange(2))
        await work
        await asyncio.to_thread(fleet.stop)
        for number in range(runs):
            keys = [entry.key for entry in await store.journal(f"run-{number}") if entry.phase == "close"]
            assert len(set(keys)) == len(keys), f"run-{number} recorded a step twice: {keys}"
    check_errands(await asyncio.to_thread(lines_of, ledger), fleet.killed)
    assert fleet.killed


@on(*by_default(STORES, ["same_everywhere"]))
async def test_the_runs_of_a_killed_worker_go_on_elsewhere_in_the_stated_time(
    backend: Backend, dsn: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the default lease under `make chaos`, otherwise with a shorter one. On one machine the end of a process is noticed."""
    is_local = backend is SQLITE
    lease_ttl, ledger = LEASE_TTL if IS_FULL or is_local else 2.0, tmp_path / "ledger"
    stranded = stranded_in(Ledger(ledger, 0), hangs=False)
    async with store_at(dsn) as store, asyncio.timeout(PATIENCE), Runtime(store, concurrency=0) as client:
        await store.setup()
        first = await asyncio.to_thread(start, drive_errands, dsn, ledger, 1, lease_ttl)
        runs = [await client.start(stranded) for _ in range(5)]
        while len(await asyncio.to_thread(lines_of, ledger)) < len(runs):  # noqa: ASYNC110 - what another process writes
            await asyncio.sleep(0.02)
        second = await asyncio.to_thread(start, drive_errands, dsn, ledger, 2, lease_ttl)
        assert await asyncio.to_thread(second.receive) == "ready"
        await asyncio.sleep(4)  # by now it asks more rarely
        await asyncio.to_thread(first.kill)
        killed_at = time.monotonic()
        assert await asyncio.gather(*runs) == ["went on"] * len(runs)
        seconds = time.monotonic() - killed_at
    with capsys.disabled():
        print(f"\n{backend}: the runs of a killed worker went on after {seconds:.2f} s, leased for {lease_ttl:g} s")
    assert seconds < (0 if is_local else lease_ttl) + MARGIN * LEASE_TTL
