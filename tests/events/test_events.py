"""Exactly which events a listener gets, for every way in which a run and its steps can go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, WaitingFor, Workflow, events, stores, workflow
from perdure.errors import (
    LeaseLost,
    PerdureWarning,
    PersistenceError,
    RunCancelled,
    RunDead,
    SnapshotCorrupt,
    StepFailed,
    StepTimeout,
)
from perdure.state import StepResult
from perdure.store import FullStore
from perdure.testing.clock import EPOCH
from perdure.worker.active_runs import active_runs
from tests.engine.replays import spoil
from tests.engine.worlds import World, world
from tests.events.listening import BEGUN, Flaky, Heard, fails, hangs, reports, skipped, step, work
from tests.patience import turns
from tests.simulation import HeldBack, MortalStore

DISK_FULL: Final = OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def no_listener_raises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not reports(caplog)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FullStore]:
    """A fresh store of each kind."""
    opened: FullStore
    if request.param == "memory":
        opened = stores.memory()
    else:
        opened = await asyncio.to_thread(stores.sqlite, tmp_path / "app.db")
    yield opened
    await opened.close()


async def test_a_run_of_two_steps(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any], number: int) -> int:
        first: int = await ctx.step("one", work, number, key="a")
        second: int = await ctx.step("two", work, first + 1, key="b")
        return second

    async with world(flow, store=store, on_event=heard) as here:
        assert await here.runtime.run(flow, 1, id="run") == Ok(2)
    assert heard.said == [*BEGUN, *step("a"), *step("b"), "run_complete"]
    assert {(event.run_id, event.workflow, event.at) for event in heard.events} == {("run", "flow", EPOCH)}
    row = await store.get("run")
    assert row is not None
    assert heard.one(events.LeaseChangedEvent).epoch == row.epoch
    start, ended = heard.one(events.RunStartEvent), heard.one(events.RunCompleteEvent)
    assert (start.attempt, start.is_resumed, start.is_terminal) == (1, False, False)
    assert (ended.result, ended.is_terminal) == (2, True)
    assert [event.seq for event in heard.events if isinstance(event, events.PersistedEvent)] == [1, 2]
    about = [
        (event.key, event.name, event.attempt, event.started_at, event.ended_at, event.result)
        for event in heard.events
        if isinstance(event, events.StepSuccessEvent)
    ]
    assert about == [("a", "one", 1, EPOCH, EPOCH, 1), ("b", "two", 1, EPOCH, EPOCH, 2)]
    completed = [event for event in heard.events if isinstance(event, events.StepCompleteEvent)]
    assert [event.result for event in completed] == [StepResult(ok=True, value=1), StepResult(ok=True, value=2)]
    assert not any(event.is_replayed for event in completed)


async def test_a_step_that_raises(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> int:
        return await ctx.step("a", fails)

    async with world(flow, store=store, on_event=heard) as here:
        outcome = await here.runtime.run(flow, id="run")
    assert isinstance(outcome, Err)
    assert heard.said == [*BEGUN, "step_start a", "persist", "step_error a", "step_complete a", "run_error"]
    assert repr(heard.one(events.StepErrorEvent).error) == "ValueError('not today')"
    assert repr(heard.one(events.RunErrorEvent).error) == repr(outcome.error)
    result = heard.one(events.StepCompleteEvent).result
    assert (result.ok, result.error, result.cause["message"]) == (False, "UNEXPECTED_ERROR", "not today")


async def test_a_step_that_returns_err(store: FullStore) -> None:
    heard = Heard()

    async def find() -> Err[str]:
        return Err("NOT_FOUND")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", find)

    async with world(flow, store=store, on_event=heard) as here:
        assert await here.runtime.run(flow, id="run") == Err("NOT_FOUND")
    assert heard.said == [*BEGUN, "step_start a", "persist", "step_error a", "step_complete a", "run_error"]
    error = heard.one(events.StepErrorEvent).error
    assert isinstance(error, StepFailed)
    assert (error.error, heard.one(events.StepCompleteEvent).result.error) == ("NOT_FOUND", "NOT_FOUND")
    assert heard.one(events.RunErrorEvent).error == "NOT_FOUND"


async def test_a_retry_that_waits_in_memory(store: FullStore) -> None:
    heard = Heard()
    flaky = Flaky(1)

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step("a", flaky, retry=Retry(attempts=2, wait_initial="5s", wait_jitter=0))

    def listen(event: events.Event) -> None:
        heard(event)
        if isinstance(event, events.StepRetryEvent):
            here.clock.advance("5s")

    async with world(flow, store=store, on_event=listen, unload_grace="1h") as here:
        assert await here.runtime.run(flow, id="run") == Ok("at last")
    again = ["step_start a #2", "persist", "step_success a #2", "step_complete a #2"]
    assert heard.said == [*BEGUN, "step_start a", "persist", "step_retry a", *again, "run_complete"]
    retry = heard.one(events.StepRetryEvent)
    assert (str(retry.error), retry.attempt, retry.next_at) == ("0 left", 1, EPOCH + timedelta(seconds=5))


async def test_a_retry_through_a_suspension(store: FullStore) -> None:
    heard = Heard()
    flaky = Flaky(1)

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return await ctx.step("a", flaky, retry=Retry(attempts=2, wait_initial="5s", wait_jitter=0))

    async with world(flow, store=store, on_event=heard) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert heard.take() == [*BEGUN, "step_start a", "persist", "step_retry a", "run_suspended"]
        assert await here.later("5s") == {"run": Ok("at last")}
    assert heard.said == [*BEGUN, "step_start a #2", "persist", "step_success a #2", "step_complete a #2", "run_complete"]
    assert heard.one(events.RunStartEvent).is_resumed


@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_step_that_takes_too_long(store: FullStore, attempts: int) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", hangs, timeout="1ms", retry=Retry(attempts=attempts, wait_initial=0, wait_jitter=0))

    async with world(flow, store=store, on_event=heard) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
    retried = ["step_start a", "step_timeout a", "persist", "step_retry a"] if attempts == 2 else []
    number = " #2" if attempts == 2 else ""
    end = ["persist", f"step_error a{number}", f"step_complete a{number}", "run_error"]
    assert heard.said == [*BEGUN, *retried, f"step_start a{number}", f"step_timeout a{number}", *end]
    timeouts = [event for event in heard.events if isinstance(event, events.StepTimeoutEvent)]
    assert all(isinstance(event.error, StepTimeout) for event in timeouts)


async def test_a_replay_after_a_crash(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.step("a", work, "a")
        with contextlib.suppress(ValueError):
            await ctx.step("b", fails)
        return str(await ctx.step("c", work, "c"))

    mortal: Any = MortalStore(store, 3, after_commit=False)  # it dies when it records c
    async with world(flow, store=mortal, on_event=heard) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run")
    failed = ["step_start b", "persist", "step_error b", "step_complete b"]
    assert heard.take() == [*BEGUN, *step("a"), *failed, "step_start c", "run_suspended"]
    async with world(flow, store=store, on_event=heard) as here:
        here.clock.advance("31s")
        assert await here.runtime.run(flow, id="run") == Ok("c")
    assert heard.said == [*BEGUN, *skipped("a"), *skipped("b"), *step("c"), "run_complete"]
    start = heard.one(events.RunStartEvent)
    assert (start.is_resumed, start.attempt) == (True, 1)
    was = [event for event in heard.events if isinstance(event, events.StepCompleteEvent)]
    assert [(event.key, event.result.ok, event.is_replayed) for event in was] == [
        ("a", True, True),
        ("b", False, True),
        ("c", True, False),
    ]
    # When it happened, not when it was replayed.
    assert [(event.started_at, event.ended_at, event.at) for event in was[:1]] == [(EPOCH, EPOCH, EPOCH + timedelta(seconds=31))]


async def test_what_a_crash_left_unrecorded_is_told_anew(store: FullStore) -> None:
    """It died after a listener heard that the step began, and before anything was recorded."""
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        return str(await ctx.step("a", work, "a"))

    mortal: Any = MortalStore(store, 1, after_commit=False)
    async with world(flow, store=mortal, on_event=heard) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run")
    assert heard.take() == [*BEGUN, "step_start a", "run_suspended"]
    async with world(flow, store=store, on_event=heard) as here:
        here.clock.advance("31s")
        assert await here.runtime.run(flow, id="run") == Ok("a")
    start = heard.one(events.RunStartEvent)
    assert (start.is_resumed, start.attempt) == (False, 2)
    assert heard.said == [*BEGUN, *step("a"), "run_complete"]


async def test_a_suspension_that_a_signal_ends_and_a_replay_of_it(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        await ctx.step("a", work)
        answer = await ctx.wait_for_signal("go", key="wait")
        await ctx.sleep("nap", "1h")
        return answer

    async with world(flow, store=store, on_event=heard) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert heard.said == [*BEGUN, *step("a"), "persist", "run_suspended"]
        suspended = heard.one(events.RunSuspendedEvent)
        assert (suspended.wake_at, suspended.waiting_for, suspended.error) == (None, (WaitingFor("signal", "go"),), None)
        assert suspended.is_terminal
        heard.take()
        await here.runtime.signal("run", "go", {"approved": True})
        (outcome,) = (await here.runtime.sweep()).values()
        assert isinstance(outcome, Suspended)
        assert heard.said == [*BEGUN, *skipped("a"), "persist", "signal wait", "persist", "run_suspended"]
        signal = heard.one(events.SignalReceivedEvent)
        assert (signal.key, signal.name, signal.payload) == ("wait", "go", {"approved": True})
        assert heard.one(events.RunSuspendedEvent).wake_at == EPOCH + timedelta(hours=1)
        assert heard.events[-1].snapshot == await store.load("run")
        heard.take()
        assert await here.later("1h") == {"run": Ok({"approved": True})}
    # A signal that was consumed before is not published again.
    assert heard.said == [*BEGUN, *skipped("a"), "persist", "run_complete"]


async def test_a_signal_that_comes_while_the_run_is_in_memory(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.wait_for_signal("go")

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.signal("run", "go", 1)
        assert await here.runtime.resume("run") == Ok(1)
    assert heard.said == [*BEGUN, "persist", "signal go", "run_complete"]


async def test_a_wait_that_times_out_has_no_event_of_its_own(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.wait_for_signal("go", timeout="1h", default="late")

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.run(flow, id="run")
        heard.take()
        assert await here.later("1h") == {"run": Ok("late")}
    assert heard.said == [*BEGUN, "persist", "run_complete"]


async def test_a_cancelled_run(store: FullStore) -> None:
    heard = Heard()
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await hangs()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)
        await ctx.step("b", wait)

    async with world(flow, store=store, on_event=heard) as here:
        running = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await begun.wait()
        await here.runtime.cancel("run")
        outcome = await running
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunCancelled)
    assert heard.said == [*BEGUN, *step("a"), "step_start b", "persist", "persist", "run_cancelled"]
    assert heard.events[-1].is_terminal


async def test_a_cancelled_run_that_was_suspended(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)
        await ctx.sleep("nap", "1h")

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.run(flow, id="run")
        heard.take()
        await here.runtime.cancel("run")
        await here.runtime.sweep()
    assert heard.said == [*BEGUN, *skipped("a"), "persist", "run_cancelled"]


async def test_a_run_that_fails_because_another_was_cancelled_has_failed(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        raise RunCancelled("another")

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.run(flow, id="run")
    assert heard.said == [*BEGUN, "run_error"]
    assert isinstance(heard.one(events.RunErrorEvent).error, RunCancelled)


async def first_version(ctx: Context[Any]) -> None:
    await ctx.step("old", work, "old")
    await ctx.step("kept", work, 1)
    await ctx.sleep("nap", "1h")


async def second_version(ctx: Context[Any]) -> None:
    await ctx.step("kept", work, 2)
    await ctx.sleep("nap", "1h")


async def test_changed_code_and_arguments_are_warnings_and_events(store: FullStore) -> None:
    heard = Heard()
    async with world(Workflow("flow", first_version), store=store) as here:
        assert isinstance(await here.runtime.run("flow", id="run"), Suspended)
    async with world(Workflow("flow", second_version), store=store, on_event=heard) as here:
        with pytest.warns(PerdureWarning) as warned:
            assert isinstance((await here.later("1h"))["run"], Err)
    told = [text for text in heard.said if text != "persist"]  # when the end of the sleep was recorded is the store's affair
    assert told == [*BEGUN, "warning", *skipped("kept"), "warning", "lease released", "run_suspended"]
    messages = [event.message for event in heard.events if isinstance(event, events.WarningEvent)]
    assert messages == [str(warning.message) for warning in warned]
    assert ["has changed" in messages[0], "'kept'" in messages[1]] == [True, True]


@pytest.mark.parametrize("choice", ["ignore", "error"])
async def test_changes_that_are_ignored_or_errors_are_no_warnings(store: FullStore, choice: str) -> None:
    heard = Heard()
    options: Any = dict.fromkeys(("on_definition_change", "on_unknown_steps", "on_changed_arguments"), choice)
    async with world(Workflow("flow", first_version), store=store) as here:
        await here.runtime.run("flow", id="run")
    async with world(Workflow("flow", second_version, retired={"old"}, **options), store=store, on_event=heard) as here:
        await here.later("1h")
    assert "warning" not in heard.said
    assert heard.said[-1] == ("run_complete" if choice == "ignore" else "run_suspended")


async def test_a_changed_definition_of_a_snapshot_is_a_warning_and_an_event() -> None:
    heard = Heard()
    store = stores.memory()
    await Workflow("flow", first_version).run(id="one", store=store)
    snapshot = await store.load("one")
    second: Workflow[[], None] = Workflow("flow", second_version, on_changed_arguments="ignore")
    with pytest.warns(PerdureWarning, match="has changed"):
        await second.run(id="two", store=store, snapshot=snapshot, on_event=heard)
    assert heard.said[:3] == [*BEGUN, "warning"]


async def test_a_step_that_must_not_run_twice(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("a", work, at_most_once=True)

    mortal: Any = MortalStore(store, 2, after_commit=False)  # its intent is recorded, its result is not
    async with world(flow, store=mortal, on_event=heard) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run")
    assert heard.take() == [*BEGUN, "step_start a", "persist", "run_suspended"]
    async with world(flow, store=store, on_event=heard) as here:
        here.clock.advance("31s")
        await here.runtime.run(flow, id="run")
    assert heard.said == [*BEGUN, "persist", "step_error a", "step_complete a", "run_error"]
    assert "OutcomeUnknown" in str(heard.one(events.StepErrorEvent).error)


async def test_a_map(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> list[int]:
        return await ctx.map("m", work, [1, 2, 3], concurrency=1)

    async with world(flow, store=store, on_event=heard) as here:
        assert await here.runtime.run(flow, id="run") == Ok([1, 2, 3])
    assert heard.said == [*BEGUN, *step("m[0]"), *step("m[1]"), *step("m[2]"), "run_complete"]


async def test_branches_are_told_whole_and_in_the_order_in_which_the_body_gets_them(store: FullStore) -> None:
    heard = Heard()
    got: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        async def branch(key: str) -> None:
            await ctx.step("work", work, key=key)
            got.append(key)

        await asyncio.gather(*map(branch, "abcde"))

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.run(flow, id="run")
    told = [text for text in heard.said if text.startswith(("step_success", "step_complete"))]
    assert told == [f"{kind} {key}" for key in got for kind in ("step_success", "step_complete")]


async def test_a_cached_step_is_a_miss_and_then_a_hit(store: FullStore) -> None:
    heard = Heard()

    @workflow(cache={})
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("a", work, 1, key="a")

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.run(flow, id="one")
        assert heard.take() == [*BEGUN, "step_cache_miss a", *step("a"), "run_complete"]
        await here.runtime.run(flow, id="two")
    ended = ["persist", "step_success a #0", "step_complete a #0"]  # no attempt: its function was not called
    assert heard.said == [*BEGUN, "step_cache_hit a #0", *ended, "run_complete"]


async def test_a_run_that_is_dead(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("a", work, 1)

    async with world(flow, store=store, on_event=heard, max_attempts=2) as here:
        await here.runtime.start(flow, id="run")
        for _ in range(2):
            await store.claim(1, 30.0, [("flow", 1)], now=here.clock.now())
            here.clock.advance("31s")
        (outcome,) = (await here.runtime.sweep()).values()
        assert isinstance(outcome, Err)
        run = await here.runtime.get("run")
        assert run is not None
        assert heard.said == [*BEGUN, "run_error"]
        assert heard.one(events.RunStartEvent).attempt == 3
        assert isinstance(heard.one(events.RunErrorEvent).error, RunDead)
        assert heard.events[-1].snapshot == await run.snapshot()


async def test_a_run_that_cannot_be_read() -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work, 1)
        await ctx.sleep("nap", "1h")

    async with world(flow, on_event=heard) as here:
        await here.runtime.run(flow, id="run")
        heard.take()
        spoil(here, "a", b"{")
        await here.later("1h")
    assert heard.said == [*BEGUN, *skipped("a"), "lease released", "run_suspended"]
    assert isinstance(heard.one(events.RunSuspendedEvent).error, SnapshotCorrupt)
    with pytest.raises(SnapshotCorrupt):
        _ = heard.one(events.StepCompleteEvent).snapshot


async def stolen(store: FullStore, here: World) -> None:
    """Another worker gets the run, for which its lease has expired."""
    assert await store.acquire("run", 30, now=here.clock.now() + 3600 * 1_000_000) is not None


@pytest.mark.parametrize("noticed", ["at a record", "at the end", "by the heartbeat"])
async def test_a_lease_that_is_lost(store: FullStore, noticed: str) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)
        if noticed == "at a record":
            await ctx.step("b", lambda: stolen(store, here))
        elif noticed == "by the heartbeat":
            next(iter(active_runs.of(here.runtime._host))).drive.lost()
            await hangs()
        else:
            await stolen(store, here)

    async with world(flow, store=store, on_event=heard) as here:
        with pytest.raises(LeaseLost):
            await here.runtime.run(flow, id="run")
    begun = ["step_start b"] if noticed == "at a record" else []
    assert heard.said == [*BEGUN, *step("a"), *begun, "lease lost", "run_suspended"]
    assert isinstance(heard.one(events.RunSuspendedEvent).error, LeaseLost)
    assert list(heard.events[-1].snapshot.steps) == ["a"]


class Failing(MortalStore):
    """A store of which one verb fails, once."""

    def __init__(self, store: Any, verb: str) -> None:
        super().__init__(store, 0, after_commit=False)
        self._verb: str | None = verb

    def _around(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if method.__name__ == self._verb:
                self._verb = None
                raise DISK_FULL
            return await method(*args, **kwargs)

        return call


@pytest.mark.parametrize("verb", ["record", "finish"])
async def test_a_store_that_fails(store: FullStore, verb: str) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)

    failing: Any = Failing(store, verb)
    async with world(flow, store=failing, on_event=heard) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, id="run")
    told = ["step_start a"] if verb == "record" else step("a")
    assert heard.said == [*BEGUN, *told, "lease released", "run_suspended"]
    suspended = heard.one(events.RunSuspendedEvent)
    assert isinstance(suspended.error, PersistenceError)
    assert suspended.snapshot.execution.status == "running"


async def test_a_runtime_that_is_closed_gives_its_runs_back(store: FullStore) -> None:
    heard = Heard()
    begun, go = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        await go.wait()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", wait)
        await ctx.step("b", work)

    async with world(flow, store=store, on_event=heard) as here:
        running = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await begun.wait()
        closing = asyncio.ensure_future(here.runtime.close())
        await turns(3)
        go.set()
        await closing
        assert isinstance(await running, Suspended)
    # The step is recorded but did not reach the body: it is published as skipped when the run goes on.
    assert heard.said == [*BEGUN, "step_start a", "persist", "lease released", "run_suspended"]
    assert list(heard.events[-1].snapshot.steps) == ["a"]
    assert heard.events[-1].snapshot == await store.load("run")


async def test_whoever_awaits_a_run_is_cancelled(store: FullStore) -> None:
    heard = Heard()
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await hangs()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work)
        await ctx.step("b", wait)

    async with world(flow, store=store, on_event=heard) as here:
        running = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert heard.said == [*BEGUN, *step("a"), "step_start b", "lease released", "run_suspended"]
    assert heard.one(events.RunSuspendedEvent).wake_at == EPOCH
    assert heard.events[-1].snapshot == await store.load("run")


@pytest.mark.parametrize("verb", ["finish", "suspend"])
async def test_whoever_awaits_a_run_is_cancelled_when_it_was_over(store: FullStore, verb: str) -> None:
    heard = Heard()
    held: Any = HeldBack(store, verb)

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        if verb == "suspend":
            await ctx.sleep("nap", "1h")
        return "done"

    async with world(flow, store=held, on_event=heard) as here:
        running = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await held.reached.wait()
        running.cancel()
        await turns(3)
        held.may_answer.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [text for text in heard.said if text != "persist"] == [
        *BEGUN,
        {"finish": "run_complete", "suspend": "run_suspended"}[verb],
    ]
    assert heard.events[-1].snapshot == await store.load("run")


async def test_a_workflow_that_is_called_has_neither_lease_nor_store() -> None:
    heard = Heard()

    @workflow(on_event=heard)
    async def flow(ctx: Context[Any], key: str) -> Any:
        await ctx.step("a", work)
        return await ctx.step(key, {"b": work, "bad": fails, "hang": hangs}[key])

    await flow("b")
    good = ["step_start a", "step_success a", "step_complete a"]
    assert heard.take() == ["run_start", *good, "step_start b", "step_success b", "step_complete b", "run_complete"]
    with pytest.raises(ValueError, match="not today"):
        await flow("bad")
    assert heard.take() == ["run_start", *good, "step_start bad", "step_error bad", "step_complete bad", "run_error"]
    calling = asyncio.ensure_future(flow("hang"))
    await turns(10)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert heard.said == ["run_start", *good, "step_start hang", "run_cancelled"]
    assert heard.events[-1].snapshot.execution.status == "failed"


async def test_the_nearest_on_event_hears_and_the_others_do_not() -> None:
    workflows, runtimes, runs = Heard(), Heard(), Heard()

    @workflow(on_event=workflows)
    async def flow(ctx: Context[Any]) -> None: ...

    async def body(ctx: Context[Any]) -> None: ...

    def heard() -> list[bool]:
        return [bool(listener.take()) for listener in (workflows, runtimes, runs)]

    await flow()
    assert heard() == [True, False, False]
    await flow.run(on_event=runs)
    assert heard() == [False, False, True]
    await (await flow.start(on_event=runs))
    assert heard() == [False, False, True]
    await flow.run(on_event=None)
    assert heard() == [False, False, False]
    async with world(flow, Workflow("quiet", body), on_event=runtimes) as here:
        await here.runtime.run(flow, id="one")
        assert heard() == [False, True, False]
        await here.runtime.run("quiet", id="two")
        assert heard() == [False, True, False]
    async with world(flow) as here:
        await here.runtime.run(flow, id="one")
        assert heard() == [True, False, False]


async def test_on_event_that_is_no_function_is_refused() -> None:
    wrong: Any = "print"
    for refused in (lambda: workflow(on_event=wrong)(first_version), lambda: Runtime(stores.memory(), on_event=wrong)):
        with pytest.raises(TypeError, match="on_event is a function"):
            refused()


async def test_what_a_listener_does_to_a_result_changes_nothing() -> None:
    def spoiling(event: events.Event) -> None:
        match event:
            case events.StepSuccessEvent(result=result) | events.RunCompleteEvent(result=result):
                result.append("spoilt")
            case events.StepCompleteEvent(result=result):
                result.value.append("spoilt")

    @workflow(on_event=spoiling)
    async def flow(ctx: Context[Any]) -> list[str]:
        found: list[str] = await ctx.step("a", work, ["clean"])
        assert found == ["clean"]
        return found

    assert await flow() == ["clean"]
    store = stores.memory()
    assert await flow.run(id="run", store=store) == Ok(["clean"])
    snapshot = await store.load("run")
    assert snapshot is not None
    assert snapshot.steps["a"].value == ["clean"]


async def test_with_nobody_listening_no_event_is_ever_made(monkeypatch: pytest.MonkeyPatch, store: FullStore) -> None:
    made: list[str] = []

    def forbidden(kind: str, **fields: Any) -> None:
        made.append(kind)
        raise AssertionError("an event was made")

    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    assert len(kinds) > 15
    for kind in kinds:
        monkeypatch.setattr(events, kind.__name__, partial(forbidden, kind.__name__))

    @workflow(cache={}, on_changed_arguments="ignore")
    async def flow(ctx: Context[Any]) -> Any:
        await ctx.step("a", work)
        await asyncio.gather(ctx.step("b", work), ctx.step("c", work))
        with contextlib.suppress(TimeoutError):
            await ctx.step("d", hangs, timeout="1ms")
        await ctx.step("e", Flaky(1), retry=Retry(attempts=2, wait_initial=0, wait_jitter=0))
        await ctx.wait_for_signal("go")
        return await ctx.map("m", work, [1, 2])

    async with world(flow, store=store) as here:
        run = await here.runtime.start(flow, id="run")
        with run.subscribe(Heard()):
            pass  # a listener that has unsubscribed
        assert isinstance(await here.runtime.resume("run"), Suspended)
        await run.signal("go")
        assert await here.runtime.sweep() == {"run": Ok([1, 2])}
        await flow.run(resume_state=await run.resume_state(), on_unknown_steps="ignore", wait=False)
    assert made == []
    with pytest.raises(AssertionError, match="an event was made"):
        await flow.run(on_event=Heard())
    assert made[0] == "LeaseChangedEvent"


def test_every_type_has_one_class_and_every_class_its_type() -> None:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    types = [kind.type for kind in kinds if "type" in vars(kind)]
    assert sorted(types) == sorted(get_args(events.EventType))
    terminal = {kind.type for kind in kinds if kind.is_terminal}
    assert terminal == {"run_complete", "run_error", "run_suspended", "run_continued", "run_cancelled"}


async def test_an_event_shows_what_it_is_about_and_not_the_whole_run() -> None:
    heard = Heard()

    @workflow(on_event=heard)
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("a", work, "x" * 1000)

    await flow()
    assert "key='a', name='a', attempt=1" in repr(heard.one(events.StepStartEvent))
    assert max(len(repr(event)) for event in heard.events) < 420
