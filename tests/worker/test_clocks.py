"""The clock that decides: a store's own, for every instant that a worker makes or compares with one of the store's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure import Context, Retry, Runtime, Suspended, Workflow, workflow
from perdure.model import clock as clocks
from perdure.model.clock import StoreClock, SystemClock
from perdure.store import FullStore
from tests.backends.skewed import SkewedStore
from tests.patience import PATIENCE
from tests.worker.flows import client, nap, reaches

SKEWS = pytest.mark.parametrize("skew", [-3600, -20, 20, 3600])
HOUR = 3600 * 1_000_000


@pytest.fixture(autouse=True)
def _nothing_reported() -> Iterator[None]:
    clocks._reported.clear()
    yield
    clocks._reported.clear()


def counting(starts: list[float]) -> Workflow[[], str]:
    async def flow(ctx: Context) -> str:
        starts.append(time.monotonic())
        await ctx.sleep("nap", 0.5)
        return "awake"

    return Workflow("counting", flow)


@SKEWS
async def test_a_run_without_a_runtime_sleeps_by_the_clock_of_its_store(store: FullStore, skew: float) -> None:
    starts: list[float] = []
    skewed: Any = SkewedStore(store, skew)
    run = await counting(starts).start(store=skewed, id="sleeper")
    assert await asyncio.wait_for(run, PATIENCE) == "awake"
    assert len(starts) <= 2
    assert 0.4 < time.monotonic() - starts[0] < 15
    assert skewed.calls["acquire"] < 20


@SKEWS
async def test_a_client_that_starts_nothing_sees_that_a_run_sleeps(store: FullStore, skew: float) -> None:
    skewed: Any = SkewedStore(store, skew)
    async with Runtime(skewed, workflows=[nap], unload_grace=0) as runtime:
        await runtime.start(nap, id="sleeper")
        await reaches(store, "sleeper", "suspended")
    async with client(skewed, nap) as runtime:
        run = await runtime.get("sleeper")
        assert run is not None
        outcome = await asyncio.wait_for(run.outcome(), PATIENCE)
    assert isinstance(outcome, Suspended)


@SKEWS
async def test_a_sweep_at_an_instant_leases_by_the_clock_of_the_store(store: FullStore, skew: float) -> None:
    skewed: Any = SkewedStore(store, skew)
    async with client(skewed, nap, unload_grace=0) as runtime:
        await runtime.start(nap, id="sleeper")
        (slept,) = (await runtime.sweep()).values()
        assert isinstance(slept, Suspended)
    async with client(skewed, nap, unload_grace=0) as runtime:
        assert await runtime.sweep(datetime.fromtimestamp(time.time() + skew, UTC)) == {}  # the run is due in an hour
        assert [str(one) for one in (await runtime.sweep(slept.wake_at)).values()] == ["Ok(value='awake')"]


@SKEWS
async def test_delays_and_deadlines_count_by_the_clock_of_the_store(store: FullStore, skew: float) -> None:
    skewed: Any = SkewedStore(store, skew)
    async with client(skewed, nap) as runtime:
        run = await runtime.start(nap, delay="10m", deadline="20m")
        row = await store.get(run.id)
        assert row is not None
        assert row.start_at is not None
        assert row.deadline is not None
        assert abs(row.start_at - row.created_at - 600_000_000) < 5_000_000
        assert abs(row.deadline - row.created_at - 1_200_000_000) < 5_000_000


@SKEWS
async def test_retry_pauses_go_by_the_clock_of_the_store(store: FullStore, skew: float) -> None:
    calls: list[float] = []

    def fail_once() -> str:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise ValueError("not yet")
        return "done"

    @workflow
    async def retrying(ctx: Context) -> str:
        return await ctx.step(fail_once, retry=Retry(attempts=2, wait_initial="500ms", wait_jitter=0))

    skewed: Any = SkewedStore(store, skew)
    async with Runtime(skewed, workflows=[retrying], unload_grace=0) as runtime:
        assert await asyncio.wait_for(await runtime.start(retrying), 30) == "done"
    assert len(calls) == 2
    assert 0.4 < calls[1] - calls[0] < 15


@SKEWS
async def test_a_run_that_does_not_fit_is_tried_again_after_its_pause(store: FullStore, skew: float) -> None:
    async def flow(ctx: Context) -> None:
        await ctx.step("first", str)
        await ctx.wait_for_signal("go")

    async def other(ctx: Context) -> None:
        await ctx.step("another", str)

    skewed: Any = SkewedStore(store, skew)
    before: Workflow[[], None] = Workflow("fits", flow)
    after: Workflow[[], None] = Workflow("fits", other)
    async with client(skewed, before, unload_grace=0) as runtime:
        await runtime.run(before, id="misfit")
        await runtime.signal("misfit", "go")
    async with client(skewed, after, unload_grace=0, on_definition_change="ignore") as runtime:
        await runtime.sweep()
    row = await store.get("misfit")
    assert row is not None
    assert row.problem is not None
    assert row.wake_at is not None
    assert 0 < (row.wake_at - row.updated_at) / 1_000_000 < 15


class Machine:
    """The clocks of a machine: its wall clock, which can be set, and the time elapsed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.elapsed = 10 * HOUR, 7 * HOUR
        monkeypatch.setattr(clocks, "_elapsed_ns", lambda: 1000 * self.elapsed)

    @property
    def key(self) -> tuple[str, ...]:
        return ("some",)

    def now(self) -> int:
        return self.wall

    def store_now(self) -> int | None:
        return None

    call_at = SystemClock.call_at

    def pass_time(self, microseconds: int) -> None:
        self.wall += microseconds
        self.elapsed += microseconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def observe(clock: StoreClock, machine: Machine, store_time: int, way_there: int, way_back: int) -> None:
    """A reply that carries this time takes this long."""
    asked_at = clock.now()
    machine.pass_time(way_there + way_back)
    clock.observe(store_time, asked_at)


