"""A process that migrates is killed at any moment, the source goes on, and the next one ends with two equal stores."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perdure import open_store
from perdure.model.journal import Entry
from perdure.model.records import NewRun
from perdure.store import Store
from tests.backends.registry import BACKENDS
from tests.campaign import times
from tests.migration.worlds import PLACES, add_schedules_and_limits, everything

CHILD = Path(__file__).parent / "child.py"
RUNS = 120


class Migrating:
    """A process that is told to migrate, and has begun."""

    def __init__(self, source: str, target: str, batch: int, dies_at: int = 0) -> None:
        command = [sys.executable, str(CHILD), source, target, str(batch), str(dies_at)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def died(self) -> bool:
        self.process.communicate(timeout=60)
        return self.process.returncode == -signal.SIGKILL

    def finish(self) -> tuple[int, int, int]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        copied, already_there, skipped = map(int, out.split())
        return copied, already_there, skipped


@pytest.mark.parametrize("target_name", PLACES)
def test_no_kill_leaves_half_a_run_and_the_next_call_ends_equal(target_name: str) -> None:
    kills = times(40)
    rng = random.Random(target_name)
    with BACKENDS["sqlite"].place() as source, BACKENDS[target_name].place() as target:
        asyncio.run(_filled(source))
        for number in range(kills):
            batch = rng.choice([1, 5, 50])
            if number % 2:  # at any moment
                migrating = Migrating(source, target, batch)
                time.sleep(rng.random() * 0.25)
                migrating.kill()
            else:  # for certain half-way
                assert Migrating(source, target, batch, dies_at=rng.randint(1, 6)).died()
            asyncio.run(_only_whole_runs(source, target))
            asyncio.run(_changed(source, rng, number))
        copied, already_there, skipped = Migrating(source, target, 20).finish()
        assert (copied + already_there, skipped) == (RUNS + kills, 0)
        assert Migrating(source, target, 20).finish() == (0, RUNS + kills, 0)
        here, there = asyncio.run(_both(source, target))
        assert here == there


async def _filled(dsn: str) -> None:
    store = await asyncio.to_thread(open_store, dsn)
    await add_schedules_and_limits(store)
    for number in range(RUNS):
        await _begin(store, f"run {number}")
    await store.close()


async def _begin(store: Store, run_id: str) -> None:
    new = NewRun(id=run_id, workflow="flow", input=b"[]", input_hash=b"hash", seed=run_id.encode())
    created = await store.create(new, ttl=60)
    assert created.claim is not None
    entries = [Entry(seq=seq, key=f"step {seq}", payload=run_id.encode() * seq) for seq in range(1, 6)]
    await store.signal(run_id, "go", run_id.encode(), dedupe="d")
    await store.suspend(created.claim.lease, wake_at=None, entries=entries)


async def _changed(dsn: str, rng: random.Random, number: int) -> None:
    """What workers on the source might do between two calls: go on with some runs, take their signal, end one, begin one."""
    store = await asyncio.to_thread(open_store, dsn)
    for chosen in rng.sample(range(RUNS), 5):
        claim = await store.acquire(f"run {chosen}", 60, due_only=False)
        if claim is not None:
            seq = claim.journal[-1].seq + 1
            taken = [signal.seq for signal in claim.inbox]
            entries = [Entry(seq=seq, key=f"step {seq}", kind="signal", name="go", payload=claim.run.id.encode())]
            await store.suspend(claim.lease, wake_at=None, entries=entries, consume=taken)
    claim = await store.acquire(f"run {rng.randrange(RUNS)}", 60, due_only=False)
    if claim is not None:
        await store.finish(claim.lease, "completed", b"null")
    await _begin(store, f"later {number}")
    await store.close()


async def _only_whole_runs(source: str, target: str) -> None:
    """Each run that the target has is as it was when it was copied: nothing of one is there without the rest."""
    here, there = await _both(source, target)
    for run_id, (_, journal, inbox) in there["runs"].items():
        then = here["runs"][run_id][1][: len(journal)]
        assert journal == then
        assert len(journal) >= 5
        assert len(inbox) == (1 if len(journal) == 5 else 0)


async def _both(source: str, target: str) -> tuple[dict[str, dict[str, tuple[object, list[Entry], list[object]]]], ...]:
    shown = []
    for dsn in (source, target):
        store = await asyncio.to_thread(open_store, dsn)
        shown.append(await everything(store))
        await store.close()
    return tuple(shown)
