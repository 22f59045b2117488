"""Many processes that do the same thing at the same moment: one of them does it, and all of them can go on."""

from __future__ import annotations

import asyncio
import random

import pytest

from perdure.model.run_filter import RunFilter
from perdure.testing.contract.world import entry
from tests.backends import jobs
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.processes import CONTEXT
from tests.backends.registry import Backend


def test_thirty_two_processes_that_start_one_id_make_one_run(backend: Backend, dsn: str, start: Start) -> None:
    ids = [f"run-{n}{other}" for other in ("", "!") for n in range(backend.times(20))]
    barrier = CONTEXT.Barrier(32)  # lives as long as this name
    children = [start(jobs.start_together, dsn, barrier, me, ids) for me in range(32)]
    for run_id in ids:
        found = [answer for child in children if (answer := child.receive()) is not None]
        assert sum(answer.is_new for answer in found) == 1, "one process made it"
        assert sum(answer.is_leased for answer in found) == 1, "and has the lease"
        assert len({(answer.seed, answer.input) for answer in found}) == 1, "and all found the run that it made"
        assert len(found) == (16 if run_id.endswith("!") else 32), "but whoever brought another input"
    for child in children:
        child.wait_for_exit()


@pytest.mark.parametrize("killed", [0, 8], ids=["all live", "half are killed"])
def test_sixteen_processes_set_up_one_place_at_once(backend: Backend, start: Start, killed: int) -> None:
    rng = random.Random(killed)
    for _ in range(backend.times(10)):
        moments = [rng.random() * 0.05 if me < killed else None for me in range(16)]
        with backend.place() as dsn:
            barrier = CONTEXT.Barrier(16)
            children = [start(jobs.set_up_together, dsn, barrier, me, killed_after) for me, killed_after in enumerate(moments)]
            for child in children[killed:]:
                assert child.receive() == "done"
                child.wait_for_exit()
            for child in children[:killed]:
                child.kill()
            asyncio.run(check_place(dsn, range(killed, 16)))


async def check_place(dsn: str, survivors: range) -> None:
    async with store_at(dsn) as store:
        assert {f"run-{me}" for me in survivors} <= {line.id for line in await store.list(RunFilter(status=("completed",)))}
        for me in survivors:
            assert await store.journal(f"run-{me}") == [entry(seq) for seq in range(1, 4)]
