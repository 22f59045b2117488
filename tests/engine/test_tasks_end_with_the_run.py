"""The tasks that a body creates end with it, whether or not they ever called ctx; no other task does."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from perdure import Context, Ok, Suspended, stores, workflow
from perdure.aio.pending_write import await_reply
from tests.engine.worlds import world
from tests.patience import PATIENCE

MINUTE = "1m"
Start = Callable[["Doings"], Coroutine[Any, Any, None]]


class Doings:
    """Work of a body's own, which would go on for ever."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.running = 0

    async def work(self) -> None:
        self.running += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.running -= 1

    def start(self, *, inside: bool = False) -> None:
        self.tasks.append(asyncio.create_task(self._start_another() if inside else self.work()))

    async def _start_another(self) -> None:
        self.start()


async def a_task(doings: Doings) -> None:
    doings.start()


async def a_task_of_a_task(doings: Doings) -> None:
    doings.start(inside=True)


async def a_task_of_a_callback(doings: Doings) -> None:
    asyncio.get_running_loop().call_soon(doings.start)


async def a_gather(doings: Doings) -> None:
    asyncio.gather(doings.work(), asyncio.gather(doings.work()))


async def an_abandoned_wait_for(doings: Doings) -> None:
    doings.tasks.append(asyncio.create_task(asyncio.wait_for(doings.work(), 3600)))


async def a_task_made_by_clean_up(doings: Doings) -> None:
    async def clean_up() -> None:
        try:
            await doings.work()
        finally:
            doings.start()

    doings.tasks.append(asyncio.create_task(clean_up()))


STARTS = (a_task, a_task_of_a_task, a_task_of_a_callback, a_gather, an_abandoned_wait_for, a_task_made_by_clean_up)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("start", STARTS)
async def test_tasks_that_never_called_ctx_end_when_the_run_leaves_memory_or_ends(start: Start) -> None:
    doings = Doings()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await start(doings)
        for n in range(20):
            await ctx.sleep(f"nap-{n}", MINUTE)
        await start(doings)
        await asyncio.sleep(0)
        return "done"

    async with world(flow) as here:
        before = others()
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        for _ in range(20):
            await settle()
            assert (doings.running, others() - before) == (0, set())
            outcome = (await here.later(MINUTE))["run"]
        assert outcome == Ok("done")
        await settle()
        assert (doings.running, others() - before) == (0, set())


async def test_a_child_that_nobody_awaits_yet_leaves_no_task_behind_when_its_parent_leaves_memory() -> None:
    @workflow
    async def wait(ctx: Context[Any]) -> None:
        await ctx.wait_for_signal("go")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        child = ctx.start_child(wait)
        await ctx.wait_for_signal("go")
        await child

    async with world(flow, wait) as here:
        before = others()
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        await settle()
        assert others() - before == set()


async def test_a_task_that_was_made_elsewhere_goes_on_when_the_body_that_awaits_it_leaves_memory() -> None:
    doings = Doings()
    elsewhere = asyncio.create_task(doings.work())
    await asyncio.sleep(0)

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        waiting = asyncio.create_task(asyncio.wait([elsewhere]))
        shielded = asyncio.shield(elsewhere)
        await ctx.sleep("nap", MINUTE)
        return f"{waiting.done()} {shielded.done()}"

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert await here.later(MINUTE) == {"run": Ok("False False")}
        assert not elsewhere.done()
    elsewhere.cancel()
    await asyncio.wait([elsewhere])


async def test_a_task_in_a_context_of_its_own_is_none_of_the_bodys() -> None:
    doings = Doings()
    tasks: list[asyncio.Task[None]] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        tasks.append(asyncio.create_task(doings.work(), context=contextvars.Context()))
        await ctx.sleep("nap", MINUTE)

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert not tasks[0].done()
    tasks[0].cancel()
    await asyncio.wait(tasks)


async def test_a_task_of_a_step_goes_on_after_the_run_has_ended() -> None:
    doings = Doings()

    async def warm_up() -> None:
        doings.start()
        await asyncio.sleep(0)

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(warm_up)

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        assert (doings.running, doings.tasks[0].done()) == (1, False)
    doings.tasks[0].cancel()
    await asyncio.wait(doings.tasks)


async def test_a_run_that_a_body_started_goes_on_after_that_body_has_ended() -> None:
    go_on = asyncio.Event()
    calls: list[int] = []

    async def wait() -> str:
        calls.append(1)
        await go_on.wait()
        return "went on"

    @workflow
    async def second(ctx: Context[Any]) -> str:
        return await ctx.step(wait)

    store = stores.memory()

    @workflow
    async def first(_ctx: Context[Any]) -> str:
        await second.start(id="second", store=store)
        await asyncio.sleep(0.01)
        return "started"

    assert await first.run(id="first", store=store) == Ok("started")
    go_on.set()
    async with asyncio.timeout(PATIENCE):
        assert await second.run(id="second", store=store) == Ok("went on")
    assert calls == [1], "it was not interrupted"


async def test_a_write_that_a_body_has_sent_is_not_cut_off() -> None:
    written: list[int] = []

    async def write() -> None:
        await asyncio.sleep(0.05)
        written.append(1)

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        sent = asyncio.create_task(await_reply(write()))  # as a key-value store does it
        await ctx.sleep("nap", MINUTE)
        await sent

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert written == [1]


async def test_a_task_that_does_not_end_is_waited_for_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.body.leaving.CLOSING_SECONDS", 0.05)
    is_over = asyncio.Event()

    async def stubborn() -> None:
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await is_over.wait()

    async def again() -> None:
        try:
            await is_over.wait()
        finally:
            if not is_over.is_set():
                tasks.append(asyncio.create_task(again()))

    tasks: list[asyncio.Task[None]] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        tasks.extend(asyncio.create_task(work()) for work in (stubborn, again))
        await ctx.sleep("nap", MINUTE)

    async with world(flow) as here, asyncio.timeout(PATIENCE):
        with pytest.warns(UserWarning, match="does not end when it is cancelled"):
            assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        is_over.set()
        await asyncio.wait(tasks)


async def test_a_task_that_is_left_behind_gets_nothing_after_the_function_has_ended() -> None:
    """Otherwise it would go on to its next step, which a replay that is a little faster does not call."""
    ran: list[str] = []

    async def work(label: str) -> None:
        ran.append(label)

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        async def left_behind() -> None:
            await ctx.step(work, "recorded together with what ends the function", key="b")
            await ctx.step(work, "after the end", key="c")

        task = asyncio.create_task(left_behind())
        await ctx.step(work, "ends the function", key="a")
        return f"{task.done()}"

    store = stores.memory()
    async with world(flow, store=store) as here:
        assert await here.runtime.run(flow, id="run") == Ok("False")
    assert [entry.key for entry in await store.journal("run")] == ["a", "b"]
    assert "after the end" not in ran
