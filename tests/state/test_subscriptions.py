"""Subscribing to a run: in which mode one is told, from when to when, and what a listener may do."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from perdure import Context, Err, Ok, Run, Runtime, Suspended, Workflow, events, listeners, stores, workflow
from perdure.errors import LeaseLost, RunCancelled
from perdure.events import Event
from perdure.store import Store
from tests.engine.worlds import world
from tests.simulation import LoopClock, simulate
from tests.state.listening import Heard, Slow, reports, said, turns

BEGUN: Final = ["lease acquired", "run_start"]


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """When a test is over, and its runs with it, nothing is remembered of who listened."""
    listeners._listening.clear()
    yield
    assert not listeners._listening


@pytest.fixture(autouse=True)
def no_listener_raises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not reports(caplog)


async def work(value: Any = None) -> Any:
    return value


async def fails() -> None:
    raise ValueError("not today")


async def two_steps(ctx: Context[Any]) -> str:
    first = await ctx.step("a", work, "a")
    return f"{first}{await ctx.step('b', work, 'b')}"


async def waits(ctx: Context[Any]) -> Any:
    await ctx.step("a", work)
    answer = await ctx.wait_for_signal("go")
    await ctx.step("b", work)
    return answer


async def standing(run: Run[Any], status: str) -> None:
    """Return when the run stands like this."""
    while await run.status() != status:  # noqa: ASYNC110 - what is in a store is no event
        await asyncio.sleep(0)


TWO_STEPS: Final[Workflow[[], str]] = Workflow("two_steps", two_steps)
WAITS: Final[Workflow[[], Any]] = Workflow("waits", waits)
STEPS: Final = [f"{kind}{key}" for key in "ab" for kind in ("step_start ", "persist", "step_success ", "step_complete ")]
TWO_STEPS_SAID: Final = [
    *BEGUN,
    *(text if not text.startswith("persist") else "persist" for text in STEPS),
    "run_complete",
]


# From when, and until when.


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
        assert len(listeners._listening) == 1
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
        assert bool(listeners._listening) == (is_subscribed and may_come_back)
        if stop is not None:
            stop()
        assert not listeners._listening


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
        assert not listeners._listening
    assert heard.types.count("run_complete") == 500


async def test_a_drive_that_still_tells_its_end_does_not_take_the_listeners_of_the_next_with_it() -> None:
    slow, go, late = asyncio.Event(), asyncio.Event(), Heard()

    async def first(event: Event) -> None:
        if isinstance(event, events.RunSuspended):
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
        if isinstance(event, events.RunSuspended):
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


# Modes.


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
        assert await run.status() == "completed"  # long since, and nobody was told anything
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
    while subscription.working is not None:
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


# What a listener may do.

RAISED: Final[dict[str, Callable[[], BaseException]]] = {
    "an error": lambda: ValueError("a listener's own"),
    "CancelledError": asyncio.CancelledError,
    "an error that is no Exception": lambda: BaseException("a listener's own"),
    "a group": lambda: BaseExceptionGroup("of them", [KeyError("a"), asyncio.CancelledError()]),
    "StopIteration": StopIteration,
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["plain", "async", "later"])
@pytest.mark.parametrize("what", RAISED)
async def test_what_a_listener_raises_is_reported_and_changes_nothing(
    what: str, kind: str, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Heard(), Heard()

    def plain(event: Event) -> None:
        error = RAISED[what]()
        raise error

    async def asynchronous(event: Event) -> None:
        if kind == "later":
            await turns(3)
        error = RAISED[what]()
        raise error

    async def body(ctx: Context[Any]) -> list[str]:
        async def branch(key: str) -> str:
            return str(await ctx.step("work", work, key, key=key))

        return [str(await ctx.step("first", work, 1)), *await asyncio.gather(*map(branch, "ab"))]

    run = await Workflow("flow", body).start()
    run.subscribe(before)
    run.subscribe(plain if kind == "plain" else asynchronous, mode=mode)
    run.subscribe(after)
    with caplog.at_level(logging.ERROR, "perdure"):
        assert await run == ["1", "a", "b"]
    assert before.said == after.said
    assert len(caplog.records) == len(before.events)
    assert all("raised at" in record.getMessage() and record.exc_info for record in caplog.records)
    assert f"of run '{run.id}'" in caplog.records[0].getMessage()
    caplog.clear()


@pytest.mark.parametrize("at", ["lease", "persist", "step_start", "step_complete", "run_complete"])
@pytest.mark.parametrize("kind", ["plain", "async", "queued"])
@pytest.mark.parametrize("interrupt", [SystemExit, KeyboardInterrupt])
def test_an_interrupt_ends_the_process_and_not_the_run(interrupt: type[BaseException], kind: str, at: str) -> None:
    store, ran = stores.memory(), list[str]()

    async def note(key: str) -> str:
        ran.append(key)
        return key

    async def body(ctx: Context[Any]) -> list[str]:
        return await asyncio.gather(*(ctx.step("note", note, key, key=key) for key in "ab"))

    def plain(event: Event) -> None:
        if event.type == at:
            raise interrupt

    async def asynchronous(event: Event) -> None:
        await turns(2)
        plain(event)

    flow = Workflow("flow", body)

    async def first() -> None:
        run = await flow.start(id="run", store=store)
        run.subscribe(plain if kind == "plain" else asynchronous, mode="async" if kind == "queued" else "sync")
        await run

    with pytest.raises(interrupt):
        asyncio.run(first())
    recorded = [entry.key for entry in asyncio.run(store.journal("run"))]

    async def second() -> Any:
        await TWO_STEPS.run()  # on a new loop nobody remembers who listened on one that is closed
        return await flow.run(id="run", store=store, wait=False)

    assert asyncio.run(second()) == Ok(["a", "b"])
    assert all(ran.count(key) == 1 for key in recorded)


async def test_a_listener_may_unsubscribe_itself_and_another_while_it_is_told() -> None:
    told: list[str] = []

    def one(event: Event) -> None:
        told.append(f"one {event.type}")
        if event.type == "run_start":
            stop_one()
            stop_two()

    run = await TWO_STEPS.start()
    stop_one = run.subscribe(one)
    stop_two = run.subscribe(lambda event: told.append(f"two {event.type}"))
    stop_three = run.subscribe(lambda event: told.append(f"three {event.type}"))
    await run
    assert told[:4] == ["one lease", "two lease", "three lease", "one run_start"]
    assert {text.split()[0] for text in told[4:]} == {"three"}
    stop_three()


async def test_a_listener_may_subscribe_another_which_hears_from_the_next_event_on() -> None:
    other = Heard()
    run = await TWO_STEPS.start()

    def one(event: Event) -> None:
        if event.type == "run_start":
            run.subscribe(other)

    run.subscribe(one)
    await run
    assert other.said == TWO_STEPS_SAID[2:]


@pytest.mark.parametrize("at", ["run_start", "step_start a", "step_success a", "step_complete a"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_listener_may_cancel_its_run_and_still_do_the_rest_of_its_work(at: str, mode: Any) -> None:
    done: list[str] = []

    async def listen(event: Event) -> None:
        if said(event) == at:
            await run.cancel()
            await turns(10)
            done.append("the rest")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)
        await ctx.wait_for_signal("never")

    run = await flow.start()
    run.subscribe(listen, mode=mode)
    every = Heard()
    run.subscribe(every)
    outcome = await run.outcome()
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunCancelled)
    assert done == ["the rest"]
    assert every.said[-1] == "run_cancelled"


@pytest.mark.parametrize("at", ["run_start", "step_start a", "step_complete a", "persist"])
async def test_a_listener_may_send_its_run_a_signal(at: str) -> None:
    sent: list[str] = []

    async def listen(event: Event) -> None:
        if said(event) == at and not sent:
            sent.append(at)
            await run.signal("go", at)

    async with world(WAITS) as here:
        run = await here.runtime.start(WAITS, id="run")
        run.subscribe(listen)
        assert await here.runtime.resume("run") == Ok(at)


async def test_a_listener_may_look_at_its_run_which_stands_as_the_event_says() -> None:
    looked: list[str] = []

    async def listen(event: Event) -> None:
        assert await run.snapshot() == event.snapshot
        assert (await run.resume_state()).steps == event.snapshot.steps
        looked.append(said(event))

    async with world(WAITS) as here:
        run = await here.runtime.start(WAITS, id="run")
        run.subscribe(listen)
        await here.runtime.resume("run")
        await run.signal("go")
        await here.runtime.sweep()
    assert looked[-1] == "run_complete"
    assert "run_suspended" in looked


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_tasks_that_a_listener_starts_are_no_branches_of_the_body(kind: str, mode: Any) -> None:
    """A body of which a branch lived on would stay in memory for the grace, which never passes here."""
    started: list[asyncio.Task[None]] = []

    def plain(event: Event) -> None:
        started.append(asyncio.get_running_loop().create_task(asyncio.sleep(3600)))

    async def asynchronous(event: Event) -> None:
        plain(event)
        await turns(2)

    async with world(WAITS, unload_grace="1h") as here:
        run = await here.runtime.start(WAITS, id="run")
        with run.subscribe(plain if kind == "plain" else asynchronous, mode=mode):
            async with asyncio.timeout(5):
                assert isinstance(await here.runtime.resume("run"), Suspended)
    assert not any(task.cancelled() for task in started)
    for task in started:
        task.cancel()
    await asyncio.wait(started)


async def test_what_a_listener_makes_happen_is_told_after_what_it_is_told_of() -> None:
    every = Heard()
    await TWO_STEPS.run(on_event=every)
    first, second = every.events[:2]
    told: list[str] = []

    def one(event: Event) -> None:
        if event is first:
            among.tell(second, None)
        told.append(f"one {event.type}")

    among = listeners.Listeners()
    listeners.Subscription(one).join(among)
    listeners.Subscription(lambda event: told.append(f"two {event.type}")).join(among)
    among.tell(first, None)
    assert among.telling() is None
    assert told == ["one lease", "two lease", "one run_start", "two run_start"]


async def test_a_listener_may_run_another_workflow() -> None:
    async def listen(event: Event) -> None:
        if event.type == "step_complete":
            assert await TWO_STEPS() == "ab"

    run = await TWO_STEPS.start()
    run.subscribe(listen)
    assert await run == "ab"


marked: contextvars.ContextVar[str] = contextvars.ContextVar("marked", default="by nobody")


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_listener_sees_the_context_of_what_happens_and_leaves_nothing_in_it(kind: str) -> None:
    seen: list[str] = []

    def plain(event: Event) -> None:
        if isinstance(event, events.StepEvent):
            seen.append(marked.get())
        marked.set("by a listener")

    async def asynchronous(event: Event) -> None:
        plain(event)

    async def look() -> str:
        return marked.get()

    @workflow(on_event=plain if kind == "plain" else asynchronous)
    async def flow(ctx: Context[Any]) -> list[str]:
        marked.set("by the body")
        return [await ctx.step("a", look), marked.get(), await ctx.step("b", look), marked.get()]

    assert await flow() == ["by the body"] * 4
    assert set(seen) == {"by the body"}
    assert marked.get() == "by nobody"


async def test_a_listener_with_a_queue_sees_the_context_in_which_it_subscribed() -> None:
    seen: list[str] = []
    run = await TWO_STEPS.start()
    marked.set("by the subscriber")
    run.subscribe(lambda _: seen.append(marked.get()), mode="async")
    marked.set("by somebody later")
    await run
    assert set(seen) == {"by the subscriber"}


HANGS_AT: Final = ["lease acquired", "step_start a", "step_complete a", "run_complete"]


class Hanging:
    """A listener that never returns from one event."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.hangs = asyncio.Event()
        self.heard = Heard()

    async def __call__(self, event: Event) -> None:
        self.heard(event)
        if said(event) == self._at:
            self.hangs.set()
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("at", HANGS_AT)
@pytest.mark.parametrize("leaves", ["whoever awaits the run", "the runtime"])
def test_a_listener_that_hangs_keeps_nobody_who_has_to_get_away(leaves: str, at: str, mode: Any) -> None:
    async def main() -> None:
        store, clock, loop = stores.memory(), LoopClock(), asyncio.get_running_loop()
        runtime = Runtime(store, [TWO_STEPS], clock=clock, concurrency=0, drain_after="10s")
        run = await runtime.start(TWO_STEPS, id="run")
        hanging = Hanging(at)
        stop = run.subscribe(hanging, mode=mode)
        running = asyncio.ensure_future(runtime.resume("run"))
        await hanging.hangs.wait()
        await turns(100)
        assert not running.done()  # it waits, as long as nobody is in a hurry
        before = loop.time()
        if leaves == "the runtime":
            await runtime.close()
        else:
            running.cancel()
        await asyncio.wait([running])
        assert loop.time() - before < 11
        stop()
        await runtime.close()
        later = Runtime(store, [TWO_STEPS], clock=clock, concurrency=0)
        assert await later.run(TWO_STEPS, id="run") == Ok("ab")
        await later.close()

    simulate(main())


