"""Clocks that differ: the store's decides when a run is due, whatever the clock of the worker's machine says."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Workflow
from tests.backends.opening import store_at
from tests.backends.places import new_name, with_options
from tests.backends.registry import Backend
from tests.backends.skewed import SkewedStore

SKEWS = (-3600, -5, 5, 3600)
# It may be shorter by the time that the reply with the store's time took.
NAP = 1.5


async def _sleep_under(dsn: str, skew: float, pace: float) -> None:
    """A run that sleeps on a store with this clock is begun twice and sleeps as long as it asked for."""
    starts: list[float] = []

    async def flow(ctx: Context) -> str:
        starts.append(time.monotonic())
        await ctx.sleep("nap", NAP)
        return "awake"

    async with store_at(dsn) as opened:
        store: Any = SkewedStore(opened, skew)
        workflow: Workflow[[], str] = Workflow("nap", flow)
        async with Runtime(store, workflows=[workflow], unload_grace=0, lease_ttl=10 * pace) as runtime:
            run = await runtime.start(workflow, id="sleeper")
            assert await asyncio.wait_for(run, 30) == "awake"
            assert await run.outcome() == Ok("awake")
    assert len(starts) == 2, f"{skew} s: {len(starts)} starts of the body"
    assert 0.8 < starts[1] - starts[0] < NAP + 2 * pace, f"{skew} s: slept {starts[1] - starts[0]} s"
    assert store.calls["claim"] < 40, f"{skew} s: {store.calls['claim']} claims"


@pytest.mark.same_everywhere
async def test_a_run_sleeps_as_long_as_it_asked_for_by_the_clock_of_any_store(backend: Backend, shared_dsn: str) -> None:
    dsns = [with_options(shared_dsn.partition("prefix=")[0].rstrip("?&"), f"prefix={new_name()}") for _ in SKEWS]
    await asyncio.gather(*(_sleep_under(dsn, skew, backend.pace) for dsn, skew in zip(dsns, SKEWS, strict=True)))


async def test_a_difference_of_the_clocks_is_reported_once(
    backend: Backend, shared_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with store_at(shared_dsn) as opened:
        store: Any = SkewedStore(opened, 5)
        for _ in range(2):
            async with Runtime(store) as runtime:
                for _ in range(3):
                    await runtime.sweep()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (seconds,) = [re.findall(r" store is about (.*) s ahead of this machine's", warning) for warning in warnings]
    assert float(*seconds) == pytest.approx(5, abs=0.1 * backend.pace)
