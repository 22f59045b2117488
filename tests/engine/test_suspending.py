"""A run that waits leaves memory, whatever its code does around the wait, and goes on as if it never had."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, Workflow, stores, workflow
from perdure.errors import RunFinished, Unloaded
from perdure.testing.counted_store import CountedStore
from tests.engine.own_waits import own_wait
from tests.engine.worlds import world
from tests.patience import PATIENCE, turns
from tests.simulation import HeldBack, LoopClock, simulate

Body = Callable[[Context[Any], "Log"], Awaitable[Any]]


class Log:
    """What ran, and what the body did when it left memory."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.left: list[str] = []

    async def work(self, label: str) -> str:
        self.ran.append(label)
        return label


async def except_exception(ctx: Context[Any], log: Log) -> Any:
    try:
        await ctx.sleep("nap", "1h")
    except Exception:
        log.left.append("swallowed")
    return await ctx.step(log.work, "after")


async def in_finally(ctx: Context[Any], log: Log) -> Any:
    try:
        await ctx.sleep("nap", "1h")
    finally:
        log.left.append("finally")
    return await ctx.step(log.work, "after")


async def step_in_finally(ctx: Context[Any], log: Log) -> Any:
    try:
        await ctx.sleep("nap", "1h")
    finally:
        await ctx.step(log.work, "after")
    return "after"


async def async_with(ctx: Context[Any], log: Log) -> Any:
    @contextlib.asynccontextmanager
    async def resource() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            log.left.append("closed")

    async with resource():
        await ctx.sleep("nap", "1h")
    return await ctx.step(log.work, "after")


async def task_group(ctx: Context[Any], log: Log) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.sleep("nap", "1h"))
        group.create_task(ctx.sleep("nap2", "30m"))
    return await ctx.step(log.work, "after")


async def nested_gather(ctx: Context[Any], log: Log) -> Any:
    await asyncio.gather(asyncio.gather(ctx.sleep("nap", "1h"), ctx.sleep("nap2", "1h")), ctx.sleep("nap3", "30m"))
    return await ctx.step(log.work, "after")


async def shielded(ctx: Context[Any], log: Log) -> Any:
    await asyncio.shield(ctx.sleep("nap", "1h"))
    return await ctx.step(log.work, "after")


async def swallowed_cancel(ctx: Context[Any], log: Log) -> Any:
    with contextlib.suppress(asyncio.CancelledError):
        await ctx.sleep("nap", "1h")
    return await ctx.step(log.work, "after")


async def stubborn(ctx: Context[Any], log: Log) -> Any:
    while True:
        try:
            await ctx.sleep("nap", "1h")
            break
        except asyncio.CancelledError:
            if len(log.left) > 3:
                raise
            log.left.append("again")
    return await ctx.step(log.work, "after")


async def async_generator(ctx: Context[Any], log: Log) -> Any:
    async def naps() -> AsyncIterator[str]:
        try:
            await ctx.sleep("nap", "1h")
            yield "after"
        finally:
            log.left.append("generator")

    labels = [await ctx.step(log.work, label) async for label in naps()]
    return labels.pop()


async def inside_a_timeout(ctx: Context[Any], log: Log) -> Any:
    async with asyncio.timeout(3600):
        await ctx.sleep("nap", "1h")
    return await ctx.step(log.work, "after")


async def in_a_map(ctx: Context[Any], log: Log) -> Any:
    async def branch(seconds: int) -> None:
        await ctx.sleep(f"nap{seconds}", seconds)

    await ctx.race(branch(3600), branch(7200))
    return await ctx.step(log.work, "after")


BODIES = [
    except_exception,
    in_finally,
    step_in_finally,
    async_with,
    task_group,
    nested_gather,
    shielded,
    swallowed_cancel,
    stubborn,
    async_generator,
    inside_a_timeout,
    in_a_map,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
async def test_code_around_a_sleep_does_not_break_suspending(body: Body) -> None:
    log = Log()
    flow = Workflow("flow", lambda_of(body, log))
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Suspended)
        assert log.ran == []
        assert "swallowed" not in log.left
        assert all(isinstance(each, Suspended) for each in (await here.later("59m")).values())
        assert log.ran == []
        assert await here.later("1m") == {"run": Ok("after")}
        assert log.ran == ["after"]


def lambda_of(body: Body, log: Log) -> Callable[[Context[Any]], Any]:
    async def flow(ctx: Context[Any]) -> Any:
        return await body(ctx, log)

    return flow