# A body that is cancelled by something of its own while a listener listens.


class Listening:
    """A listener that takes ten seconds at one event, the first time."""

    def __init__(self, at: str) -> None:
        self.heard: list[str] = []
        self.at = at

    async def __call__(self, event: Event) -> None:
        self.heard.append(said(event))
        if self.heard.count(self.at) == 1 and self.heard[-1] == self.at:
            await asyncio.sleep(10)


async def impatient(call: Callable[[], Awaitable[Any]]) -> Any:
    """What the call gives, called once more when it has not come in a second."""
    try:
        async with asyncio.timeout(1):
            return await call()
    except TimeoutError:
        return await call()


@pytest.mark.parametrize("at", ["step_start a", "step_success a", "step_complete a", "signal go", "step_skipped a"])
def test_a_call_that_the_body_gave_up_while_a_listener_listened_can_be_made_again(at: str) -> None:
    ran: list[str] = []

    async def note() -> str:
        ran.append("a")
        return "a"

    async def body(ctx: Context[Any]) -> list[Any]:
        first = await impatient(lambda: ctx.step("a", note))
        return [first, await impatient(lambda: ctx.wait_for_signal("go"))]

    async def main() -> None:
        listen = Listening(at)
        flow = Workflow("flow", body)
        runtime = Runtime(stores.memory(), [flow], clock=LoopClock(), concurrency=0)
        run = await runtime.start(flow, id="run")
        if at == "step_skipped a":
            assert isinstance(await runtime.resume("run"), Suspended)
        await run.signal("go", 1)
        run.subscribe(listen)
        assert await runtime.resume("run") == Ok(["a", 1])
        assert at in listen.heard
        assert listen.heard[-1] == "run_complete"
        assert ran == ["a"]
        await runtime.close()

    simulate(main())


async def test_a_cancellation_that_is_due_is_not_taken_for_the_listeners_own() -> None:
    async def listen(event: Event) -> None:
        await turns(2)

    @workflow(on_event=listen)
    async def flow(ctx: Context[Any]) -> str:
        async def branch() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await ctx.step("a", work)
            raise AssertionError("it went on")

        done = await asyncio.gather(branch(), return_exceptions=True)
        return type(done[0]).__name__

    assert await flow() == "CancelledError"
