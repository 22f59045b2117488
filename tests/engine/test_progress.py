"""`ctx.set_progress` and `run.progress()`: the last value is there, at little cost, and no failure of it disturbs the run."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, register, stores, workflow
from perdure.engine.progress import WRITE_SECONDS
from perdure.errors import (
    LeaseLost,
    PersistenceError,
    RunFinished,
    RunNotFound,
    SnapshotCorrupt,
    StoreCapabilityError,
    ValueNotStorable,
)
from perdure.model.records import Lease
from tests.engine.own_waits import own_wait
from tests.engine.replays import stored
from tests.engine.worlds import World, world
from tests.patience import PATIENCE


class Reports:
    """A memory store that notes what is reported, and may fail to take it."""

    def __init__(self) -> None:
        self.memory = stores.memory()
        self.written: list[bytes] = []
        self.failures: list[Exception] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    async def report(self, lease: Lease, progress: bytes) -> None:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        await self.memory.report(lease, progress)
        self.written.append(progress)


@register
@dataclasses.dataclass
class Done:
    files: int
    of: int


async def shown(runtime: Runtime, value: Any, run_id: str = "run") -> None:
    """Return when the run shows this value."""

    async def is_shown() -> bool:
        run = await runtime.get(run_id)
        return run is not None and await run.progress() == value

    await until(is_shown)


async def is_recorded(here: World, key: str) -> bool:
    return key in await here.keys("run")


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await holds():  # noqa: ASYNC110 - nothing says when another task has written
            await asyncio.sleep(0.005)


async def test_a_run_shows_its_progress_while_it_runs_and_after_its_end() -> None:
    go = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        ctx.set_progress({"done": 1, "of": 2})
        await ctx.step(go.wait)
        ctx.set_progress(Done(2, 2))
        return "done"

    async with Runtime(stores.memory(), [flow]) as runtime:
        run = await runtime.start(flow, id="run")
        assert await run.progress() is None
        await shown(runtime, {"done": 1, "of": 2})
        go.set()
        assert await run == "done"
        assert await run.progress() == Done(2, 2)


async def test_many_values_in_quick_succession_are_few_writes() -> None:
    reports: Any = Reports()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        started_at = time.monotonic()
        n = 0
        while time.monotonic() < started_at + 3 * WRITE_SECONDS:
            ctx.set_progress(n := n + 1)
            await asyncio.sleep(0)
        ctx.set_progress("all")

    async with world(flow, store=reports) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
    assert 2 <= len(reports.written) <= 5
    assert reports.written[-1] == b'"all"'


async def test_the_last_value_is_written_before_the_run_suspends_and_old_ones_are_not_written_again() -> None:
    reports: Any = Reports()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        ctx.set_progress("begun")
        await ctx.step("first", asyncio.sleep, 0)
        ctx.set_progress("first")
        await ctx.sleep("nap", "1h")
        await ctx.step("second", asyncio.sleep, 0)
        ctx.set_progress("second")
        await ctx.sleep("nap again", "1h")

    async with world(flow, store=reports) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert reports.written == [b'"first"']
        assert isinstance((await here.later("1h"))["run"], Suspended)
        assert reports.written == [b'"first"', b'"second"']
        assert await here.later("1h") == {"run": Ok(None)}
    assert reports.written == [b'"first"', b'"second"']


async def test_nothing_is_written_during_a_replay_that_takes_its_time() -> None:
    reports: Any = Reports()

    async def flow(ctx: Context[Any]) -> None:
        for n in range(3):
            ctx.set_progress(n)
            await own_wait(WRITE_SECONDS)  # something of the body's own, on a replay too
            await ctx.step(f"step {n}", asyncio.sleep, 0)
        await ctx.wait_for_signal("go", key="wait")

    definition = Workflow("flow", flow)
    async with world(definition, store=reports, unload_grace="1m") as here:
        running = asyncio.create_task(here.runtime.run(definition, id="run"))
        await shown(here.runtime, 2)
        await until(lambda: is_recorded(here, "step 2"))
        running.cancel()
        await asyncio.wait([running])
        written = len(reports.written)
        await here.runtime.signal("run", "go")
        assert await here.runtime.resume("run") == Ok(None)
    assert len(reports.written) == written


async def test_a_value_that_was_lost_with_a_worker_is_written_when_the_run_is_live_again() -> None:
    reports: Any = Reports()
    hangs = [True]

    async def work() -> None:
        if hangs:
            await asyncio.Event().wait()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("first", asyncio.sleep, 0)
        ctx.set_progress("first")
        await ctx.step(work)

    async with world(flow, store=reports) as here:
        reports.failures = [PersistenceError("report", "the disk is full")] * 1000
        running = asyncio.create_task(here.runtime.run(flow, id="run"))
        await until(lambda: is_recorded(here, "first"))
        running.cancel()
        await asyncio.wait([running])
        reports.failures.clear()
        assert not reports.written
        again = asyncio.create_task(here.runtime.resume("run"))
        await shown(here.runtime, "first")
        again.cancel()
        await asyncio.wait([again])


async def test_the_last_value_is_written_when_the_worker_drains() -> None:
    reports: Any = Reports()
    has_set = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("work", asyncio.sleep, 0)
        ctx.set_progress("worked")
        has_set.set()
        await ctx.step("next", asyncio.Event().wait)

    async with Runtime(reports, [flow], drain_after="10ms") as runtime:
        await runtime.start(flow, id="run")
        await has_set.wait()
    assert reports.written == [b'"worked"']


async def test_steps_show_progress_too_also_from_their_threads() -> None:
    release = threading.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        def plain() -> None:
            ctx.set_progress("in a thread")
            release.wait(PATIENCE)
            ctx.set_progress("the last of it")

        async def later() -> None:
            ctx.set_progress("on the loop")

        await ctx.step(plain)
        await ctx.wait_for_signal("go")
        await ctx.step(later)

    async with Runtime(stores.memory(), [flow], unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(flow, id="run")
        await shown(runtime, "in a thread")
        release.set()
        assert isinstance(await run.outcome(), Suspended)
        assert await run.progress() == "the last of it"
        await run.signal("go")
        await run
        assert await run.progress() == "on the loop"


@pytest.mark.parametrize(
    "failure",
    [PersistenceError("report", "the disk is full"), ValueNotStorable("progress", "it is too long"), LeaseLost("run", 1)],
)
async def test_a_write_that_fails_does_not_disturb_the_run(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    reports: Any = Reports()
    reports.failures = [failure] * 10

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        ctx.set_progress(1)
        await ctx.step("work", asyncio.sleep, 0.1)
        ctx.set_progress(2)
        return "done"

    async with world(flow, store=reports) as here:
        assert await here.runtime.run(flow, id="run") == Ok("done")
    assert ("is not shown: the value at progress" in caplog.text) == isinstance(failure, ValueNotStorable)


async def test_a_store_without_it_says_so_at_the_call() -> None:
    class Core(Reports):
        capabilities: frozenset[str] = frozenset()

    core: Any = Core()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        try:
            ctx.set_progress(1)
        except StoreCapabilityError as error:
            return str(error)
        return "went through"

    async with world(flow, store=core) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Ok)
        assert "the Core store has no streams of items and progress reports" in outcome.value
        run = await here.runtime.get("run")
        assert run is not None
        assert await run.progress() is None


async def test_a_value_that_cannot_be_stored_is_refused_at_the_call() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        ctx.set_progress(object())

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueNotStorable)
        assert outcome.error.path.startswith("progress")


async def test_without_a_store_nobody_can_ask_and_nothing_happens() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        ctx.set_progress(1)
        return "done"

    assert await flow() == "done"


async def test_after_the_end_there_is_no_more_progress() -> None:
    kept: list[Context[Any]] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        kept.append(ctx)
        ctx.set_progress(1)

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        with pytest.raises(RunFinished):
            kept[0].set_progress(2)
        stored(here).change(progress=b"{")
        run = await here.runtime.get("run")
        assert run is not None
        with pytest.raises(SnapshotCorrupt, match="the progress of run 'run'"):
            await run.progress()
        await here.runtime.delete("run")
        with pytest.raises(RunNotFound):
            await run.progress()


def test_programs_without_an_event_loop_can_ask() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        ctx.set_progress([1, 2])

    with Runtime(stores.memory(), [flow]).sync as runtime:
        run = runtime.start(flow)
        run.result()
        assert run.progress() == [1, 2]
