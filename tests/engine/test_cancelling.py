"""Cancelling a run ends it, wherever it stands; cancelling the task that drives it only hands it back, and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from perdure import Context, Err, Ok, Outcome, Retry, Runtime, Suspended, Workflow, stores, workflow
from perdure.errors import RunCancelled, RunFinished, RunNotFound, StepFailed
from perdure.store import Store
from perdure.testing import ManualClock
from tests.engine.replays import stored
from tests.engine.worlds import World, world
from tests.patience import PATIENCE, turns, until
from tests.simulation import SlowStore


class Log:
    """What ran to its end, and what a body said on its way out."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.said: list[str] = []
        self.is_busy = asyncio.Event()

    async def work(self, label: str) -> str:
        await turns(2)
        self.ended[label] += 1
        return label

    async def hang(self) -> None:
        self.is_busy.set()
        await asyncio.sleep(3600)

    async def fail(self) -> None:
        self.is_busy.set()
        raise ValueError

    @contextlib.asynccontextmanager
    async def leaving(self) -> Any:
        """Notes what ends the block, and takes its time to clean up."""
        try:
            yield
        except BaseException as error:
            self.said.append(type(error).__name__)
            raise
        finally:
            await turns(5)
            self.said.append("cleaned up")


async def ended_as_cancelled(here: World) -> None:
    """The run tells everybody who asks that it was cancelled."""
    run = await here.runtime.get("run")
    assert run is not None
    assert await run.status() == "cancelled"
    for outcome in (await run.outcome(), await here.runtime.resume("run")):
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
    with pytest.raises(RunCancelled, match="'run' was cancelled"):
        await run
    with pytest.raises(RunFinished):
        await here.runtime.cancel("run")
    assert stored(here).row.lease_until is None


async def test_a_suspended_run_is_cancelled_at_the_wait_it_had_come_to() -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        await ctx.step("before", log.work, "before")
        async with log.leaving():
            await ctx.sleep("nap", "1h")
        return await ctx.step("after", log.work, "after")

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        log.said.clear()
        await here.runtime.cancel("run")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        await ended_as_cancelled(here)
    assert log.said == ["CancelledError", "cleaned up"]
    assert log.ended == {"before": 1}


@pytest.mark.parametrize("first", ["step", "sleep", "signal", "map", "race", "own"])
async def test_a_pending_run_is_cancelled_at_the_first_thing_it_would_do(first: str) -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        async with log.leaving():
            match first:
                case "step":
                    await ctx.step("work", log.work, "work")
                case "sleep":
                    await ctx.sleep("nap", 0)
                case "signal":
                    await ctx.wait_for_signal("news")
                case "map":
                    await ctx.map("work", log.work, ["a", "b"])
                case "race":
                    await ctx.race(ctx.step("work", log.work, "work"), ctx.sleep("nap", 0))
                case "own":
                    await asyncio.sleep(3600)

    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.signal("run", "news")
        await here.runtime.cancel("run")
        async with asyncio.timeout(PATIENCE):
            outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        await ended_as_cancelled(here)
    assert log.said == ["CancelledError", "cleaned up"]
    assert not log.ended


async def in_a_group(ctx: Context[Any], log: Log) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.sleep("nap", "1h"))
        group.create_task(ctx.step(log.hang))


async def in_a_limit(ctx: Context[Any], log: Log) -> None:
    async with ctx.timeout("limit", "1h"):
        await ctx.step(log.hang)


THINGS: dict[str, Callable[[Context[Any], Log], Coroutine[Any, Any, Any]]] = {
    "step": lambda ctx, log: ctx.step(log.hang),
    "back-off": lambda ctx, log: ctx.step(log.fail, retry=Retry(2, wait_initial="1h", wait_max="1h")),
    "own": lambda _, log: log.hang(),
    "gather": lambda ctx, log: gathered(ctx.step(log.hang), ctx.sleep("nap", "1h")),
    "group": in_a_group,
    "map": lambda ctx, log: ctx.map("hang", lambda _: log.hang(), [1, 2]),
    "race": lambda ctx, log: ctx.race(ctx.sleep("nap", "1h"), ctx.step(log.hang)),
    "limit": in_a_limit,
}


