"""A listener may do anything, and raise anything: its run goes on as without it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, events, stores, workflow
from perdure.engine import subscriptions as listeners
from perdure.errors import RunCancelled
from perdure.events import Event
from tests.engine.worlds import world
from tests.events.listening import TWO_STEPS, TWO_STEPS_SAID, WAITS, Heard, reports, said, work
from tests.patience import PATIENCE, turns
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
        await TWO_STEPS.run()  # a new loop drops the subscriptions of a closed one
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
            async with asyncio.timeout(PATIENCE):
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
            among.publish(second, None)
        told.append(f"one {event.type}")

    among = listeners.Subscriptions()
    listeners.Subscription(one).join(among)
    listeners.Subscription(lambda event: told.append(f"two {event.type}")).join(among)
    among.publish(first, None)
    assert among.pending() is None
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
        assert not running.done()  # it waits as long as no deadline was set
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
