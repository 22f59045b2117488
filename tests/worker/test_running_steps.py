"""The heartbeat says which steps are under way, and the store keeps it with the run."""

from __future__ import annotations

import asyncio

import pytest

from perdure import Context, Runtime, workflow
from perdure.model.running_steps import MAX_BYTES, RunningSteps, decode_running_steps, encode_running_steps
from perdure.store import Store
from tests.patience import PATIENCE
from tests.worker.flows import soon


@pytest.mark.parametrize("count", [0, 1, 3, 5000])
def test_what_a_renewal_carries_is_bounded_and_names_the_first(count: int) -> None:
    starts = {f"step-{number}": number for number in range(count)}
    encoded = encode_running_steps(starts)
    assert (encoded is None) == (count == 0)
    assert len(encoded or b"") <= MAX_BYTES
    found = decode_running_steps(encoded)
    assert found.count == count
    assert found.started == tuple(starts.items())[: len(found.started)]
    assert len(found.started) == count or len(found.started) > 100


def test_one_key_that_is_too_long_is_only_counted() -> None:
    assert decode_running_steps(encode_running_steps({"k" * 2 * MAX_BYTES: 1})) == RunningSteps(1, ())


async def _has_running_steps(store: Store) -> bool:
    row = await store.get("r")
    return row is not None and row.running_steps is not None


async def test_a_renewal_keeps_the_steps_under_way_with_the_run(store: Store) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        await go_on.wait()

    @workflow
    async def two(ctx: Context) -> None:
        await asyncio.gather(ctx.step(wait, key="a"), ctx.step(wait, key="b"))

    async with Runtime(store, [two], lease_ttl="300ms") as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(two, id="r")
        await started.wait()
        await soon(lambda: _has_running_steps(store))
        row = await store.get("r")
        assert row is not None
        steps = decode_running_steps(row.running_steps)
        assert [key for key, _ in steps.started] == ["a", "b"]
        assert all(row.created_at <= at <= row.updated_at for _, at in steps.started)
        go_on.set()
        await run
        assert not await _has_running_steps(store)