async def gathered(*calls: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(*calls)


@pytest.mark.parametrize("doing", THINGS)
async def test_a_running_run_is_cancelled_at_whatever_it_is_doing(doing: str) -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        async with log.leaving():
            await THINGS[doing](ctx, log)

    async with world(flow, unload_grace="1d") as here:
        running = asyncio.create_task(here.runtime.run(flow, id="run"))
        await log.is_busy.wait()
        await here.runtime.cancel("run")
        async with asyncio.timeout(PATIENCE):
            outcome = await running
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        await ended_as_cancelled(here)
    assert log.said == ["CancelledError", "cleaned up"]


async def test_after_its_cancellation_a_body_may_clean_up_with_recorded_calls() -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            await ctx.sleep("nap", "1h")
        finally:
            log.said = [await ctx.step("work", log.work, "work")]
            await ctx.sleep("more", 0)
            log.said += await ctx.map("mapped", log.work, ["a", "b"])
            log.said.append(await ctx.race(ctx.step("raced", log.work, "raced")))
        return "as if nothing had happened"

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        await ended_as_cancelled(here)
        assert await here.keys("run") == ["%cancel", "work", "more", "mapped[0]", "mapped[1]", "raced"]
    assert log.said == ["work", "a", "b", "raced"]
    assert log.ended == {"work": 1, "a": 1, "b": 1, "raced": 1}


async def test_a_clean_up_that_waits_for_ever_ends_with_the_grace_period() -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            await ctx.sleep("nap", "1h")
        finally:
            await ctx.step("work", log.work, "work")
            await ctx.wait_for_signal("that never comes")

    async with world(flow, cancel_grace=0.05) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        await ended_as_cancelled(here)
    assert log.ended == {"work": 1}


async def test_an_error_on_the_way_out_does_not_hide_the_cancellation() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        try:
            await ctx.sleep("nap", "1h")
        except asyncio.CancelledError:
            raise ValueError("while cleaning up") from None

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        await ended_as_cancelled(here)


async def test_a_cancelled_run_can_be_taken_up_again_where_it_was() -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        await ctx.step("before", log.work, "before")
        await ctx.sleep("nap", "1h")
        return await ctx.step("after", log.work, "after")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        await here.runtime.retry("run")
        assert isinstance((await here.runtime.sweep())["run"], Suspended)
        assert await here.later("1h") == {"run": Ok("after")}
    assert log.ended == {"before": 1, "after": 1}


async def test_a_body_that_swallows_its_cancellation_has_no_say_after_a_while() -> None:
    @workflow
    async def stubborn(ctx: Context[Any]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.wait_for_signal("never")
        await asyncio.Event().wait()

    async with world(stubborn, cancel_grace="10ms") as here:
        await here.runtime.start(stubborn, id="run")
        await here.runtime.cancel("run")
        outcomes = await here.runtime.sweep()
        assert isinstance(outcomes["run"], Err)
        assert isinstance(outcomes["run"].error, RunCancelled)


async def test_a_body_that_raises_cancelled_error_by_itself_has_failed_and_stops_nobody_else() -> None:
    @workflow
    async def odd(ctx: Context[Any]) -> None:
        await ctx.step("work", asyncio.sleep, 0)
        raise asyncio.CancelledError("by itself")

    async with world(odd) as here:
        first = await here.runtime.run(odd, id="run")
        again = await here.runtime.run(odd, id="run")
        assert isinstance(first, Err)
        assert isinstance(again, Err)
        assert isinstance(first.error, StepFailed)
        assert str(first.error) == str(again.error)
        assert "by itself" in str(first.error)


async def test_nobody_can_cancel_what_is_not_there() -> None:
    async with world() as here:
        with pytest.raises(RunNotFound):
            await here.runtime.cancel("nobody")


async def test_a_run_of_a_worker_is_cancelled_through_its_handle() -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(log.hang)

    async with Runtime(stores.memory(), [flow]) as runtime:
        run = await runtime.start(flow, id="run")
        await log.is_busy.wait()
        await run.cancel()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(RunCancelled):
                await run


async def test_cancelling_whoever_awaits_a_run_hands_the_run_back_as_it_is() -> None:
    log = Log()
    hangs = [True]

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        before = await ctx.step("before", log.work, "before")
        async with log.leaving():
            await (ctx.step("middle", log.hang) if hangs else ctx.step("middle", log.work, "middle"))
        return before

    store = stores.memory()
    waiting: asyncio.Task[Any] = asyncio.create_task(flow.run(id="run", store=store))
    await log.is_busy.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert log.said == ["Unloaded", "cleaned up"]
    row = await store.get("run")
    assert row is not None
    assert (row.status, row.lease_until, row.attempts) == ("pending", None, 0)
    hangs.clear()
    assert await flow.run(id="run", store=store, wait=False) == Ok("before")
    assert log.ended == {"before": 1, "middle": 1}


async def test_a_drive_goes_on_while_anybody_awaits_it() -> None:
    go = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.step("wait", go.wait)
        return "done"

    store = stores.memory()
    one, two = (asyncio.create_task(flow.run(id="run", store=store)) for _ in range(2))
    await turns(20)
    one.cancel()
    await asyncio.wait([one])
    assert one.cancelled()
    go.set()
    assert await two == Ok("done")


class WatchedStore(SlowStore):
    """A store whose writes take turns of the loop, and which notices one that is cut off or overtaken by another."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: list[str] = []
        self.violations: list[str] = []

    def _around(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.__name__ in {"cancel", "signal"}:
            return method  # from outside, at any time

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._open:
                self.violations.append(f"{method.__name__} was sent while {self._open} had no answer")
            self._open.append(method.__name__)
            try:
                await turns(3)
                result = await method(*args, **kwargs)
                await turns(3)
            except asyncio.CancelledError:
                self.violations.append(f"{method.__name__} was cut off")
                raise
            finally:
                self._open.remove(method.__name__)
            return result

        return call


def busy_flow(log: Log) -> Workflow[[], Any]:
    async def flow(ctx: Context[Any]) -> Any:
        first = await ctx.step("first", log.work, "first")
        pair = await asyncio.gather(ctx.step("a", log.work, "a"), ctx.step("b", log.work, "b"))
        once = await ctx.step("retried", log.work, "retried", retry=3)
        await ctx.sleep("nap", "1h")
        return [first, *pair, once, await ctx.step("last", log.work, "last")]

    return Workflow("busy", flow)


RESULT = ["first", "a", "b", "retried", "last"]
Disturb = Callable[[World, "asyncio.Task[Outcome[Any]]"], Coroutine[Any, Any, None]]


async def disturbed(after: int, disturb: Disturb, *, resumed: bool) -> tuple[World, Log, bool]:
    """A run that was disturbed so many turns after it was begun (or resumed), and whether that was still in time."""
    log, store = Log(), stores.memory()
    flow, watched = busy_flow(log), WatchedStore(store)
    slow: Any = watched
    async with world(flow, store=slow) as here:
        if resumed:
            assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
            here.clock.advance("1h")
        call = here.runtime.resume("run") if resumed else here.runtime.run(flow, id="run")
        task: asyncio.Task[Outcome[Any]] = asyncio.create_task(call)
        await turns(after)
        in_time = not task.done()
        await disturb(here, task)
        await asyncio.wait([task])
        await turns(60)  # whoever waited may have been cancelled twice, and gone before the drive was
        assert not watched.violations
    async with world(flow, store=store) as here:
        here.clock.advance("1h")
        return here, log, in_time


@pytest.mark.one_loop
@pytest.mark.parametrize("resumed", [False, True], ids=["first run", "resumed"])
@pytest.mark.parametrize("again_after", [None, 0, 1, 2, 3, 5, 8])
async def test_cancelled_at_any_point_a_drive_loses_nothing_and_lets_go_only_when_answered(
    again_after: int | None, resumed: bool
) -> None:
    async def disturb(here: World, task: asyncio.Task[Outcome[Any]]) -> None:
        task.cancel()
        if again_after is not None:
            await turns(again_after)
            task.cancel()

    after, in_time = 0, True
    while in_time:
        here, log, in_time = await disturbed(after, disturb, resumed=resumed)
        row = await here.runtime.store.get("run")
        assert row is None or row.lease_until is None, f"the lease was kept, cancelled after {after} turns"
        flow = busy_flow(log)
        async with world(flow, store=here.runtime.store) as later:
            later.clock.advance("1h")
            outcome = await later.runtime.run(flow, id="run")
            if isinstance(outcome, Suspended):
                outcome = (await later.later("1h"))["run"]
            assert outcome == Ok(RESULT)
        assert log.ended == dict.fromkeys(RESULT, 1), f"cancelled after {after} turns"
        after += 1
    assert after > 20


@pytest.mark.parametrize("resumed", [False, True], ids=["first run", "resumed"])
@pytest.mark.parametrize("from_here", [False, True], ids=["another process", "this process"])
async def test_cancelled_at_any_point_a_run_ends_as_cancelled_or_had_ended(from_here: bool, resumed: bool) -> None:
    accepted = False

    async def disturb(here: World, task: asyncio.Task[Outcome[Any]]) -> None:
        nonlocal accepted
        with contextlib.suppress(RunFinished, RunNotFound):
            await (here.runtime.cancel("run") if from_here else here.runtime.store.cancel("run", now=here.clock.now()))
            accepted = True

    after, in_time = 0, True
    statuses: Counter[str] = Counter()
    while in_time:
        accepted = False
        here, log, in_time = await disturbed(after, disturb, resumed=resumed)
        flow = busy_flow(log)
        async with world(flow, store=here.runtime.store) as later:
            later.clock.advance("2h")
            await later.runtime.sweep()
            row = await later.runtime.store.get("run")
            assert row is not None
            assert row.status in ({"cancelled", "completed"} if accepted else {"completed", "suspended"}), after
            statuses[row.status] += 1
        assert set(log.ended.values()) <= {1}
        after += 1
    assert statuses["cancelled"] > 10


async def test_a_function_that_still_waits_for_a_thread_is_not_called_after_its_run_was_cancelled() -> None:
    let_go = threading.Event()
    called: list[int] = []

    def block() -> None:
        let_go.wait(PATIENCE)

    @workflow
    async def blocks(ctx: Context[Any]) -> None:
        await ctx.step(block)

    @workflow
    async def queues(ctx: Context[Any]) -> None:
        await ctx.step("call", lambda: called.append(1))

    runtime = Runtime(stores.memory(), [blocks, queues], clock=ManualClock(), concurrency=1)  # and so with one thread
    one = asyncio.create_task(runtime.run(blocks, id="blocks"))
    await turns(20)
    two = asyncio.create_task(runtime.run(queues, id="run"))
    await turns(20)
    await runtime.cancel("run")
    assert isinstance(await two, Err)
    let_go.set()
    assert await one == Ok(None)
    await asyncio.sleep(0.005)
    await runtime.close()
    assert not called


async def test_a_coroutine_that_a_thread_returns_too_late_is_closed() -> None:
    is_called, let_go, has_ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def make() -> Coroutine[Any, Any, None]:
        loop.call_soon_threadsafe(is_called.set)
        let_go.wait(PATIENCE)
        has_ended.set()
        return turns(1)

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("make", make)

    async with world(flow) as here:
        running = asyncio.create_task(here.runtime.run(flow, id="run"))
        await is_called.wait()
        await here.runtime.cancel("run")
        assert isinstance(await running, Err)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            let_go.set()
            await asyncio.to_thread(has_ended.wait, PATIENCE)
            await asyncio.sleep(0.005)
            gc.collect()
        assert not caught


def test_a_coroutine_that_a_thread_returns_after_the_event_loop_was_closed_is_closed() -> None:
    log, is_called, may_return = Log(), threading.Event(), threading.Event()
    made: list[Coroutine[Any, Any, None]] = []

    def make_late() -> Coroutine[Any, Any, None]:
        is_called.set()
        may_return.wait(PATIENCE)
        made.append(log.hang())
        return made[0]

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(make_late)

    async def cancel_early() -> None:
        running = asyncio.create_task(flow.run())
        await asyncio.to_thread(is_called.wait, PATIENCE)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(cancel_early())
    may_return.set()
    asyncio.run(until(lambda: made and inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED))
