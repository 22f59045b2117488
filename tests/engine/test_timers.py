"""Timers: one that fires early is set again, and many waits cost no more each than few."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import uvloop

from perdure import Context, Retry, Runtime, stores, workflow
from perdure.model.clock import SystemClock, Timer
from perdure.testing import ManualClock
from tests.patience import PATIENCE

# Of each kind. Without a new timer about half of them never end on uvloop, and nearly all with the clock of Windows.
RUNS = 40


@workflow
async def short_sleep(ctx: Context) -> None:
    await ctx.sleep("nap", 0.0137)


@workflow
async def short_pauses(ctx: Context) -> None:
    left = [3]

    def fail() -> None:
        left[0] -= 1
        if left[0]:
            raise ValueError("not yet")

    await ctx.step(fail, retry=Retry(attempts=3, wait_initial="9ms", wait_max="11ms", wait_jitter=0))


async def unfinished(**options: Any) -> int:
    """How many of many runs with short waits have not ended when they should have, long ago."""
    async with Runtime(stores.memory(), [short_sleep, short_pauses], drain_after=0, **options) as runtime:
        runs = [await runtime.start(flow) for flow in (short_sleep, short_pauses) for _ in range(RUNS)]
        waiting = [asyncio.ensure_future(run.outcome()) for run in runs]
        _, left = await asyncio.wait(waiting, timeout=PATIENCE)
        for task in left:
            task.cancel()
        return len(left)


def coarse_loop() -> asyncio.AbstractEventLoop:
    """A loop with the clock of Windows: timers fire up to 16 ms early."""
    loop = asyncio.SelectorEventLoop()
    loop._clock_resolution = 0.0156  # type: ignore[attr-defined]
    return loop


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, coarse_loop])
def test_short_waits_end_on_a_loop_whose_timers_are_early(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(unfinished()) == 0


class EarlyClock(SystemClock):
    """A program's own clock, whose timers fire when half of the time has passed."""

    def call_at(self, at: int, callback: Callable[..., Any], *args: Any) -> Timer:
        return super().call_at((self.now() + at) // 2, callback, *args)

    def store_now(self) -> int | None:
        return self.now()


async def test_short_waits_end_by_a_clock_whose_timers_are_early() -> None:
    assert await unfinished(clock=EarlyClock()) == 0


async def test_a_sleep_ends_after_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    asyncio.get_running_loop().call_later(0.01, monkeypatch.setattr, time, "time_ns", lambda: real() - 300_000_000)
    await asyncio.wait_for(short_sleep(), PATIENCE)  # in memory: the machine's clock decides


async def test_a_timer_of_a_distant_instant_looks_at_its_clock_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.model.clock._LONGEST_DELAY", 0.01)
    real, called = time.time_ns, asyncio.Event()
    SystemClock().call_at(real() // 1000 + 3600_000_000, called.set)
    await asyncio.sleep(0.03)
    assert not called.is_set()
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3600_000_000_000)
    await asyncio.wait_for(called.wait(), PATIENCE)


async def test_a_cancelled_timer_does_not_fire() -> None:
    called = asyncio.Event()
    timer = SystemClock().call_at(0, called.set)
    timer.cancel()
    await asyncio.sleep(0.01)
    assert not called.is_set()


@workflow
async def many_sleeps(ctx: Context, number: int) -> None:
    await asyncio.gather(*(ctx.sleep(f"nap {n}", 60 + n) for n in range(number)))


@workflow
async def many_signals(ctx: Context, number: int) -> None:
    await asyncio.gather(*(ctx.wait_for_signal(f"signal {n}", timeout=3600) for n in range(number)))


@workflow
async def one_signal_often(ctx: Context, number: int) -> None:
    await asyncio.gather(*(ctx.wait_for_signal("signal", key=f"wait {n}") for n in range(number)))


async def calls_for(flow: Any, number: int) -> float:
    """How many functions are called for each of so many waits of one run, where waits are kept."""
    clock, calls = ManualClock(), Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call":
            calls[frame.f_code.co_filename.rpartition("/")[2]] += 1

    async with Runtime(stores.memory(), [flow], clock=clock, unload_grace="1h") as runtime:
        run = await runtime.start(flow, number, id="run")
        while len(await runtime.store.journal("run")) < number:
            await runtime.store.watch(0.01)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            for n in reversed(range(number)):
                if flow is not many_sleeps:
                    await runtime.signal("run", "signal" if flow is one_signal_often else f"signal {n}")
            clock.advance(60 + number)
            await run
        finally:
            sys.setprofile(before)
    return calls["timers_and_signals.py"] / number


@pytest.mark.one_loop
@pytest.mark.parametrize("flow", [many_sleeps, many_signals, one_signal_often], ids=str)
async def test_a_wait_costs_the_same_however_many_there_are(flow: Any) -> None:
    few, many = await calls_for(flow, 50), await calls_for(flow, 400)
    assert many < 1.5 * few + 5, f"{few:.0f} calls for each of 50 waits, {many:.0f} for each of 400"
