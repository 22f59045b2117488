"""Subscribing to a run: from when to when a listener gets events, in which mode, and what is left afterwards."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Run, Runtime, Suspended, Workflow, events, stores, workflow
from perdure.engine import subscriptions as listeners
from perdure.errors import LeaseLost
from perdure.events import Event
from perdure.store import Store
from tests.engine.worlds import world
from tests.events.listening import (
    BEGUN,
    TWO_STEPS,
    TWO_STEPS_SAID,
    WAITS,
    Heard,
    Slow,
    fails,
    reports,
    said,
    standing,
    work,
)
from tests.patience import turns
from tests.simulation import LoopClock, simulate


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """When a test is over, and its runs with it, nothing is remembered of who listened."""
    listeners._by_key.clear()
    yield
    assert not listeners._by_key


@pytest.fixture(autouse=True)
def no_listener_raises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not reports(caplog)


def test_what_cannot_be_subscribed_is_refused() -> None:
    async def main() -> None:
        run = await TWO_STEPS.start()
        wrong: Any
        for wrong in (None, "print"):
            with pytest.raises(TypeError, match="a listener is a function"):
                run.subscribe(wrong)
        wrong = "later"
        with pytest.raises(ValueError, match="mode is one of sync, async, not 'later'"):
            run.subscribe(print, mode=wrong)
        with pytest.raises(ValueError, match="coalesce is one of none, latest, not 'later'"):
            run.subscribe(print, mode="async", coalesce=wrong)
        with pytest.raises(ValueError, match='coalesce="latest" needs mode="async"'):
            run.subscribe(print, coalesce="latest")
        await run

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("how", ["wf.start", "wf.start with a store", "runtime.start"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_who_subscribes_right_after_the_start_misses_nothing(how: str, kind: str, mode: Any, tmp_path: Path) -> None:
    heard = Heard()
    store: Store = stores.memory() if kind == "memory" else await asyncio.to_thread(stores.sqlite, tmp_path / "app.db")
    if how == "runtime.start":
        async with Runtime(store, [TWO_STEPS]) as runtime:
            run: Run[str] = await runtime.start(TWO_STEPS, id="run")
            run.subscribe(heard, mode=mode)
            assert await run == "ab"
    else:
        run = await (TWO_STEPS.start() if how == "wf.start" else TWO_STEPS.start(id="run", store=store))
        run.subscribe(heard, mode=mode)
        assert await run == "ab"
    assert heard.said == TWO_STEPS_SAID
    await store.close()


async def test_who_subscribes_while_the_run_waits_for_a_place_misses_nothing() -> None:
    go, heard = asyncio.Event(), Heard()

    async def body(ctx: Context[Any]) -> None:
        await ctx.step("a", go.wait)

    async with Runtime(stores.memory(), [first := Workflow("first", body), TWO_STEPS], concurrency=1) as runtime:
        await runtime.start(first)
        run = await runtime.start(TWO_STEPS)
        run.subscribe(heard)
        go.set()
        assert await run == "ab"
    assert heard.said == TWO_STEPS_SAID


async def test_who_subscribes_later_hears_from_then_on_and_who_unsubscribes_no_more() -> None:
    early, late = Heard(), Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)
        stop()
        stop()  # doing it again does nothing
        run.subscribe(late)
        await ctx.step("b", work)

    run = await flow.start()
    stop = run.subscribe(early)
    await run
    assert early.said[-1] == "step_complete a"
    assert late.said[0] == "step_start b"
    assert late.said[-1] == "run_complete"
    stop()


async def test_leaving_the_block_unsubscribes() -> None:
    heard = Heard()
    run = await WAITS.start()
    with run.subscribe(heard) as subscription:
        await run.outcome()
        assert callable(subscription)
    told = len(heard.events)
    await run.signal("go")
    await run
    assert len(heard.events) == told


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_subscription_lasts_through_suspensions_until_the_end(mode: Any) -> None:
    heard = Heard()
    async with world(WAITS) as here:
        run = await here.runtime.start(WAITS, id="run")
        run.subscribe(heard, mode=mode)
        assert isinstance(await here.runtime.resume("run"), Suspended)
        assert heard.take()[-1] == "run_suspended"
        assert len(listeners._by_key) == 1
        await run.signal("go", 1)
        assert await here.runtime.sweep() == {"run": Ok(1)}
        assert heard.said[:2] == BEGUN
        assert heard.said[-1] == "run_complete"


async def test_a_run_that_is_driven_elsewhere_is_not_heard_and_forgotten_when_nobody_listens() -> None:
    heard, store = Heard(), stores.memory()
    async with world(TWO_STEPS, store=store) as here:
        run = await here.runtime.start(TWO_STEPS, id="run")
        with run.subscribe(heard), run.subscribe(heard):
            claim = await store.acquire("run", 30, now=here.clock.now())
            assert claim is not None
            await store.finish(claim.lease, "completed", b'"elsewhere"', now=here.clock.now())
            assert await run == "elsewhere"
    assert not heard.events


@pytest.mark.parametrize("is_subscribed", [False, True])
@pytest.mark.parametrize("end", ["completed", "failed", "cancelled", "lost", "suspended"])
async def test_nothing_is_remembered_of_a_run_that_is_over(end: str, is_subscribed: bool) -> None:
    async def body(ctx: Context[Any]) -> None:
        await ctx.step("a", work)
        if end == "failed":
            await ctx.step("b", fails)
        elif end == "lost":
            await store.acquire("run", 30, now=here.clock.now() + 3600 * 1_000_000)
        elif end in {"suspended", "cancelled"}:
            await ctx.wait_for_signal("go")

    flow, store = Workflow("flow", body), stores.memory()
    async with world(flow, store=store) as here:
        run = await here.runtime.start(flow, id="run")
        stop = run.subscribe(Heard()) if is_subscribed else None
        if end == "lost":
            with pytest.raises(LeaseLost):
                await here.runtime.resume("run")
        else:
            await here.runtime.resume("run")
        if end == "cancelled":
            await run.cancel()
            await here.runtime.sweep()
        may_come_back = end in {"lost", "suspended"}
        assert bool(listeners._by_key) == (is_subscribed and may_come_back)
        if stop is not None:
            stop()
        assert not listeners._by_key


async def test_nothing_is_remembered_of_a_thousand_runs() -> None:
    store, heard = stores.memory(), Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)

    async def one(number: int) -> None:
        run = await flow.start(id=f"{number}", store=store)
        if number % 2:
            run.subscribe(heard, mode="async" if number % 4 == 1 else "sync")
        await run

    for start in range(0, 1000, 100):
        await asyncio.gather(*map(one, range(start, start + 100)))
        await turns(3)
        assert not listeners._by_key
    assert heard.types.count("run_complete") == 500


async def test_a_drive_that_still_tells_its_end_does_not_take_the_listeners_of_the_next_with_it() -> None:
    slow, go, late = asyncio.Event(), asyncio.Event(), Heard()

    async def first(event: Event) -> None:
        if isinstance(event, events.RunSuspendedEvent):
            await slow.wait()

    async def body(ctx: Context[Any]) -> None:
        await ctx.wait_for_signal("go")
        await ctx.step("a", go.wait)

    flow = Workflow("flow", body)
    async with world(flow) as here:
        run = await here.runtime.start(flow, id="run")
        stop = run.subscribe(first)
        driving = asyncio.ensure_future(here.runtime.resume("run"))
        await standing(run, "suspended")
        stop()
        await run.signal("go")
        second = asyncio.ensure_future(here.runtime.sweep())
        await standing(run, "running")
        slow.set()
        await driving
        await turns(5)
        run.subscribe(late)
        go.set()
        await second
    assert late.said == ["persist", "step_success a", "step_complete a", "run_complete"]


async def test_two_drives_that_follow_closely_are_told_one_after_the_other() -> None:
    """A signal comes while a listener still hears of the suspension; what the next drive tells comes after that."""
    heard, slow = Heard(), asyncio.Event()

    async def listen(event: Event) -> None:
        if isinstance(event, events.RunSuspendedEvent):
            await slow.wait()
        heard(event)

    async with world(WAITS) as here:
        run = await here.runtime.start(WAITS, id="run")
        run.subscribe(listen)
        driving = asyncio.ensure_future(here.runtime.resume("run"))
        await standing(run, "suspended")
        await run.signal("go")
        second = asyncio.ensure_future(here.runtime.sweep())
        await turns(30)
        assert "run_suspended" not in heard.types
        assert heard.types.count("run_start") == 1
        slow.set()
        await driving
        await second
    assert [kind for kind in heard.types if kind.startswith("run_")] == [
        "run_start",
        "run_suspended",
        "run_start",
        "run_complete",
    ]


async def test_subscribers_are_told_in_the_order_in_which_they_came_after_on_event() -> None:
    order: list[str] = []

    @workflow(on_event=lambda event: order.append(f"on_event {event.type}"))
    async def flow(ctx: Context[Any]) -> None: ...

    run = await flow.start()
    run.subscribe(lambda event: order.append(f"first {event.type}"))
    run.subscribe(lambda event: order.append(f"second {event.type}"))
    await run
    assert order[:3] == ["on_event lease", "first lease", "second lease"]
    assert order[-3:] == ["on_event run_complete", "first run_complete", "second run_complete"]


def test_a_program_without_a_loop_can_subscribe_and_unsubscribe() -> None:
    heard, threads = Heard(), set[int]()

    def listen(event: Event) -> None:
        heard(event)
        threads.add(threading.get_ident())

    with Runtime(stores.memory(), [WAITS]).sync as runtime:
        for run_id in ("heard", "not heard"):
            run = runtime.start(WAITS, id=run_id)
            assert isinstance(run.outcome(), Suspended)
            stop = run.subscribe(listen)
            if run_id == "not heard":
                stop()
            run.signal("go", 1)
            assert run.result() == 1
    assert {event.run_id for event in heard.events} == {"heard"}
    assert heard.said[:2] == BEGUN
    assert heard.said[-1] == "run_complete"
    assert threading.get_ident() not in threads


async def test_an_async_listener_is_awaited_before_the_step_returns() -> None:
    heard: list[str] = []

    async def listen(event: Event) -> None:
        await turns(5)
        heard.append(said(event))

    @workflow(on_event=listen)
    async def flow(ctx: Context[Any]) -> None:
        async def began() -> None:
            assert heard[-1] == "step_start a"

        await ctx.step("a", began)
        assert heard[-1] == "step_complete a"

    await flow()
    assert heard[-1] == "run_complete"


def test_one_listener_is_told_one_thing_at_a_time_whatever_branches_do() -> None:
    async def body(ctx: Context[Any]) -> None:
        async def branch(name: str) -> None:
            for number in range(3):
                await ctx.step("work", asyncio.sleep, random.Random(name).random() * 0.01, key=f"{name}{number}")

        await asyncio.gather(*map(branch, "abcd"))

    async def main() -> None:
        sync, queued = Slow(1), Slow(2)
        run = await Workflow("flow", body).start()
        run.subscribe(sync)
        run.subscribe(queued, mode="async")
        await run
        assert sync.said == queued.said
        assert sync.types.count("step_complete") == 12

    simulate(main())


def test_a_listener_with_a_queue_does_not_slow_the_run_which_waits_for_it_at_the_end() -> None:
    heard: list[tuple[str, float]] = []

    async def listen(event: Event) -> None:
        await asyncio.sleep(100)
        heard.append((said(event), asyncio.get_running_loop().time()))

    async def main() -> None:
        store, loop = stores.memory(), asyncio.get_running_loop()
        runtime = Runtime(store, [TWO_STEPS], clock=LoopClock(), concurrency=0)
        run = await runtime.start(TWO_STEPS, id="run")
        run.subscribe(listen, mode="async")
        driving = asyncio.ensure_future(runtime.resume("run"))
        await asyncio.sleep(50)
        assert await run.status() == "completed"  # for a long time, and no event was published
        assert (heard, driving.done()) == ([], False)
        assert await driving == Ok("ab")
        assert [text for text, _ in heard] == TWO_STEPS_SAID
        assert [round(at) for _, at in heard] == [100 * (number + 1) for number in range(len(heard))]
        assert round(loop.time()) == 100 * len(heard)
        await runtime.close()

    simulate(main())


async def test_a_listener_with_a_queue_may_block_until_the_run_has_ended() -> None:
    ended, heard = asyncio.Lock(), Heard()

    async def listen(event: Event) -> None:
        async with ended:
            heard(event)

    def let_go(event: Event) -> None:
        if event.is_terminal:
            ended.release()

    await ended.acquire()
    run = await TWO_STEPS.start()
    run.subscribe(let_go)
    run.subscribe(listen, mode="async")
    assert await run == "ab"
    assert heard.said == TWO_STEPS_SAID


async def test_an_idle_listener_gets_each_event_and_a_busy_one_the_newest_and_the_terminal_ones() -> None:
    go, heard = asyncio.Event(), Heard()

    async def listen(event: Event) -> None:
        heard(event)
        await go.wait()

    async with world(WAITS) as here:
        run = await here.runtime.start(WAITS, id="run")
        run.subscribe(listen, mode="async", coalesce="latest")
        every = Heard()
        run.subscribe(every)
        driving = asyncio.ensure_future(here.runtime.resume("run"))
        await standing(run, "suspended")
        await turns(10)
        assert heard.said == ["lease acquired"]  # it was idle, and is busy since
        go.set()
        await driving
        # The newest of all that came meanwhile, and the one that ended it.
        assert heard.take() == ["lease acquired", every.said[-2], "run_suspended"]
        go.clear()
        await run.signal("go")
        driving = asyncio.ensure_future(here.runtime.resume("run"))
        await standing(run, "completed")
        await turns(10)
        assert heard.take() == ["lease acquired"]
        go.set()
        await driving
        assert heard.said == ["step_complete b", "run_complete"]
        assert [list(event.snapshot.steps) for event in heard.events] == [["a", "go", "b"]] * 2


async def test_no_terminal_event_is_dropped_however_long_a_listener_is_busy() -> None:
    go, heard = asyncio.Event(), Heard()

    async def listen(event: Event) -> None:
        heard(event)
        await go.wait()

    subscription = listeners.Subscription(listen, "async", "latest")
    every = Heard()
    async with world(WAITS, on_event=every) as here:
        await here.runtime.run(WAITS, id="run")
        await here.runtime.signal("run", "go")
        await here.runtime.sweep()
    for event in every.events:
        subscription.deliver(event)
    await turns(3)
    go.set()
    while subscription.queue_task is not None:
        await turns(1)
    assert heard.said == ["lease acquired", "run_suspended", "step_complete b", "run_complete"]


async def test_unsubscribing_drops_the_queue() -> None:
    go, heard, other = asyncio.Event(), Heard(), Heard()

    async def listen(event: Event) -> None:
        heard(event)
        await go.wait()

    run = await TWO_STEPS.start()
    stop = run.subscribe(listen, mode="async")
    run.subscribe(lambda event: stop() if event.is_terminal else None)
    run.subscribe(other, mode="async")
    assert await run == "ab"  # which does not wait for a listener that no longer listens
    go.set()
    await turns(5)
    assert heard.said == ["lease acquired"]
    assert other.said == TWO_STEPS_SAID


async def test_a_slow_subscriber_holds_up_no_other_that_has_a_queue() -> None:
    go, quick = asyncio.Event(), Heard()

    async def slow(event: Event) -> None:
        await go.wait()

    run = await TWO_STEPS.start()
    run.subscribe(slow, mode="async")
    run.subscribe(quick, mode="async")
    waiting = asyncio.ensure_future(run.outcome())
    while len(quick.events) < len(TWO_STEPS_SAID):
        await turns(1)
    assert not waiting.done()
    go.set()
    assert await waiting == Ok("ab")
