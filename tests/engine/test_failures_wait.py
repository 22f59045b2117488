"""An attempt that fails counts and waits, each time longer, and in the end the run is dead, with the reason."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, stores
from perdure.errors import PersistenceError, RunDead, RunInterrupted
from perdure.model.durations import MICROSECOND
from perdure.model.records import RunRow, failure_pause
from perdure.testing import ManualClock
from perdure.worker.outcomes import resume
from tests.engine.test_failing_runs import FailingStore
from tests.engine.worlds import World, world
from tests.patience import PATIENCE

Body = Callable[[Context[Any]], Any]


class RefusingStore(FailingStore):
    """A store on which one verb fails as long as it `is_down`, except that a run may end as dead."""

    def __init__(self, store: Any, verb: str) -> None:
        super().__init__(store, verb, after=0)
        self.is_down = True
        self.refuses_dead = False

    def _around(self, method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            if self.is_down and method.__name__ == self.verb and (self.refuses_dead or "dead" not in args):
                raise OSError(28, "No space left on device")
            return await method(*args, **kwargs)

        return call


def counted(calls: list[str]) -> Workflow[[], str]:
    async def work() -> str:
        calls.append("work")
        return "done"

    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step(work)

    return Workflow("counted", flow)


def test_the_pause_doubles_from_a_second_to_five_minutes_and_is_spread() -> None:
    for attempts, least in [(0, 1), (1, 1), (2, 2), (3, 4), (8, 128), (9, 256), (10, 300), (10**9, 300)]:
        pauses = {failure_pause(attempts) for _ in range(100)}
        assert all(least <= pause <= 1.25 * least for pause in pauses)
        assert len(pauses) > 50


async def row_of(here: World) -> RunRow:
    row = await here.runtime.store.get("run")
    assert row is not None
    return row


async def attempts_until_dead(here: World) -> tuple[list[float], RunDead]:
    """The pauses in seconds between the attempts of the run, and the error that it ends with."""
    pauses: list[float] = []
    for _ in range(1000):
        outcomes = await here.runtime.sweep()
        row = await row_of(here)
        if row.ended:
            break
        assert isinstance(outcomes["run"], Err)
        assert row.wake_at is not None
        pause = row.wake_at - here.clock.now()
        if pause:
            here.clock.advance((pause - 1) / MICROSECOND)
            assert await here.runtime.sweep() == {}, "it is not due before its pause is over"
            here.clock.advance(1 / MICROSECOND)
            pauses.append(pause / MICROSECOND)
    assert row.status == "dead"
    outcome = outcomes["run"]
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunDead)
    return pauses, outcome.error


@pytest.mark.parametrize("verb", ["record", "finish"])
async def test_a_run_that_cannot_be_recorded_waits_longer_each_time_and_ends_as_dead_with_the_reason(verb: str) -> None:
    calls: list[str] = []
    flow = counted(calls)
    store: Any = RefusingStore(stores.memory(), verb)
    async with world(flow, store=store, max_attempts=5) as here:
        await here.runtime.start(flow, id="run")
        pauses, error = await attempts_until_dead(here)
        # A recorded step is progress: there the count starts again, once.
        expected = [1, 2, 4, 8] if verb == "record" else [1, 1, 2, 4, 8]
        assert [least <= pause <= 1.25 * least for pause, least in zip(pauses, expected, strict=True)] == [True] * len(expected)
        assert "No space left on device" in str(error)
        assert "tried 5 times" in str(error)
        assert len(calls) == (5 if verb == "record" else 1)
        run = await here.runtime.get("run")
        assert run is not None
        with pytest.raises(RunDead, match="No space left on device"):
            await run

        store.is_down = False
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("done")}


async def test_a_run_that_cannot_even_end_as_dead_goes_on_waiting() -> None:
    store: Any = RefusingStore(stores.memory(), "finish")
    store.refuses_dead = True
    flow = counted([])
    async with world(flow, store=store, max_attempts=2) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        await here.later("2s")
        await here.later("2s")
        pauses = []
        for _ in range(6):
            assert await here.runtime.sweep()
            pauses.append(((await row_of(here)).wake_at or 0) - here.clock.now())
            here.clock.advance(pauses[-1] / MICROSECOND)
        assert pauses == sorted(pauses)
        assert pauses[0] > MICROSECOND
        store.is_down = False
        assert isinstance((await here.runtime.sweep())["run"], Err)
        assert (await row_of(here)).status == "dead"


async def test_a_run_that_waits_after_a_failure_says_why_and_is_driven_at_once_for_a_caller() -> None:
    flow = counted([])
    store: Any = RefusingStore(stores.memory(), "record")
    async with world(flow, store=store) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run")
        (info,) = await here.runtime.list()
        assert info.problem is not None
        assert "No space left on device" in info.problem
        store.is_down = False
        assert await here.runtime.run(flow, id="run") == Ok("done")
        assert (await row_of(here)).problem is None


async def test_what_drives_a_run_in_the_background_waits_until_its_pause_is_over() -> None:
    calls: list[str] = []
    flow = counted(calls)
    store: Any = RefusingStore(stores.memory(), "record")
    async with world(flow, store=store) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run")
        store.is_down = False
        host = here.runtime._host
        waiting = await resume(host, "run", {}, at_once=False)
        assert isinstance(waiting, Suspended)
        assert waiting.wake_at is not None
        assert len(calls) == 1
        here.clock.advance("2s")
        assert await resume(host, "run", {}, at_once=False) == Ok("done")


async def test_a_deploy_gives_the_attempt_back_and_the_run_is_due_at_once() -> None:
    reached = asyncio.Event()

    async def endless() -> None:
        reached.set()
        await asyncio.sleep(3600)

    async def body(ctx: Context[Any]) -> None:
        await ctx.step(endless)

    store, clock = stores.memory(), ManualClock()
    for _ in range(5):
        reached.clear()
        async with Runtime(store, [Workflow("flow", body)], clock=clock, max_attempts=2, drain_after=0) as runtime:
            await runtime.start("flow", id="run")
            await reached.wait()
    row = await store.get("run")
    assert row is not None
    assert (row.status, row.attempts, row.problem, row.wake_at) == ("pending", 0, None, clock.now())


# What calls sys.exit, or raises KeyboardInterrupt where no Ctrl-C can: in a thread.


def plain_exit() -> None:
    sys.exit(3)


async def async_exit() -> None:
    await asyncio.sleep(0)
    sys.exit(3)


def plain_interrupt() -> None:
    raise KeyboardInterrupt


async def in_plain_step(ctx: Context[Any]) -> None:
    await ctx.step("leave", plain_exit)


async def in_async_step(ctx: Context[Any]) -> None:
    await ctx.step("leave", async_exit)


async def in_timed_step(ctx: Context[Any]) -> None:
    await ctx.step("leave", async_exit, timeout=10)


async def in_interrupted_step(ctx: Context[Any]) -> None:
    await ctx.step("leave", plain_interrupt)


async def in_step_of_a_branch(ctx: Context[Any]) -> None:
    await asyncio.gather(ctx.step("leave", async_exit), ctx.step("other", asyncio.sleep, 3600))


async def in_step_whose_error_is_caught(ctx: Context[Any]) -> None:
    try:
        await ctx.step("leave", async_exit)
    except BaseException:
        await ctx.step("after", asyncio.sleep, 0)


async def in_body(ctx: Context[Any]) -> None:
    await ctx.step("first", asyncio.sleep, 0)
    sys.exit(3)


async def in_task_of_the_body(ctx: Context[Any]) -> None:
    await asyncio.gather(async_exit(), ctx.step("other", asyncio.sleep, 3600))


@pytest.mark.parametrize(
    ("body", "reason", "recorded"),
    [
        (in_plain_step, "step 'leave' called sys.exit(3)", []),
        (in_async_step, "step 'leave' called sys.exit(3)", []),
        (in_timed_step, "step 'leave' called sys.exit(3)", []),
        (in_interrupted_step, "step 'leave' raised KeyboardInterrupt", []),
        (in_step_of_a_branch, "step 'leave' called sys.exit(3)", []),
        (in_step_whose_error_is_caught, "step 'leave' called sys.exit(3)", []),
        (in_body, "the body called sys.exit(3)", ["first"]),
        (in_task_of_the_body, "the body called sys.exit(3)", []),
    ],
)
async def test_code_that_exits_ends_its_attempt_and_not_the_process_and_the_run_is_dead_in_the_end(
    body: Body, reason: str, recorded: list[str]
) -> None:
    async def sound(ctx: Context[Any]) -> str:
        return await ctx.step("work", asyncio.sleep, 0, "sound")

    async with world(Workflow("leaving", body), Workflow("sound", sound), max_attempts=3) as here:
        await here.runtime.start("leaving", id="run")
        await here.runtime.start("sound", id="sound")
        outcomes = await here.runtime.sweep()
        assert outcomes["sound"] == Ok("sound")
        left = outcomes["run"]
        assert isinstance(left, Err)
        assert isinstance(left.error, RunInterrupted)
        assert reason in str(left.error)
        row = await row_of(here)
        assert row.problem is not None
        assert reason in row.problem
        here.clock.advance("2s")
        _, error = await attempts_until_dead(here)
        assert reason in str(error)
        assert await here.keys("run") == recorded, "an exit is no result of a step"


def test_code_that_exits_without_a_store_exits() -> None:
    """Nothing could be tried again, and the workflow is called like a function: as there, `sys.exit` is for the process."""
    program = "import asyncio; from tests.engine import test_failures_wait as w; asyncio.run(w.Workflow('w', w.in_async_step)())"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 3


async def test_a_run_of_wf_start_goes_on_after_an_attempt_that_exited() -> None:
    attempts: list[int] = []

    async def leave_once() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            sys.exit(3)
        return "done"

    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step(leave_once)

    run = await Workflow("leaving_once", flow).start(id="run", store=stores.memory())
    async with asyncio.timeout(PATIENCE):
        assert await run == "done"
    assert len(attempts) == 2