def test_it_is_never_ahead_of_the_store_and_behind_it_by_a_reply_at_most(machine: Machine) -> None:
    clock = StoreClock(machine, machine)
    store = machine.wall + HOUR
    for way_there, way_back in ((30, 20), (10, 80), (5, 5), (500, 1)):
        before = clock.now()
        observe(clock, machine, store + way_there, way_there, way_back)
        store += way_there + way_back
        assert store - 20 <= clock.now() <= store
        assert clock.now() >= before


def test_it_follows_a_store_whose_clock_is_set(machine: Machine) -> None:
    clock = StoreClock(machine, machine)
    for store in (machine.wall + HOUR, machine.wall - HOUR, machine.wall + 5):
        observe(clock, machine, store, 10, 10)
        assert clock.now() == store
        machine.pass_time(1000)
        assert clock.now() == store + 1000


def test_setting_the_clock_of_the_machine_changes_nothing(machine: Machine) -> None:
    clock = StoreClock(machine, machine)
    observe(clock, machine, machine.wall + 10, 10, 10)
    before = clock.now()
    machine.wall += HOUR
    machine.pass_time(1000)
    assert clock.now() == before + 1000


@pytest.mark.parametrize(
    ("difference", "way", "report"),
    [
        (0, 20, None),
        (900_000, 20, None),
        (1_100_000, 20, "about 1.1 s ahead of"),
        (-1_100_000, 20, "about 1.1 s behind"),
        (-3_600_000_000, 20, "about 3600.0 s behind"),
        (8_000_000, 3_000_000, "about 8.0 s ahead of"),
        (3_000_000, 3_000_000, None),  # a reply that takes six seconds proves no difference of three
        (-3_000_000, 3_000_000, None),
    ],
)
def test_a_difference_is_reported_once_and_only_if_it_is_certain(
    machine: Machine, caplog: pytest.LogCaptureFixture, difference: int, way: int, report: str | None
) -> None:
    for _ in range(3):
        clock = StoreClock(machine, machine)
        observe(clock, machine, machine.wall + difference + way, way, way)
    messages = [record.getMessage() for record in caplog.records]
    reports = [] if report is None else [f"the clock of the some store is {report} this machine's; runs go by the store's"]
    assert messages == reports
