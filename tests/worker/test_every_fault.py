"""A worker with ten runs, and one fault: the n-th call of its store fails, for every n. All runs end, and nothing storms.

The fault is a `PersistenceError`, raised before the verb has done anything, or after it has done all of it (a lost reply).
Time is virtual, so pauses and leases cost nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import pytest

from perdure import Context, Retry, Runtime, current_step, stores, workflow
from perdure.errors import PersistenceError
from perdure.model.records import Lease
from tests.simulation import LoopClock, simulate

# The verbs that a worker and the calls of this test use; `close`, `setup` and properties are left alone.
VERBS: Final = frozenset(
    {
        *("create", "claim", "acquire", "renew", "release", "record", "suspend", "finish", "signal", "cancel"),
        *("get", "journal", "inbox", "list", "watch"),
    }
)
FaultTime = Literal["before", "after"]
LEASE_SECONDS: Final = 30.0
RUNS: Final = 10
# Enough for a lease that has to expire, a pause after a failure, and the runs' own sleeps.
PATIENCE_SECONDS: Final = 600.0


@dataclass
class FaultyStore:
    """A store that fails in its call number `at_call`, and in all calls within `outage`, two instants of the loop's time."""

    store: Any
    at_call: int = -1
    when: FaultTime = "before"
    outage: tuple[float, float] = (0.0, 0.0)
    calls: list[tuple[float, str]] = field(default_factory=list)
    # The verbs that failed, and the runs whose drivers met the fault.
    failed: list[str] = field(default_factory=list)
    hurt: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        return self._counted(name, method) if name in VERBS else method

    def sibling(self) -> FaultyStore:
        return self

    def _counted(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            number, now = len(self.calls), asyncio.get_running_loop().time()
            self.calls.append((now, name))
            if number != self.at_call and not self.outage[0] <= now < self.outage[1]:
                return await method(*args, **kwargs)
            self.failed.append(name)
            self.hurt.update(_runs_of(args))
            if self.when == "after":
                await method(*args, **kwargs)
            raise PersistenceError("this store", "was told to fail")

        return call

    def most_calls_in_a_second(self) -> int:
        """The highest number of calls within one second."""
        return max(Counter(int(at) for at, _ in self.calls).values())


def _runs_of(args: tuple[Any, ...]) -> set[str]:
    return {arg.run_id for arg in args if isinstance(arg, Lease)} | {arg for arg in args if isinstance(arg, str)}


called: Counter[tuple[str, str]] = Counter()


async def work(seconds: float = 0.0) -> str:
    """A step that takes a while."""
    step = current_step()
    called[step.run_id, step.key] += 1
    await asyncio.sleep(seconds)
    return step.key


async def fail_once() -> str:
    """A step whose first attempt fails."""
    step = current_step()
    called[step.run_id, f"{step.key}#{step.attempt}"] += 1
    if step.attempt == 1:
        raise ConnectionError("not yet")
    return step.key


@workflow
async def shop(ctx: Context, number: int) -> int:
    """A bit of everything that a worker does."""
    await ctx.step("first", work)
    if number % 2:
        await asyncio.gather(ctx.step("left", work, 0.2), ctx.step("right", work, 0.1))
    if number % 3 == 0:
        await ctx.sleep("nap", 5)
    if number % 3 == 1:
        await ctx.step("again", fail_once, retry=Retry(attempts=2, wait_initial=2, wait_jitter=0))
    if number % 4 == 0:
        await ctx.wait_for_signal("go")
    await ctx.step("last", work)
    return number


async def work_through(store: FaultyStore) -> None:
    """Ten runs, each started and signalled as a program would: what the store refuses is asked again."""
    runtime = Runtime(store, [shop], clock=LoopClock(), lease_ttl=LEASE_SECONDS)
    async with runtime, asyncio.timeout(PATIENCE_SECONDS):
        for number in range(RUNS):
            await _insist(partial(runtime.start, shop, number, id=f"run-{number}"))
        await asyncio.sleep(1)
        for number in range(0, RUNS, 4):
            await _insist(partial(runtime.signal, f"run-{number}", "go", dedupe="once"))
        for number in range(RUNS):
            assert await _await_run(runtime, f"run-{number}") == number


async def _await_run(runtime: Runtime, run_id: str) -> Any:
    run = await _insist(lambda: runtime.get(run_id))
    return await run


async def _insist(call: Callable[[], Awaitable[Any]]) -> Any:
    while True:
        try:
            return await call()
        except PersistenceError:
            await asyncio.sleep(1)


def run_worker(store: FaultyStore) -> Counter[tuple[str, str]]:
    """How often each step of each run was called."""
    called.clear()
    simulate(work_through(store))
    return Counter(called)


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_failed_call_repeats_at_most_the_step_that_it_was_to_record(when: FaultTime) -> None:
    healthy = FaultyStore(stores.memory())
    once = run_worker(healthy)
    assert set(once.values()) == {1}
    for number in range(len(healthy.calls)):
        store = FaultyStore(stores.memory(), number, when)
        times = run_worker(store)
        fault = f"call {number} ({store.failed}) failed"
        assert times.keys() == once.keys(), fault
        repeated = {run_id for (run_id, _), count in times.items() if count > 1}
        assert repeated <= store.hurt, fault
        assert max(times.values()) <= 2, fault
        assert store.most_calls_in_a_second() <= 2 * healthy.most_calls_in_a_second(), fault


@pytest.mark.parametrize("start", [0.0, 0.15, 2.0, 5.0])
@pytest.mark.parametrize("length", [3.0, 2 * LEASE_SECONDS])
def test_an_outage_costs_a_bounded_number_of_calls_and_attempts(start: float, length: float) -> None:
    healthy = FaultyStore(stores.memory())
    once = run_worker(healthy)
    store = FaultyStore(stores.memory(), outage=(start, start + length))
    times = run_worker(store)
    assert times.keys() == once.keys()
    assert max(times.values()) <= 2  # recorded before the outage, or called once more after it
    during = [name for at, name in store.calls if start <= at < start + length and name not in {"create", "signal"}]
    # Some calls of each run that was in memory, and a few of the worker a second, fewer as it goes on.
    assert len(during) <= 10 * RUNS + 5 * length, Counter(during)
    assert store.most_calls_in_a_second() <= 3 * healthy.most_calls_in_a_second()
