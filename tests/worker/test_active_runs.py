"""The registry of what this process drives: every drive is in it, and none stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain

import pytest

from perdure import Ok, Runtime
from perdure.store import Store
from perdure.worker.active_runs import active_runs
from tests.patience import PATIENCE
from tests.worker.flows import Gate, ask, greet, soon


def _registered() -> set[object]:
    return {*active_runs._by_key.values(), *active_runs._keepers, *chain(*active_runs._by_owner.values())}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = _registered()  # a test of this process may have closed its loop under a drive
    yield
    assert _registered() <= before


async def test_a_drive_is_found_by_its_run_as_long_as_it_goes_on(store: Store) -> None:
    gate = Gate()
    async with Runtime(store, [gate.flow], concurrency=0) as runtime, asyncio.timeout(PATIENCE):
        call = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        active = active_runs.find(store, "r1")
        assert active is not None
        assert active_runs.of(runtime._host) == {active}
        gate.opened.set()
        assert await call == Ok("through")
        assert active_runs.find(store, "r1") is None


async def test_only_what_a_worker_drives_counts_against_its_concurrency(store: Store) -> None:
    gate = Gate()
    async with Runtime(store, [gate.flow, greet], concurrency=1) as runtime, asyncio.timeout(PATIENCE):
        call = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
        assert runtime._worker is not None
        assert not active_runs.of(runtime._worker)
        assert await (await runtime.start(greet, "Ada", id="g1")) == "hello Ada!"
        gate.opened.set()
        assert await call == Ok("through")


async def test_a_started_run_is_kept_until_it_has_ended_and_driven_only_while_it_is_due(store: Store) -> None:
    async with asyncio.timeout(PATIENCE):
        run = await ask.start(id="a1", store=store)
        await run.outcome()
        assert active_runs.find(store, "a1") is None
        kept = {task for task in active_runs._keepers if task.get_name() == "perdure-run:a1"}
        assert len(kept) == 1
        await run.signal("answer", 7)
        assert await run == 7

        async def is_forgotten() -> bool:
            return kept.isdisjoint(active_runs._keepers)

        await soon(is_forgotten)
