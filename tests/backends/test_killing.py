"""Workers killed with SIGKILL at random moments of their work: nothing is lost, repeated or stranded."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.backends import jobs
from tests.backends.conftest import Start
from tests.backends.ledger import check, count_repeats, lines_of, result_of
from tests.backends.opening import store_at
from tests.backends.processes import PATIENCE
from tests.backends.registry import Backend

# Kills in one place. Then there is a fresh one, so that kills hit all stages of the work, set-up included.
TOGETHER: Final = 10
# How many more places there are if too few kills hit the work: of the four kills of a short campaign none may.
MORE_BATCHES: Final = 3
BEGUN: Final = 4


@pytest.mark.slow_stores_too
def test_no_kill_loses_repeats_or_strands_anything(backend: Backend, start: Start, tmp_path: Path) -> None:
    kills, killed, hits = backend.times(backend.kills), 0, 0
    rng = random.Random(kills)
    for batch in range(-(-kills // TOGETHER) + MORE_BATCHES):
        ledger, together = tmp_path / str(batch), min(TOGETHER, max(kills - killed, 4))
        with backend.place() as dsn:
            survive(backend, dsn, start, ledger, rng, together)
            asyncio.run(check_runs(dsn))
        check(lines_of(ledger))
        killed += together
        hits += count_repeats(lines_of(ledger))
        if killed >= kills and hits > kills / 5:
            return
    pytest.fail(f"{hits} of {killed} kills hit the work, so nothing was shown")


def survive(backend: Backend, dsn: str, start: Start, ledger: Path, rng: random.Random, kills: int) -> None:
    for generation in range(kills):
        done = len(lines_of(ledger))
        worker = start(jobs.worker, dsn, ledger, generation, backend.lease_ttl, BEGUN)
        if rng.random() < 0.8:
            assert worker.receive() == "ready"
            wait_for_steps(ledger, done + rng.randrange(40))
        time.sleep(rng.random() * 0.05 * backend.pace)
        worker.kill()
    last = start(jobs.worker, dsn, ledger, kills, backend.lease_ttl, BEGUN)
    assert last.receive() == "ready"
    last.send("come to an end")
    while last.receive() != "done":
        continue  # a run has ended, and there is patience for another
    last.wait_for_exit()


def wait_for_steps(ledger: Path, count: int) -> None:
    """Return when so many steps have run: kills must hit the work, however fast it is."""
    deadline = time.monotonic() + PATIENCE
    while len(lines_of(ledger)) < count:
        assert time.monotonic() < deadline, "nobody works"
        time.sleep(0.002)


async def check_runs(dsn: str) -> None:
    """Every run completed with its result, each key was recorded once, and every signal was consumed."""
    async with store_at(dsn) as store:
        lines = await store.list(limit=10_000)
        assert {line.status for line in lines} == {"completed"}
        for line in lines:
            row = await store.get(line.id)
            assert row is not None
            assert row.outcome is not None
            assert msgspec.json.decode(row.outcome) == result_of(int(line.id.rpartition("-")[2]))
            keys = Counter(entry.key for entry in await store.journal(line.id) if entry.phase == "close")
            assert max(keys.values()) == 1, f"recorded twice: {keys.most_common(1)}"
            assert await store.inbox(line.id) == []
