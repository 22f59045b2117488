"""Limits of queues over several worker processes, some of which are killed: they hold at every instant, from recorded times."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from perdure import Runtime
from perdure.model.run_filter import RunFilter
from tests.backends.conftest import Start
from tests.backends.ledger import Ledger
from tests.backends.opening import store_at
from tests.backends.processes import PATIENCE, Child
from tests.backends.queue_jobs import FEW, SLOW, LedgerLine, job_of, now, queue_worker, read_ledger
from tests.backends.registry import POSTGRES, REDIS, SQLITE, Backend, on
from tests.campaign import IS_FULL, times

WORKERS: Final = 4
KEYS: Final = "abcde"


@on(SQLITE, POSTGRES, REDIS)
def test_limits_hold_while_workers_are_killed_and_restarted(backend: Backend, dsn: str, start: Start, tmp_path: Path) -> None:
    Campaign(backend, dsn, start, tmp_path / "ledger").go_through(kills=times(20))


@pytest.mark.chaos
def test_limits_hold_on_every_store(backend: Backend, dsn: str, start: Start, tmp_path: Path) -> None:
    Campaign(backend, dsn, start, tmp_path / "ledger").go_through(kills=10)


class Campaign:
    """Runs of two limited queues, and the workers that drive them."""

    def __init__(self, backend: Backend, dsn: str, start: Start, path: Path) -> None:
        self._dsn = dsn
        self._start = start
        self._path = path
        # Longer than in other campaigns: a worker that stands still for longer than its lease is replaced while it runs on.
        self._lease_ttl = 2.0 * backend.pace
        self._runs = {FEW.name: 40 if IS_FULL else 20, SLOW.name: 60 if IS_FULL else 30}
        self._workers: dict[int, Child] = {}
        self._killed_at: dict[int, int] = {}

    def go_through(self, kills: int) -> None:
        rng = random.Random(kills)
        asyncio.run(self._create_runs())  # before the workers, so that there is always more to do than the limits let in
        for generation in range(WORKERS):
            self._start_worker(generation)
        for generation in range(WORKERS, WORKERS + kills):
            self._wait_for_lines(len(read_ledger(self._path)) + rng.randrange(5, 40))
            self._kill_worker(rng.choice(sorted(self._workers)))
            self._start_worker(generation)
        asyncio.run(self._wait_for_the_end())
        for worker in self._workers.values():
            worker.send("enough")
            assert worker.receive() == "left"
        self._check(read_ledger(self._path))

    def _start_worker(self, generation: int) -> None:
        worker = self._start(queue_worker, self._dsn, self._path, generation, self._lease_ttl)
        assert worker.receive() == "ready"
        self._workers[generation] = worker

    def _kill_worker(self, generation: int) -> None:
        self._killed_at[generation] = now()
        self._workers.pop(generation).kill()

    async def _create_runs(self) -> None:
        job = job_of(Ledger(self._path, -1))
        async with store_at(self._dsn) as store, Runtime(store, [job], concurrency=0) as client:
            for queue, number in self._runs.items():
                for n in range(number):
                    key = KEYS[n * len(KEYS) // number]  # those with the same key one after the other, in each other's way
                    await client.start(job, key, id=f"{queue}-{n}", queue=queue, limit_key=key)

    def _wait_for_lines(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(read_ledger(self._path)) < count and not self._is_idle():
            assert time.monotonic() < deadline, "nothing works"
            time.sleep(0.002)

    def _is_idle(self) -> bool:
        ended = Counter(line.run for line in read_ledger(self._path) if line.what == "end")
        return len(ended) == sum(self._runs.values())

    async def _wait_for_the_end(self) -> None:
        async with asyncio.timeout(PATIENCE), store_at(self._dsn) as store:
            while await store.count(RunFilter(status=("completed",))) < sum(self._runs.values()):  # noqa: ASYNC110 - in other processes
                await asyncio.sleep(0.02)

    def _check(self, lines: list[LedgerLine]) -> None:
        intervals = [*self._intervals(line for line in lines if line.run.startswith(FEW.name))]
        assert most_at_once((begin, end) for begin, end, _ in intervals) <= 3
        for key in KEYS:
            assert most_at_once((begin, end) for begin, end, of in intervals if of == key) == 1
        starts = sorted(line.at for line in lines if line.what == "start" and line.run.startswith(SLOW.name))
        assert len(starts) > self._runs[SLOW.name] / 2, "the ledger misses the starts, so nothing was shown"
        assert min(later - earlier for earlier, later in itertools.pairwise(starts)) >= 50_000
        assert most_at_once((at, at + 1_000_000) for at in starts) <= 20

    def _intervals(self, lines: Iterable[LedgerLine]) -> Iterable[tuple[int, int, str]]:
        """When each step ran, and its limit key. A step whose process was killed ended with it."""
        begun: dict[tuple[int, str], LedgerLine] = {}
        for line in lines:
            if line.what == "begin":
                begun[line.generation, line.run] = line
            elif line.what == "end":
                yield begun.pop((line.generation, line.run)).at, line.at, line.key
        for line in begun.values():
            yield line.at, self._killed_at[line.generation], line.key


def most_at_once(intervals: Iterable[tuple[int, int]]) -> int:
    """How many of these intervals have an instant in common; one that begins when another ends has none with it."""
    changes = sorted(change for begin, end in intervals for change in ((begin, 1), (end, -1)))
    return max(itertools.accumulate(change for _, change in changes), default=0)
