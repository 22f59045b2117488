"""A run that has not ended at its deadline is cancelled, wherever it stands, and ends as failed with `DeadlineExceeded`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from datetime import timedelta
from typing import Any, cast

import pytest

from perdure import Context, Err, Ok, Outcome, Retry, Runtime, Suspended, WaitingFor, Workflow, current_step, stores, workflow
from perdure.errors import DeadlineExceeded, PersistenceError, RunCancelled, RunDiverged
from perdure.model.durations import instant, moment
from perdure.testing import ManualClock
from tests.engine.replays import stored
from tests.engine.worlds import world
from tests.patience import PATIENCE, turns


class Ran:
    """What ran, and what the body's clean-up saw."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.cleanup: list[str] = []
        self.is_busy = asyncio.Event()

    async def work(self, label: str) -> str:
        self.steps.append(label)
        return label

    async def hang(self) -> None:
        self.is_busy.set()
        await asyncio.Event().wait()

    async def fail(self) -> None:
        self.is_busy.set()
        raise ValueError

    @contextlib.contextmanager
    def noting(self) -> Any:
        try:
            yield
        except BaseException as error:
            self.cleanup.append(type(error).__name__)
            raise


class Delegating:
    """A memory store, some of whose verbs a test replaces."""

    def __init__(self) -> None:
        self.memory = stores.memory()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


def is_late(outcome: Outcome[Any]) -> bool:
    return isinstance(outcome, Err) and isinstance(outcome.error, DeadlineExceeded) and isinstance(outcome.error, TimeoutError)


async def test_a_suspended_run_wakes_at_its_deadline_and_fails() -> None:
    ran = Ran()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        await ctx.step("before", ran.work, "before")
        with ran.noting():
            await ctx.wait_for_signal("never")
        return await ctx.step("after", ran.work, "after")

    async with world(flow) as here:
        at = moment(here.clock.now()) + timedelta(hours=1)
        assert await here.runtime.run(flow, id="run", deadline="1h") == Suspended("run", at, (WaitingFor("signal", "never"),))
        ran.cleanup.clear()
        assert await here.later("59m") == {}
        assert is_late((await here.later("1m"))["run"])
        run = await here.runtime.get("run")
        assert run is not None
        assert await run.status() == "failed"
        with pytest.raises(DeadlineExceeded, match="'run' had not ended at its deadline, 2026-01-01T01:00:00"):
            await run
    assert ran.cleanup == ["CancelledError"]
    assert ran.steps == ["before"]


@pytest.mark.parametrize("doing", ["step", "own", "back-off", "sleep", "map"])
async def test_a_run_in_memory_is_cancelled_at_whatever_it_is_doing(doing: str) -> None:
    ran = Ran()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        with ran.noting():
            match doing:
                case "step":
                    await ctx.step(ran.hang)
                case "own":
                    await ran.hang()
                case "back-off":
                    await ctx.step(ran.fail, retry=Retry(2, wait_initial="1d", wait_max="1d"))
                case "sleep":
                    ran.is_busy.set()
                    await ctx.sleep("nap", "1d")
                case "map":
                    await ctx.map("hang", lambda _: ran.hang(), [1, 2])

    async with world(flow, unload_grace="1d") as here:
        running = asyncio.create_task(here.runtime.run(flow, id="run", deadline=timedelta(minutes=5)))
        await ran.is_busy.wait()
        here.clock.advance("4m")
        await asyncio.sleep(0)
        assert not running.done()
        here.clock.advance("1m")
        async with asyncio.timeout(PATIENCE):
            assert is_late(await running)
    assert ran.cleanup == ["CancelledError"]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_run_claimed_after_its_deadline_calls_no_step(has_begun: bool) -> None:
    ran = Ran()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        first = await ctx.step("first", ran.work, "first")
        with ran.noting():
            await ctx.sleep("nap", "1m")
            return first + await ctx.step("second", ran.work, "second")

    async with world(flow) as here:
        await here.runtime.start(flow, id="run", deadline="1h")
        if has_begun:
            await here.runtime.sweep()
            ran.cleanup.clear()
        assert is_late((await here.later("2h"))["run"])
        assert stored(here).row.lease_until is None
    assert ran.steps == (["first"] if has_begun else [])
    assert ran.cleanup == (["CancelledError"] if has_begun else [])


async def test_a_run_that_ends_in_time_is_not_disturbed() -> None:
    ran = Ran()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        await ctx.sleep("nap", "1h")
        return await ctx.step("work", ran.work, "work")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run", deadline="2h")
        assert await here.later("1h") == {"run": Ok("work")}
        assert await here.later("2h") == {}


async def test_a_run_whose_last_step_was_recorded_completes_also_after_its_deadline() -> None:
    """What is recorded is delivered, and the body has nothing left to wait for."""
    ran = Ran()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("work", ran.work, "work")

    class FailsToFinish(Delegating):
        async def finish(self, *args: Any, **kwargs: Any) -> Any:
            del self.__class__.finish
            raise PersistenceError("finish", "the disk is full")

    failing: Any = FailsToFinish()
    async with world(flow, store=failing) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run", deadline="1h")
        assert await here.later("2h") == {"run": Ok("work")}
    assert ran.steps == ["work"]


