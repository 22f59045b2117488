"""A run that is over leaves nothing for the garbage collector: a thousand runs at once must not wait for it, nor pay for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Err, Ok, Workflow, stores
from perdure.engine.heartbeat import _beating, _thread, heartbeat_of
from perdure.model.clock import SystemClock, elapsed
from perdure.model.records import Pulse
from perdure.store import Store
from perdure.testing.contract.world import new_run
from tests.leases import held_lease
from tests.patience import turns, until


async def work(n: int) -> int:
    return n


async def one_by_one(ctx: Context[Any]) -> int:
    return await ctx.step("a", work, 1) + await ctx.step("b", work, 2)


async def side_by_side(ctx: Context[Any]) -> list[int]:
    return await asyncio.gather(*(ctx.step("work", work, n, key=f"{n}") for n in range(5)))


async def mapped(ctx: Context[Any]) -> list[int]:
    return await ctx.map(work, range(5))


async def failing(ctx: Context[Any]) -> int:
    await ctx.step("a", work, 1)
    raise ValueError("no")


@pytest.fixture
def _collected() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # a heartbeat's thread may let go of the store of an earlier test only now
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("_collected")
@pytest.mark.parametrize("body", [one_by_one, side_by_side, mapped, failing])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_run_that_is_over_leaves_no_garbage(body: Any, kind: str, tmp_path: Path) -> None:
    flow = Workflow("flow", body)
    store: Store = stores.memory() if kind == "memory" else stores.sqlite(tmp_path / "runs.db")
    await flow.run(id="first", store=store)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for n in range(3):
        outcome = await flow.run(id=f"run-{n}", store=store)
        assert isinstance(outcome, Err if body is failing else Ok)
    del outcome
    await asyncio.sleep(0)
    gc.collect()
    assert sorted(repr(type(one)) for one in gc.garbage if type(one).__module__.startswith("perdure")) == []
    gc.set_debug(0)
    await store.close()


@pytest.mark.usefixtures("_collected")
async def test_a_heartbeat_that_ends_leaves_no_garbage() -> None:
    store = stores.memory()
    beat = heartbeat_of(store, 0.03)
    claim = (await store.create(new_run("run"), ttl=30)).claim
    assert claim is not None
    renewed: list[Pulse] = []
    held = held_lease(claim, 30, elapsed(), SystemClock(), renewed.append)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    beat.hold(held)
    await until(lambda: renewed)
    beat.drop(held)
    await until(lambda: beat not in _beating)
    await asyncio.wrap_future(_thread.submit(turns()))  # its tasks end
    gc.collect()
    assert [one for one in gc.garbage if type(one).__module__.startswith("perdure")] == []