async def test_the_hour_is_an_hour_however_often_the_run_is_replayed() -> None:
    log = Log()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.sleep("nap", "1h")
        return await ctx.step(log.work, "done")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        for _ in range(5):
            assert await here.later("10m") == {}
            assert isinstance(await here.runtime.resume("run"), Suspended)
        assert await here.later("10m") == {"run": Ok("done")}


def test_a_branch_with_io_of_its_own_finishes_it_beside_an_hour_of_sleep() -> None:
    done: list[str] = []

    async def io() -> None:
        await own_wait(0.5)
        done.append("io")

    async def flow(ctx: Context[Any]) -> str:
        await asyncio.gather(ctx.sleep("nap", "1h"), io())
        return "end"

    async def main() -> None:
        definition = Workflow("flow", flow)
        runtime = Runtime(stores.memory(), [definition], clock=LoopClock(), concurrency=0)
        assert isinstance(await runtime.run(definition, id="run"), Suspended)
        assert done == ["io"]
        await runtime.close()

    simulate(main())


@pytest.mark.parametrize("is_signalled", [False, True], ids=["suspended", "signalled meanwhile"])
async def test_a_call_made_while_the_store_suspends_the_run_waits_for_its_answer(is_signalled: bool) -> None:
    """Once the run is suspended its lease is given up: a step that started then would run beside another worker."""
    store: Any = HeldBack(stores.memory(), "suspend", before=is_signalled)
    moves, ran = asyncio.Event(), list[str]()

    async def work() -> str:
        ran.append("after the answer" if store.may_answer.is_set() else "before it")
        return "done"

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        async def branch() -> str:
            await moves.wait()
            return await ctx.step(work)

        task = asyncio.create_task(branch())
        # The step is recorded together with the beginning of the wait, so that nothing is left to write.
        await asyncio.gather(ctx.step("beside", int), ctx.wait_for_signal("go"))
        return await task

    async with world(flow, store=store) as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.reached.wait()
        if is_signalled:
            await here.runtime.signal("run", "go")
        moves.set()
        await turns()
        store.may_answer.set()
        outcome = await driving
        if not is_signalled:
            assert isinstance(outcome, Suspended)
            assert ran == []
            await here.runtime.signal("run", "go")
            outcome = (await here.runtime.sweep())["run"]
        assert outcome == Ok("done")
    assert ran == ["after the answer"]


async def test_what_a_body_does_after_it_left_memory_is_discarded() -> None:
    kept: list[Context[Any]] = []

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        kept.append(ctx)
        try:
            await ctx.sleep("nap", "1h")
        except asyncio.CancelledError:
            return "not an hour yet"
        return "an hour"

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        with pytest.raises(Unloaded, match="has left memory"):
            await kept[0].step("late", len, "x")
        assert await here.later("1h") == {"run": Ok("an hour")}


async def test_a_context_used_after_its_run_ended_says_so() -> None:
    kept: list[Context[Any]] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        kept.append(ctx)

    await flow()
    with pytest.raises(RunFinished, match="cannot be used any more"):
        await kept[0].step("late", len, "x")


async def test_branches_still_waiting_when_the_body_returns_are_cancelled() -> None:
    cancelled: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        async def background() -> None:
            try:
                await ctx.wait_for_signal("never")
            except asyncio.CancelledError:
                cancelled.append("background")
                raise

        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        await ctx.step("work", asyncio.sleep, 0)
        assert not task.done()
        return "done"

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok("done")
    assert cancelled == ["background"]


async def test_a_child_that_ends_while_its_parent_is_about_to_suspend_lets_it_end() -> None:
    """What has reached a run by the time its last write is sent keeps it in memory."""
    may_end, ended = asyncio.Event(), asyncio.Event()

    class Store(CountedStore):
        async def _call(self, verb: str, method: Any, args: Any, options: Any) -> Any:
            if options.get("items"):  # the parent, which waits for its child, writes these before it leaves memory
                may_end.set()
                await ended.wait()
                await turns()
            reply = await super()._call(verb, method, args, options)
            if verb == "get" and reply is not None and reply.ended:
                ended.set()
            return reply

    async def stubborn() -> None:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            await may_end.wait()
            raise

    async def child(ctx: Context[Any]) -> None:
        await ctx.step(stubborn)

    async def parent(ctx: Context[Any]) -> str:
        try:
            async with asyncio.timeout(0.01):
                await ctx.child(Workflow("child", child))
        except TimeoutError:
            await ctx.emit("items", 1)
        return "ended"

    flows = [Workflow("parent", parent), Workflow("child", child)]
    async with Runtime(Store(stores.memory()), flows, unload_grace=0) as runtime:
        run = await runtime.start(flows[0], id="run")
        async with asyncio.timeout(5):
            assert await run == "ended"
