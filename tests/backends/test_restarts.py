"""What a store is made of goes down in the middle of the work: the server, the way to it, or every process where there is none.

Nothing that was acknowledged is lost, and whoever is still alive goes on by itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from perdure.model.run_filter import RunFilter
from perdure.store import FullStore
from perdure.testing.contract.world import entry
from tests.backends import jobs
from tests.backends.conftest import Start
from tests.backends.ledger import PLACES, Line, check, lines_of, result_of
from tests.backends.opening import store_at
from tests.backends.processes import Child
from tests.backends.registry import Backend, Server

PATIENCE: Final = 100.0
Disaster: TypeAlias = Callable[[], None]

JOBS: Final = (jobs.serve, jobs.serve, jobs.order_more, jobs.record_more)


class Crew:
    """Two workers, a customer and a recorder, all at work on one place, with one ledger."""

    def __init__(self, dsn: str, start: Start, ledger: Path, ttl: float) -> None:
        self.dsn, self._start, self._ledger, self._ttl = dsn, start, ledger, ttl
        self._generation = 0
        self.children: list[Child] = []

    def begin(self) -> None:
        self.children = [self._start(job, self.dsn, self._ledger, self._generation + n, self._ttl) for n, job in enumerate(JOBS)]
        self._generation += len(JOBS)
        for child in self.children:
            assert child.receive() == "ready"

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    def end(self) -> None:
        """Stop the customer and the recorder; the workers once every run has ended."""
        *workers, customer, recorder = self.children
        for child in (customer, recorder):
            child.send("stop")
            child.wait_for_exit()
        asyncio.run(all_ended(self.dsn))
        for child in workers:
            child.send("stop")
            child.wait_for_exit()

    def has_done(self) -> dict[str, int]:
        """How much of each kind is noted so far."""
        lines = lines_of(self._ledger)
        steps = sum(line.step in PLACES for line in lines)
        records = sum(line.run == "records" for line in lines)
        return {"steps": steps, "records": records, "orders": len(lines) - steps - records}

    def work_on(self, by: int = 10) -> None:
        """Wait until everybody has got on by so much."""
        before, deadline = self.has_done(), time.monotonic() + PATIENCE
        while (least := min(now - before[kind] for kind, now in self.has_done().items())) < by:
            assert time.monotonic() < deadline, f"somebody does not go on: {before}, then {self.has_done()} ({least})"
            time.sleep(0.02)


@contextmanager
def server_killed(backend: Backend, server: Server, start: Start, ledger: Path) -> Iterator[tuple[Crew, Disaster]]:
    """A crew, and what brings its server down and up again."""

    rng = random.Random(20)

    def disaster() -> None:
        server.kill()
        time.sleep(rng.random() * 0.5)  # longer than one attempt to reach it
        server.start()

    server.start()
    try:
        yield Crew(server.dsn, start, ledger, backend.lease_ttl), disaster
    finally:
        server.remove()


@contextmanager
def every_process_killed(backend: Backend, start: Start, ledger: Path) -> Iterator[tuple[Crew, Disaster]]:
    """A crew, and what kills it and puts another in its place."""
    with backend.place() as dsn:
        crew = Crew(dsn, start, ledger, backend.lease_ttl)

        def disaster() -> None:
            crew.kill()
            crew.begin()

        yield crew, disaster


def test_nothing_acknowledged_is_lost_when_it_goes_down_under_load(
    backend: Backend, goes_down: str, start: Start, tmp_path: Path
) -> None:
    ledger, own = tmp_path / "ledger", backend.own_server
    world = every_process_killed(backend, start, ledger) if own is None else server_killed(backend, own(), start, ledger)
    with world as (crew, disaster):
        crew.begin()
        for _ in range(backend.times(20)):
            crew.work_on()
            disaster()
            asyncio.run(check_acknowledged(crew.dsn, lines_of(ledger)))
        crew.work_on()
        crew.end()
        asyncio.run(check_place(crew.dsn, lines_of(ledger)))
    check([line for line in lines_of(ledger) if line.step in PLACES])


async def all_ended(dsn: str) -> None:
    async with store_at(dsn) as store, asyncio.timeout(PATIENCE):
        completed = RunFilter(prefix="order-", status=("completed",))
        while await store.count(RunFilter(prefix="order-")) > await store.count(completed):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # other processes complete them


async def check_acknowledged(dsn: str, lines: list[Line]) -> None:
    """The last starts, signals and records that returned are there, or what became of them."""
    started, signalled = ([line.run for line in lines if line.step == what][-50:] for what in ("started", "signalled"))
    last_record = max(int(line.step) for line in lines if line.run == "records")
    async with store_at(dsn) as store:
        lost = [run_id for run_id in started if await store.get(run_id) is None]
        assert not lost, "started, but gone"
        lost = [run_id for run_id in signalled if "hurry" not in await signals_of(store, run_id)]
        assert not lost, "signalled, but not a trace of it"
        assert [line.seq for line in await store.journal("records")][:last_record] == list(range(1, last_record + 1))


async def signals_of(store: FullStore, run_id: str) -> set[str]:
    """The signals that a run has in its inbox, or has consumed."""
    waiting = {signal.name for signal in await store.inbox(run_id)}  # first: a worker may consume them meanwhile
    return waiting.union(line.key for line in await store.journal(run_id) if line.phase == "close")


async def check_place(dsn: str, lines: list[Line]) -> None:
    """Every start, signal and record that returned is there."""
    started = {line.run for line in lines if line.step == "started"}
    records = max(int(line.step) for line in lines if line.run == "records")
    async with store_at(dsn) as store:
        assert started == {line.id for line in await store.list(RunFilter(prefix="order-"), limit=100_000)}
        for run_id in started:
            row, number = await store.get(run_id), int(run_id.rpartition("-")[2])
            assert row is not None
            assert msgspec.json.decode(row.outcome or b"null") == result_of(number, f"hurry {number}")
            assert await store.inbox(run_id) == []
        assert await store.journal("records") == [entry(seq) for seq in range(1, records + 1)]
