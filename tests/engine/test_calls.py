"""What a ctx call promises when it is cancelled, when it waits for a replay, and when timers of asyncio are beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from perdure import Context, Err, Ok, Suspended, Workflow, stores
from perdure.aio.own_tasks import start_own_task
from perdure.body import body_queue, calls
from perdure.engine import asyncio_timers
from perdure.engine.asyncio_timers import DurableTimers
from perdure.errors import RunCancelled
from perdure.model.durations import MICROSECOND
from tests.engine.replays import stored, twice
from tests.engine.worlds import world
from tests.patience import turns, until
from tests.simulation import _Proxy

forever = 3600


async def hang() -> None:
    await asyncio.sleep(forever)


async def unwind_slowly() -> None:
    try:
        await asyncio.sleep(forever)
    finally:
        await asyncio.sleep(0.01)


async def swallow() -> str:
    try:
        await asyncio.sleep(forever)
    except asyncio.CancelledError:
        return "swallowed"
    return "never"


# Cancelled calls.


async def test_a_call_raises_the_first_cancelled_error_that_it_got() -> None:
    async def body(ctx: Context[Any]) -> list[Any]:
        seen: list[Any] = []

        async def work() -> None:
            try:
                await ctx.step(unwind_slowly)
            except asyncio.CancelledError as error:
                seen.append(error.args)

        task = asyncio.create_task(work())
        await ctx.step("begun", turns, 3)
        task.cancel("first")
        await turns(2)
        task.cancel("second")
        await asyncio.wait([task])
        return seen

    assert await twice(body) == ([("first",)], [("first",)])


async def test_a_call_that_is_cancelled_before_the_body_rests_is_withdrawn_at_once() -> None:
    ran: list[str] = []

    async def work() -> None:
        ran.append("step")

    async def flow(ctx: Context[Any]) -> None:
        task = asyncio.create_task(ctx.step("given up", work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await ctx.sleep("nap", "1h")

    definition = Workflow("flow", flow)
    async with world(definition) as here:
        assert isinstance(await here.runtime.run(definition, id="run"), Suspended)
        assert [entry.key for entry in await here.runtime.store.journal("run")] == ["nap"]
        assert await here.later("1h") == {"run": Ok(None)}
    assert ran == []


async def test_a_step_is_cancelled_once_however_often_its_call_is() -> None:
    cancelled: list[str] = []

    async def stubborn() -> None:
        for _ in range(10):
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                cancelled.append("step")

    async def body(ctx: Context[Any]) -> None:
        task = asyncio.create_task(ctx.step(stubborn))
        await ctx.step("begun", turns, 3)
        for number in range(3):
            task.cancel()
            await ctx.step(f"beside:{number}", turns, 3)
        await asyncio.wait([task])

    await twice(body)
    assert cancelled == ["step"]


async def test_a_task_whose_cancellation_was_withdrawn_is_not_cancelled_again() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        seen: list[str] = []

        async def work() -> None:
            seen.append(await ctx.step(swallow))
            await asyncio.sleep(0)
            seen.append("went on")

        task = asyncio.create_task(work())
        await ctx.step("begun", turns, 3)
        task.cancel()
        task.uncancel()
        await asyncio.wait([task])
        return seen

    assert await twice(body) == (["swallowed", "went on"],) * 2


async def test_cancelling_a_task_again_after_its_result_stays_one_request() -> None:
    async def body(ctx: Context[Any]) -> list[Any]:
        seen: list[Any] = []

        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            seen.append(await ctx.step(swallow))
            try:
                await asyncio.sleep(forever)
            except asyncio.CancelledError:
                seen.append(task.cancelling())

        task = asyncio.create_task(work())
        await ctx.step("begun", turns, 3)
        task.cancel()
        await asyncio.wait([task])
        return seen

    assert await twice(body) == (["swallowed", 1],) * 2


async def test_the_key_of_a_cancelled_step_may_be_used_again() -> None:
    async def body(ctx: Context[Any]) -> str:
        task = asyncio.create_task(ctx.step("again", hang))
        await ctx.step("begun", turns, 3)
        task.cancel()
        await asyncio.wait([task])
        return await ctx.step("again", asyncio.sleep, 0, "second")

    assert await twice(body) == ("second", "second")


async def test_a_call_that_was_cancelled_before_it_was_started_in_this_drive_is_given_an_end() -> None:
    """The process has died before it was recorded that the cancelled step had ended."""
    ran: list[str] = []

    async def work() -> None:
        ran.append("step")
        await asyncio.sleep(forever)

    async def flow(ctx: Context[Any]) -> str:
        task = asyncio.create_task(ctx.step("given up", work))
        await ctx.step("begun", turns, 3)
        task.cancel()
        await asyncio.wait([task])
        await ctx.sleep("nap", "1h")
        return f"{task.cancelled()}"

    definition = Workflow("flow", flow)
    async with world(definition) as here:
        assert isinstance(await here.runtime.run(definition, id="run"), Suspended)
        entries = stored(here).entries
        end = next(seq for seq, entry in entries.items() if entry.key == "given up")
        for seq in [seq for seq in entries if seq >= end]:
            del entries[seq]
        await here.later("1h")
        assert await here.later("1h") == {"run": Ok("True")}
        journal = await here.runtime.store.journal("run")
        assert [entry.phase for entry in journal if entry.key == "given up"] == ["cancel"]
    assert ran == ["step"]


# Replays.


async def test_a_replay_of_many_steps_lets_the_host_have_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_IN_A_ROW", 4)
    monkeypatch.setattr(body_queue, "SLICE", -1.0)
    host_turns, is_over = 0, False
    loop = asyncio.get_running_loop()

    def take_turn() -> None:
        nonlocal host_turns
        host_turns += 1
        if not is_over:
            loop.call_soon(take_turn)

    async def body(ctx: Context[Any]) -> bool:
        before = host_turns
        for number in range(200):
            await ctx.step(f"{number}", asyncio.sleep, 0)
        return host_turns - before > 3

    take_turn()
    try:
        assert await twice(body) == (True, True)
    finally:
        is_over = True


async def test_starting_many_steps_lets_the_host_have_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_queue, "SLICE", -1.0)
    host_turns, is_over, started = 0, False, list[int]()
    loop = asyncio.get_running_loop()

    def take_turn() -> None:
        nonlocal host_turns
        host_turns += 1
        if not is_over:
            loop.call_soon(take_turn)

    async def work() -> None:
        started.append(host_turns)

    async def body(ctx: Context[Any]) -> None:
        await asyncio.gather(*(ctx.step(f"{number}", work) for number in range(1000)))

    take_turn()
    try:
        await twice(body)
    finally:
        is_over = True
    assert started[-1] - started[0] > 3


async def test_a_replay_cancels_the_body_when_it_has_made_as_many_calls_as_before() -> None:
    """No call asks for the entry that says where the body was cancelled, and the body is busy by itself before its step."""
    places: list[str] = []
    has_begun, is_cleaning_up = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        has_begun.set()
        await asyncio.sleep(forever)

    async def clean_up() -> None:
        if len(places) == 1:
            is_cleaning_up.set()
            await asyncio.sleep(forever)

    async def flow(ctx: Context[Any]) -> None:
        place = "by itself"
        try:
            await start_own_task(turns(5))
            place = "in its step"
            await ctx.step(work)
        except asyncio.CancelledError:
            places.append(place)
            await ctx.step(clean_up)
            raise

    definition = Workflow("flow", flow)
    async with world(definition, unload_grace="1m") as here:
        awaiting = asyncio.create_task(here.runtime.run(definition, id="run"))
        await has_begun.wait()
        await here.runtime.cancel("run")
        await is_cleaning_up.wait()
        awaiting.cancel()
        await asyncio.wait([awaiting])
        await here.later("1s")
    assert places == ["in its step", "in its step"]


class HeldRecords(_Proxy):
    """A store whose records wait for a gate."""

    def __init__(self) -> None:
        super().__init__(stores.memory())
        self.gate, self.is_held = asyncio.Event(), asyncio.Event()

    def _around(self, method: Callable[..., Awaitable[Any]]) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if method.__name__ == "record":
                self.is_held.set()
                await self.gate.wait()
            return await method(*args, **kwargs)

        return call


async def test_no_step_starts_when_the_cancellation_of_the_run_is_on_its_way() -> None:
    ran: list[str] = []
    store: Any = HeldRecords()
    has_begun = asyncio.Event()
    news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        ran.append("step")

    async def flow(ctx: Context[Any]) -> None:
        has_begun.set()
        await news
        await ctx.step(work)

    definition = Workflow("flow", flow)
    async with world(definition, store=store, unload_grace="1m") as here:
        running = asyncio.create_task(here.runtime.run(definition, id="run"))
        await has_begun.wait()
        await here.runtime.cancel("run")
        await store.is_held.wait()
        news.set_result(None)
        await turns(20)
        store.gate.set()
        outcome = await running
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
    assert ran == []


# Timers of asyncio.


async def test_a_sleep_does_not_begin_again_when_its_run_comes_back() -> None:
    """What the body did by itself before the sleep took time on the first run only."""
    is_first = True

    async with world() as here:

        async def by_itself() -> None:
            nonlocal is_first
            if is_first:
                here.clock.advance("5m")
            is_first = False

        async def flow(ctx: Context[Any]) -> str:
            await ctx.step("before", turns, 1)
            await start_own_task(by_itself())
            signal = asyncio.create_task(ctx.wait_for_signal("news"))
            await asyncio.sleep(600)
            return f"{await signal}"

        definition = Workflow("flow", flow)
        began = here.clock.now()
        suspended = await here.runtime.run(definition, id="run")
        assert isinstance(suspended, Suspended)
        await here.runtime.signal("run", "news", "good")
        assert isinstance((await here.later("6m"))["run"], Suspended)
        row = await here.runtime.store.get("run")
        assert row is not None
        assert row.wake_at == began + 900 * MICROSECOND
        assert await here.later("4m") == {"run": Ok("good")}


async def test_a_sleep_is_recorded_once_however_often_its_run_leaves_memory() -> None:
    async def flow(ctx: Context[Any]) -> None:
        async def listen() -> None:
            for number in range(3):
                await ctx.wait_for_signal(f"{number}")

        listening = asyncio.create_task(listen())
        await asyncio.sleep(3600)
        await listening

    definition = Workflow("flow", flow)
    async with world(definition) as here:
        assert isinstance(await here.runtime.run(definition, id="run"), Suspended)
        for number in range(3):
            await here.runtime.signal("run", f"{number}", None)
            await here.later("1m")
        journal = await here.runtime.store.journal("run")
        assert [entry.phase for entry in journal if entry.kind == "timer"] == ["open"]
        assert await here.later("1h") == {"run": Ok(None)}


async def test_a_time_limit_does_not_count_what_the_body_did_by_itself_before_it() -> None:
    async with world() as here:

        async def by_itself() -> None:
            here.clock.advance("1m")

        async def flow(ctx: Context[Any]) -> str:
            await ctx.step("before", turns, 1)
            await start_own_task(by_itself())
            async with asyncio.timeout(30):
                return await ctx.step("in time", _in_a_while)

        definition = Workflow("flow", flow)
        assert await here.runtime.run(definition, id="run") == Ok("in time")


async def test_the_time_that_a_run_was_queued_does_not_count_for_its_time_limits() -> None:
    async def flow(ctx: Context[Any]) -> str:
        async with asyncio.timeout(30):
            return await ctx.step("in time", _in_a_while)

    definition = Workflow("flow", flow)
    async with world(definition) as here:
        await here.runtime.start(definition, id="run")
        assert await here.later("1h") == {"run": Ok("in time")}


async def test_a_sleep_after_another_one_takes_no_longer_than_it_says() -> None:
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("before", turns, 1)
        await asyncio.sleep(60)
        await asyncio.sleep(60)

    definition = Workflow("flow", flow)
    async with world(definition, unload_grace="1h") as here:
        running = asyncio.create_task(here.runtime.run(definition, id="run"))
        first = here.clock.now() + 60 * MICROSECOND
        await until(lambda: here.clock.next_at() == first)
        here.clock.advance(60)
        await until(lambda: (here.clock.next_at() or 0) > first)
        assert here.clock.next_at() == first + 60 * MICROSECOND
        here.clock.advance(60)
        assert await running == Ok(None)


async def _in_a_while() -> str:
    await asyncio.sleep(0.02)
    return "in time"


class _Recording:
    """A drive, as far as its timers are concerned."""

    def __init__(self, now: int) -> None:
        self.must_not_record = False
        self.is_resumed = True
        self.recorded: list[dict[str, Any]] = []
        self.clock = SimpleNamespace(now=lambda: now)
        self.run = SimpleNamespace(id="run", workflow="flow", attempts=1, version=1, queue=None, parent_id=None)

    def record(self, _: None, **fields: Any) -> None:
        self.recorded.append(fields)


def _fire(drive: Any, *instants: int) -> None:
    timers = DurableTimers(drive, [])
    for at in instants:
        timer: Any = SimpleNamespace(name=str(at), fires_at=at, armed=object())
        timers._fire(timer)
        timers._fire(timer)


def test_the_entry_of_a_timer_is_never_before_its_instant() -> None:
    """Some event loops fire early."""
    drive = _Recording(now=95)
    _fire(drive, 100, 90)
    assert [(fields["started_at"], fields["ended_at"]) for fields in drive.recorded] == [(100, 100), (90, 95)]


def test_a_timer_of_a_run_that_has_left_memory_records_nothing() -> None:
    drive = _Recording(now=95)
    drive.must_not_record = True
    _fire(drive, 90)
    assert drive.recorded == []


def test_a_run_that_polls_with_asyncio_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asyncio_timers, "_MANY", 2)
    with caplog.at_level(logging.WARNING, "perdure"):
        _fire(_Recording(now=95), 1, 2, 3, 4)
    assert len([record for record in caplog.records if "has slept 2 times" in record.getMessage()]) == 1