async def test_a_body_that_swallows_its_cancellation_has_no_say() -> None:
    @workflow
    async def stubborn(ctx: Context[Any]) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.wait_for_signal("never")
        return "as if nothing had happened"

    @workflow
    async def hanging(ctx: Context[Any]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.wait_for_signal("never")
        await asyncio.Event().wait()

    async with world(stubborn, hanging, cancel_grace="10ms") as here:
        await here.runtime.run(stubborn, id="a", deadline="1h")
        await here.runtime.start(hanging, id="b", deadline="1h")
        outcomes = await here.later("1h")
        assert is_late(outcomes["a"])
        assert is_late(outcomes["b"])


async def test_a_plain_step_in_its_thread_goes_on_alone_and_learns_of_it() -> None:
    started, release, ended, seen = threading.Event(), threading.Event(), threading.Event(), list[bool]()

    def blocks() -> str:
        started.set()
        release.wait(PATIENCE)
        seen.append(current_step().is_cancelled)
        ended.set()
        return "too late"

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step(blocks)

    async with world(flow) as here:
        running = asyncio.create_task(here.runtime.run(flow, id="run", deadline="1h"))
        await asyncio.to_thread(started.wait, PATIENCE)
        here.clock.advance("1h")
        async with asyncio.timeout(PATIENCE):
            assert is_late(await running)
        assert await here.keys("run") == ["%cancel"]
        release.set()
        await asyncio.to_thread(ended.wait, PATIENCE)
    assert seen == [True]


async def test_a_cancel_request_before_the_deadline_ends_it_as_cancelled() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.wait_for_signal("never")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run", deadline="1h")
        await here.runtime.cancel("run")
        outcome = (await here.later("2h"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)


async def test_a_retry_gives_the_same_time_again_and_keeps_what_is_recorded() -> None:
    ran = Ran()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        try:
            await ctx.step("handled", ran.fail)
        except ValueError:
            await ctx.step("before", ran.work, "before")
        return await ctx.wait_for_signal("go")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run", deadline="1h")
        assert is_late((await here.later("1h"))["run"])
        here.clock.advance("1d")
        await here.runtime.retry("run")
        assert isinstance((await here.later("30m"))["run"], Suspended)
        assert is_late((await here.later("30m"))["run"])  # an hour after the retry
        await here.runtime.retry("run")
        await here.runtime.signal("run", "go", 7)
        assert await here.later("1m") == {"run": Ok(7)}
        assert await here.keys("run") == ["handled", "before", "%cancel", "%cancel", "go"]
    assert ran.steps == ["before"]


async def test_a_deadline_before_the_creation_fails_the_run_once_and_a_retry_lifts_it() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.sleep("nap", 0)
        return "done"

    async with world(flow) as here:
        past = moment(here.clock.now()) - timedelta(hours=1)
        assert is_late(await here.runtime.run(flow, id="run", deadline=past))
        await here.runtime.retry("run")
        assert await here.later("1s") == {"run": Ok("done")}


async def test_a_run_that_does_not_fit_its_code_ends_at_its_deadline() -> None:
    async def old(ctx: Context[Any]) -> None:
        await ctx.step("old", asyncio.sleep, 0)
        await ctx.sleep("nap", "1m")

    async def new(ctx: Context[Any]) -> None:
        await ctx.step("new", asyncio.sleep, 0)

    store = stores.memory()
    async with world(Workflow("flow", old), store=store) as here:
        await here.runtime.run("flow", id="run", deadline="1h")
    async with world(Workflow("flow", new), store=store, on_definition_change="ignore") as here:
        outcome = (await here.later("59m57s"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunDiverged)  # and its next try would come after the deadline
        assert is_late((await here.later("3s"))["run"])


async def test_a_deadline_passes_while_the_run_leaves_memory() -> None:
    """The store has been asked to suspend the run when its time is up: it wakes at once, and fails."""
    clock = ManualClock()

    class Slow(Delegating):
        async def suspend(self, *args: Any, **kwargs: Any) -> Any:
            clock.advance("1h")
            for _ in range(20):
                await asyncio.sleep(0)
            return await self.memory.suspend(*args, **kwargs)

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.wait_for_signal("never")

    slow: Any = Slow()
    runtime = Runtime(slow, [flow], clock=clock, unload_grace=0, concurrency=0)
    assert isinstance(await runtime.run(flow, id="run", deadline="1h"), Suspended)
    assert is_late((await runtime.sweep())["run"])
    await runtime.close()


async def test_a_worker_ends_runs_at_their_deadlines_in_real_time() -> None:
    ran = Ran()

    @workflow
    async def waits(ctx: Context[Any]) -> None:
        with ran.noting():
            await ctx.wait_for_signal("never")

    @workflow
    async def works(ctx: Context[Any]) -> None:
        with ran.noting():
            await ctx.step(ran.hang)

    async with Runtime(stores.memory(), [waits, works], unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        runs = [await runtime.start(each, deadline="50ms") for each in (waits, works)]
        for run in runs:
            with pytest.raises(DeadlineExceeded):
                await run
            row = await runtime.store.get(run.id)
            assert row is not None
            assert row.deadline is not None
            assert 0 <= row.updated_at - row.deadline < 2_000_000
    assert ran.cleanup.count("CancelledError") >= 2


async def test_a_sweep_at_a_later_time_ends_what_is_late_then() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.wait_for_signal("never")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run", deadline="1h")
        assert is_late((await here.runtime.sweep(now=moment(here.clock.now()) + timedelta(hours=2)))["run"])


async def test_a_check_of_a_late_run_says_whether_it_fits() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("work", asyncio.sleep, 0)
        await ctx.wait_for_signal("never")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run", deadline="1h")
        here.clock.advance("2h")
        assert [each.verdict for each in (await here.runtime.check()).results] == ["fits"]


async def test_when_a_run_starts_is_said_once_and_before_its_deadline() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> bool:
        return ctx.scheduled_at == at

    async with world(flow) as here:
        now = moment(here.clock.now())
        at = now + timedelta(seconds=90)
        with pytest.raises(TypeError, match="delay= and start_at= both say when"):
            await here.runtime.start(flow, delay="3s", start_at=at)
        with pytest.raises(ValueError, match="comes before the run starts"):
            await here.runtime.start(flow, delay="3s", deadline=3)
        with pytest.raises(ValueError, match="comes before the run starts"):
            await here.runtime.start(flow, start_at=at, deadline=now)
        with pytest.raises(ValueError, match=r"deadline .* has no time zone"):
            await here.runtime.start(flow, deadline=at.replace(tzinfo=None))
        with pytest.raises(ValueError, match="deadline 'soon' is not a length"):
            await here.runtime.start(flow, deadline="soon")
        wrong: Any = at
        with pytest.raises(TypeError, match="delay must be a timedelta"):
            await here.runtime.start(flow, delay=wrong)
        assert await here.runtime.list() == []

        assert await here.runtime.run(flow, id="run", delay="90s", deadline=at + timedelta(days=1)) == Suspended("run", at)
        row = stored(here).row
        assert (row.start_at, row.deadline) == (instant(at), instant(at + timedelta(days=1)))
        assert await here.later("89s") == {}
        assert await here.later("1s") == {"run": Ok(True)}


async def test_one_workflow_without_a_runtime_has_a_deadline_too() -> None:
    ran = Ran()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(ran.hang)

    async with asyncio.timeout(PATIENCE):
        assert is_late(await flow.run(id="run", store=stores.memory(), deadline="20ms"))
        run = await flow.start(deadline="20ms")
        with pytest.raises(DeadlineExceeded):
            await run


async def test_each_run_of_a_schedule_has_its_own_deadline() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.wait_for_signal("never")

    async with world(flow) as here:
        made = await here.runtime.schedule(flow, every="1d", deadline="1h", overlap="allow")
        assert made.deadline == timedelta(hours=1)
        with pytest.raises(TypeError, match="is a length of time"):
            await here.runtime.schedule(flow, every="1d", deadline=moment(here.clock.now()))  # type: ignore[arg-type]
        for until_next in ("1d", "23h"):
            (outcome,) = (await here.later(until_next)).values()
            assert isinstance(outcome, Suspended)
            assert outcome.wake_at == moment(here.clock.now()) + timedelta(hours=1)
            (outcome,) = (await here.later("1h")).values()
            assert is_late(outcome)


@pytest.mark.one_loop
async def test_whenever_its_deadline_passes_the_run_fails_once_and_no_step_runs_twice() -> None:
    """The clock jumps so many turns after the start: while a write is in flight, while a step runs, while it leaves memory."""

    class TurnsStore(Delegating):
        def __getattr__(self, name: str) -> Any:
            verb = getattr(self.memory, name)
            if name not in {"record", "suspend", "finish", "create"}:
                return verb

            async def slowly(*args: Any, **kwargs: Any) -> Any:
                await turns(3)
                reply = await verb(*args, **kwargs)
                await turns(3)
                return reply

            return slowly

    def flow_of(ran: Ran) -> Workflow[[], None]:
        async def flow(ctx: Context[Any]) -> None:
            await ctx.step("first", ran.work, "first")
            await asyncio.gather(ctx.step("a", ran.work, "a"), ctx.step("b", ran.work, "b"))
            await ctx.sleep("nap", "1h")
            await ctx.step("last", ran.work, "last")

        return Workflow("flow", flow)

    for after in range(1, 70):
        ran, slow = Ran(), cast("Any", TurnsStore())
        async with world(flow_of(ran), store=slow) as here:
            running = asyncio.create_task(here.runtime.run("flow", id="run", deadline="30m"))
            await turns(after)
            here.clock.advance("30m")
            outcome = await running
            if isinstance(outcome, Suspended):
                outcome = (await here.runtime.sweep())["run"]
            assert is_late(outcome)
            assert await here.later("1h") == {}
        assert max(Counter(ran.steps).values(), default=0) <= 1
        assert "last" not in ran.steps
