"""Attempts: how often, when, how long, and what a crash, a time-out or a cancelled call leaves of them."""

from __future__ import annotations

import asyncio
import pickle
import re
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import (
    Context,
    Duration,
    Err,
    Ok,
    Outcome,
    Retry,
    RetryAfter,
    Runtime,
    Suspended,
    Workflow,
    current_step,
    stores,
    testing,
    workflow,
)
from perdure.errors import PersistenceError, StepFailed, StepTimeout
from perdure.model.durations import MAX_INSTANT, moment
from perdure.testing import ManualClock
from perdure.testing.processes import process_pool
from tests.engine.replays import raised, twice
from tests.engine.worlds import world
from tests.patience import PATIENCE, turns
from tests.simulation import LoopClock, MortalStore, simulate

EPOCH = datetime.fromisoformat("2026-01-01T00:00:00Z")


def steady(attempts: int, wait: float) -> Retry:
    """So many attempts, always the same pause."""
    return Retry(attempts, wait_initial=wait, wait_exp_base=1, wait_jitter=0, wait_max=wait)


class Flaky:
    """Fails so many times, then works; knows which attempts there were, and when."""

    def __init__(self, failures: int, error: type[Exception] = ValueError) -> None:
        self.failures = failures
        self.error = error
        self.attempts: list[int] = []
        self.at: list[float] = []

    async def __call__(self) -> str:
        self.attempts.append(current_step().attempt)
        self.at.append(asyncio.get_running_loop().time())
        if self.attempts[-1] <= self.failures:
            raise self.error("not yet")
        return "done"


async def test_the_first_attempt_that_works_is_the_last() -> None:
    flaky = Flaky(2)

    async def body(ctx: Context[Any]) -> Any:
        return await ctx.step("flaky", flaky, retry=Retry(5, wait_initial=0, wait_jitter=0))

    assert await twice(body) == ("done", "done")
    assert flaky.attempts == [1, 2, 3]


async def test_after_the_last_attempt_its_error_is_raised_without_another_pause() -> None:
    flaky = Flaky(99)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("flaky", flaky, retry=steady(3, 10))

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Suspended("run", EPOCH + timedelta(seconds=10))
        assert await here.later("10s") == {"run": Suspended("run", EPOCH + timedelta(seconds=20))}
        outcome = (await here.later("10s"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueError)
        journal = await here.runtime.store.journal("run")
        assert [(entry.phase, entry.attempt) for entry in journal] == [("open", 2), ("open", 3), ("close", 3)]
    assert flaky.attempts == [1, 2, 3]


async def test_a_pause_ends_when_it_would_have_ended_however_often_the_run_is_looked_at() -> None:
    flaky = Flaky(1)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("flaky", flaky, retry=steady(2, 3600))

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        row = await here.runtime.store.get("run")
        assert row is not None
        assert row.lease_until is None, "nobody holds a run that waits for its next attempt"
        for _ in range(5):
            assert await here.later("10m") == {}
            assert await here.runtime.resume("run") == Suspended("run", EPOCH + timedelta(hours=1))
        assert await here.later("10m") == {"run": Ok("done")}
    assert flaky.attempts == [1, 2]


async def test_a_pause_shorter_than_the_grace_stays_in_memory() -> None:
    flaky = Flaky(1)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("flaky", flaky, retry=steady(2, 0.002))

    assert await flow() == "done"
    assert await flow.run(id="short pause", store=stores.memory()) == Ok("done")


async def go_on(store: Any, flow: Workflow[[], Any]) -> Outcome[Any] | None:
    """The outcome of the run, through suspensions; None when the process died on the way."""
    runtime = Runtime(store, [flow], clock=LoopClock(), concurrency=0)
    try:
        outcome: Outcome[Any] = await runtime.run(flow, id="run")
        while isinstance(outcome, Suspended):
            await asyncio.sleep(0.5)
            outcome = await runtime.resume("run")
    except PersistenceError:
        return None
    finally:
        await runtime.close()
    return outcome


@pytest.mark.parametrize("after_commit", [False, True])
def test_no_crash_starts_the_count_or_a_pause_over(after_commit: bool) -> None:
    attempts, pause = 4, 40.0

    async def main(dies_at: int) -> Flaky:
        flaky, store = Flaky(attempts - 1), stores.memory()

        async def flow(ctx: Context[Any]) -> Any:
            return await ctx.step("flaky", flaky, retry=steady(attempts, pause))

        definition = Workflow("flow", flow)
        mortal = MortalStore(store, dies_at, after_commit=after_commit)
        outcome = await go_on(mortal, definition)
        if outcome is None:
            await asyncio.sleep(31)  # the lease expires
            outcome = await go_on(store, definition)
        assert outcome == Ok("done")
        return flaky

    for dies_at in range(1, 12):
        flaky = simulate(main(dies_at))
        assert flaky.attempts == sorted(flaky.attempts)
        assert set(flaky.attempts) == set(range(1, attempts + 1))
        assert len(flaky.attempts) <= attempts + 1, "one crash repeats one attempt at most"
        for number in range(1, attempts):
            since = flaky.at[flaky.attempts.index(number + 1)] - flaky.at[flaky.attempts.index(number)]
            assert pause <= since < pause + 40


async def test_the_count_goes_on_when_a_call_is_cancelled_in_its_pause_and_made_again() -> None:
    flaky = Flaky(2)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        retry = steady(3, 0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await ctx.step("flaky", flaky, retry=retry)
        return await ctx.step("flaky", flaky, retry=retry)

    assert await flow() == "done"
    assert flaky.attempts == [1, 2, 3]


durations = st.floats(0, 1e9)


@given(
    attempt=st.integers(1, 10**15),
    initial=durations,
    most=durations,
    base=st.floats(1, allow_infinity=True) | st.integers(1, 10**9),
    jitter=durations,
)
def test_no_pause_is_longer_than_wait_max_or_shorter_than_the_exponent_says(
    attempt: int, initial: float, most: float, base: float, jitter: float
) -> None:
    initial, most = sorted((initial, most))
    retry = Retry(wait_initial=initial, wait_max=most, wait_exp_base=base, wait_jitter=jitter)
    wait = retry.wait_after(attempt)
    assert 0 <= wait <= most
    assert wait >= initial


def test_pauses_grow_by_the_base_and_jitter_is_added() -> None:
    exact = Retry(9, wait_initial="1s", wait_exp_base=3, wait_jitter=0, wait_max="1m")
    assert [exact.wait_after(attempt) for attempt in range(1, 7)] == [1, 3, 9, 27, 60, 60]
    spread = {Retry(wait_initial=1, wait_jitter="500ms").wait_after(1) for _ in range(200)}
    assert len(spread) > 100
    assert all(1 <= wait <= 1.5 for wait in spread)


@pytest.mark.parametrize(
    ("on", "attempts"),
    [(Exception, 3), (ValueError, 3), ((KeyError, ValueError), 3), (KeyError, 1), ((), 1), (LookupError, 1)],
    ids=repr,
)
async def test_only_errors_worth_another_attempt_get_one(on: Any, attempts: int) -> None:
    flaky = Flaky(99, ValueError)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("flaky", flaky, retry=Retry(3, on=on, wait_initial=0, wait_jitter=0))

    with pytest.raises(ValueError, match="not yet"):
        await flow()
    assert len(flaky.attempts) == attempts


class HttpError(Exception):
    """An error as clients raise it: what matters is in an attribute that no record has."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = threading.local()
        self.response.status = status


async def test_a_function_says_which_errors_get_another_attempt() -> None:
    statuses = [503, 503, 400, 200]
    asked: list[Exception] = []

    def is_temporary(error: Exception) -> bool:
        asked.append(error)
        return isinstance(error, HttpError) and error.response.status >= 500

    async def fetch() -> int:
        if (status := statuses.pop(0)) != 200:
            raise HttpError(status)
        return status

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step(fetch, retry=Retry(9, on=is_temporary, wait_initial=0, wait_jitter=0))

    outcome = await flow.run(id="asks a function", store=stores.memory())
    assert isinstance(outcome, Err)
    assert str(outcome.error) == "status 400"
    assert [str(error) for error in asked] == ["status 503", "status 503", "status 400"]
    assert statuses == [200]


async def test_the_function_is_not_asked_about_the_last_attempt() -> None:
    flaky, asked = Flaky(99), list[Exception]()

    def is_temporary(error: Exception) -> bool:
        asked.append(error)
        return True

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("flaky", flaky, retry=Retry(2, on=is_temporary, wait_initial=0, wait_jitter=0))

    with pytest.raises(ValueError, match="not yet"):
        await flow()
    assert (len(asked), len(flaky.attempts)) == (1, 2)


@pytest.mark.parametrize("is_transaction", [False, True], ids=["step", "transaction"])
async def test_an_error_about_which_the_function_itself_fails_is_not_tried_again(
    is_transaction: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[object] = []

    async def fail(*_: object) -> None:
        calls.append(None)
        raise HttpError(503)

    def look(error: Exception) -> Any:
        return error.reponse  # type: ignore[attr-defined]  # a typing error

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        call: Any = ctx.transaction if is_transaction else ctx.step
        await call(fail, retry=Retry(3, on=look))

    outcome = await flow.run(id="run", store=f"sqlite:///{tmp_path}/runs.db")
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, HttpError)
    reason = "the function of Retry(on=) raised AttributeError: 'HttpError' object has no attribute 'reponse'"
    assert f"not tried again, because {reason}" in outcome.error.__notes__
    assert len(calls) == 1
    (logged,) = [record for record in caplog.records if "Retry" in record.getMessage()]
    assert logged.levelname == "WARNING"
    assert reason.partition(" raised ")[2] in logged.getMessage()
    assert "'fail' of run 'run' (flow)" in logged.getMessage()
    assert logged.exc_info is not None


class Limited:
    """Asks once, or more often, to be tried again after a time of its own."""

    def __init__(self, wait: Duration, times: int = 1) -> None:
        self.wait = wait
        self.times = times
        self.attempts: list[int] = []

    async def __call__(self, *_: object) -> str:
        self.attempts.append(current_step().attempt)
        if len(self.attempts) <= self.times:
            try:
                raise HttpError(429)
            except HttpError as error:
                raise RetryAfter(self.wait) from error
        return "done"


@pytest.mark.parametrize("wait", ["3h", 10800, timedelta(hours=3)], ids=repr)
@pytest.mark.parametrize("on", [Exception, KeyError, lambda _: False], ids=["all", "class", "function"])
async def test_an_attempt_may_say_when_the_next_one_is(wait: Duration, on: Any) -> None:
    limited = Limited(wait)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("limited", limited, retry=Retry(2, on=on, wait_initial="1s", wait_max="1m"))

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Suspended("run", EPOCH + timedelta(hours=3))
        assert await here.later("2h") == {}
        assert limited.attempts == [1]
        assert await here.later("1h") == {"run": Ok("done")}
    assert limited.attempts == [1, 2]


@pytest.mark.parametrize("attempts", [None, 1, 3])
async def test_an_attempt_that_asks_for_another_counts_and_after_the_last_it_is_a_failure(attempts: int | None) -> None:
    limited = Limited(0, times=99)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("limited", limited, retry=None if attempts is None else Retry(attempts))

    outcome = await flow.run(id="run", store=stores.memory())
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RetryAfter)
    assert outcome.error.seconds == 0
    assert str(outcome.error.__cause__) == "status 429"
    assert limited.attempts == list(range(1, (attempts or 1) + 1))


async def test_a_pause_beyond_the_last_day_ends_on_that_day() -> None:
    limited = Limited(MAX_INSTANT / 10**6)

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("limited", limited, retry=2)

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Suspended("run", moment(MAX_INSTANT))


async def test_the_next_attempt_that_was_asked_for_survives_a_restart(tmp_path: Path) -> None:
    limited, clock, path = Limited("3h"), ManualClock(), f"sqlite:///{tmp_path}/runs.db"

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("limited", limited, retry=Retry(2, wait_max="1m"))

    for wait, outcomes in ((None, {}), ("2h", {}), ("1h", {"run": Ok("done")})):
        runtime = Runtime(path, [flow], clock=clock, concurrency=0, unload_grace=0)
        try:
            if wait is None:
                await runtime.run(flow, id="run")
            else:
                clock.advance(wait)
            assert await runtime.sweep() == outcomes
        finally:
            await runtime.close()
    assert limited.attempts == [1, 2]


@pytest.fixture
def pool() -> Iterator[Executor]:
    with process_pool(1) as made:
        yield made


async def test_the_pause_that_was_asked_for_passes_in_virtual_time_wherever_the_step_runs(pool: Executor, tmp_path: Path) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        retry = Retry(3, wait_max="1m")
        return [
            await ctx.step(ask_for_more, retry=retry),
            await ctx.step(ask_for_more, retry=retry, executor=pool, key="pool"),
            await ctx.map(ask_again, [1, 2], retry=retry),
            await ctx.transaction(ask_again, retry=retry, key="transaction"),
        ]

    async with testing.runtime(flow, store=f"sqlite:///{tmp_path}/runs.db") as rt:
        before = rt.now()
        assert await rt.run(flow, id="run") == Ok([2, 2, [2, 2], 2])
        assert rt.now() - before == timedelta(hours=4)


async def ask_again(*_: object) -> int:
    return ask_for_more()


def ask_for_more() -> int:
    if current_step().attempt == 1:
        raise RetryAfter("1h")
    return current_step().attempt


@pytest.mark.parametrize("wait", [-1, "soon", None, True, float("nan")], ids=repr)
def test_a_pause_that_cannot_be_is_refused_where_it_is_asked_for(wait: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"RetryAfter\(wait\)"):
        RetryAfter(wait)


def test_an_error_that_asks_for_another_attempt_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(RetryAfter("1m30s")))  # noqa: S301 - its own bytes
    assert (type(error), error.seconds) == (RetryAfter, 90)


@pytest.mark.parametrize(
    "parameters",
    [
        {"attempts": 0},
        {"attempts": -1},
        {"attempts": True},
        {"attempts": 2.0},
        {"attempts": "3"},
        {"on": KeyboardInterrupt},
        {"on": BaseException},
        {"on": ValueError("x")},
        {"on": (ValueError, "OSError")},
        {"on": [ValueError]},
        {"on": (ValueError, bool)},
        {"on": asyncio.sleep},
        {"on": Flaky(0)},
        {"wait_initial": -1},
        {"wait_max": float("nan")},
        {"wait_max": float("inf")},
        {"wait_jitter": "soon"},
        {"wait_jitter": None},
        {"wait_exp_base": 0.5},
        {"wait_exp_base": float("nan")},
    ],
    ids=lambda parameters: re.sub(r" at 0x\w+", "", repr(parameters)),
)
def test_a_retry_that_makes_no_sense_is_refused_where_it_is_written(parameters: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Retry(**parameters)


async def test_each_attempt_has_the_whole_time_and_a_time_out_is_worth_another() -> None:
    tried: list[int] = []

    async def slow_at_first() -> str:
        tried.append(current_step().attempt)
        if len(tried) < 3:
            await asyncio.sleep(3600)
        return "done"

    async def body(ctx: Context[Any]) -> Any:
        options = Retry(3, on=TimeoutError, wait_initial=0, wait_jitter=0)
        return await ctx.step(slow_at_first, timeout=0.002, retry=options)

    assert await twice(body) == ("done", "done")
    assert tried == [1, 2, 3]


async def test_a_functions_own_timeout_error_is_not_taken_for_ours() -> None:
    async def own() -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(1)

    def plain() -> None:
        raise TimeoutError("the socket's")

    async def body(ctx: Context[Any]) -> Any:
        errors = [await raised(ctx.step(own, timeout="1h")), await raised(ctx.step(plain, timeout="1h"))]
        return [(type(error), str(error)) for error in errors]

    expected = [(TimeoutError, ""), (TimeoutError, "the socket's")]
    assert await twice(body) == (expected, expected)


# Where a time-out is short: on a busy machine more attempts than one may come too late.
AT_ONCE_AND_AGAIN = Retry(50, wait_initial=0, wait_jitter=0)


@asynccontextmanager
async def threaded(flow: Workflow[Any, Any]) -> AsyncIterator[Runtime]:
    """A runtime with threads enough that none waits for another."""
    runtime = Runtime(stores.memory(), [flow], clock=ManualClock(), unload_grace=0, concurrency=4)
    try:
        yield runtime
    finally:
        await runtime.close()


class Overlap:
    """A plain function whose first call blocks until it is let go; knows how many ran at once."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.running = 0
        self.most = 0
        self.calls = 0
        self.lock = threading.Lock()

    def __call__(self) -> str:
        with self.lock:
            self.calls += 1
            call = self.calls
            self.running += 1
            self.most = max(self.most, self.running)
        if call == 1:
            self.let_go.wait(PATIENCE)
        with self.lock:
            self.running -= 1
        return f"call {call}"


async def test_the_next_attempt_waits_for_a_thread_that_is_still_at_the_last() -> None:
    overlap = Overlap()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("overlap", overlap, timeout=0.05, retry=AT_ONCE_AND_AGAIN)

    async with threaded(flow) as runtime:
        running = asyncio.create_task(runtime.run(flow, id="run"))
        while not (journal := await runtime.store.journal("run")):
            await runtime.store.watch(0.01)
        await turns()
        assert not running.done(), "the run must not leave memory while its thread is at work"
        assert [(entry.phase, entry.attempt) for entry in journal] == [("open", 2)], "the time-out is recorded at once"
        assert overlap.calls == 1
        overlap.let_go.set()
        assert await running == Ok(f"call {overlap.calls}")
    assert overlap.calls >= 2
    assert overlap.most == 1


async def test_an_abandoned_thread_is_not_waited_for() -> None:
    overlap = Overlap()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("overlap", overlap, timeout=0.05, retry=AT_ONCE_AND_AGAIN, abandon=True)

    async with threaded(flow) as runtime:
        try:
            outcome = await runtime.run(flow, id="run")
        finally:
            overlap.let_go.set()
    assert isinstance(outcome, Ok)
    assert outcome != Ok("call 1")
    assert overlap.most >= 2


async def test_the_time_of_an_attempt_counts_from_the_call_and_not_while_it_waits_for_a_thread() -> None:
    attempts: list[int] = []
    cases: list[dict[str, Any]] = [{}, {"retry": 2}, {"at_most_once": True}]

    def quick() -> str:
        attempts.append(current_step().attempt)
        return "in time"

    async def run(options: dict[str, Any]) -> None:
        is_over = threading.Event()

        async def body(ctx: Context[Any]) -> Any:
            held = asyncio.create_task(ctx.step("hold the only thread", is_over.wait, PATIENCE))
            waiting = [asyncio.create_task(ctx.step(f"quick {n}", quick, timeout=0.4, **options)) for n in range(3)]
            await asyncio.sleep(0.6)
            is_over.set()
            return [await held, *[await each for each in waiting]]

        flow = Workflow("flow", body)
        async with Runtime(stores.memory(), [flow], concurrency=1) as runtime:
            assert await runtime.run(flow, id="run") == Ok([True] + ["in time"] * 3)

    await asyncio.gather(*(run(options) for options in cases))
    assert attempts == [1] * 9


async def test_a_plain_function_that_takes_too_long_times_out_also_after_it_waited_for_a_thread() -> None:
    is_over, let_go = threading.Event(), threading.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        held = asyncio.create_task(ctx.step("hold the only thread", is_over.wait, 60))
        waiting = asyncio.create_task(ctx.step("slow", let_go.wait, 60, timeout=0.1))
        await asyncio.sleep(0.2)
        is_over.set()
        await held
        with pytest.raises(StepTimeout):
            await waiting
        return "timed out"

    async with Runtime(stores.memory(), [flow], concurrency=1) as runtime:
        assert await runtime.run(flow, id="run") == Ok("timed out")
        let_go.set()


async def test_the_last_attempt_of_a_plain_function_times_out_without_waiting_for_its_thread() -> None:
    overlap = Overlap()

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step("overlap", overlap, timeout=0.05)

    async with threaded(flow) as runtime:
        try:
            outcome = await runtime.run(flow, id="run")
        finally:
            overlap.let_go.set()
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepTimeout)


class Effect:
    """Something that must not happen twice, and takes a while."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds
        self.happened = 0
        self.has_begun = asyncio.Event()

    async def __call__(self) -> str:
        self.happened += 1
        self.has_begun.set()
        await asyncio.sleep(self.seconds)
        return "paid"


def pay_once(effect: Effect) -> Workflow[[], Any]:
    async def flow(ctx: Context[Any]) -> Any:
        try:
            return await ctx.step("pay", effect, at_most_once=True)
        finally:
            await ctx.step("report", asyncio.sleep, 0)

    return Workflow("pay_once", flow)


async def test_at_most_once_records_its_intent_and_then_its_result() -> None:
    effect = Effect()
    flow = pay_once(effect)
    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok("paid")
        journal = await here.runtime.store.journal("run")
        assert [(entry.key, entry.phase) for entry in journal] == [("pay", "open"), ("pay", "close"), ("report", "close")]
    assert effect.happened == 1


@pytest.mark.parametrize("after_commit", [False, True])
def test_at_most_once_holds_wherever_the_process_dies(after_commit: bool) -> None:
    # The writes are: create, intent, result, and the end of the run.
    async def main(dies_at: int) -> tuple[Outcome[Any] | None, Effect, int]:
        effect, store = Effect(), stores.memory()
        flow = pay_once(effect)
        assert await go_on(MortalStore(store, dies_at, after_commit=after_commit), flow) is None
        happened = effect.happened
        await asyncio.sleep(31)
        return await go_on(store, flow), effect, happened

    for dies_at in (0, 1, 2, 3):
        outcome, effect, happened = simulate(main(dies_at))
        assert happened == (dies_at >= 2), "the function runs only when its intent is acknowledged"
        knows = dies_at + after_commit >= 3 or dies_at + after_commit <= 1
        if knows:
            assert outcome == Ok("paid")
            assert effect.happened == 1
        else:
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, StepFailed)
            assert "OutcomeUnknown" in str(outcome.error)
            assert "find out what it did" in str(outcome.error)
            assert effect.happened == happened, "it was not called again"


async def test_at_most_once_holds_when_the_call_is_cancelled_and_made_again() -> None:
    effect = Effect(3600)

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        effect.has_begun.clear()
        task = asyncio.create_task(ctx.step("pay", effect, at_most_once=True))
        await effect.has_begun.wait()
        task.cancel()
        await asyncio.wait([task])
        return str(await raised(ctx.step("pay", effect, at_most_once=True)))

    assert "OutcomeUnknown" in await flow()
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Ok)
        assert "OutcomeUnknown" in outcome.value
        assert await here.keys("run") == ["pay"]
    assert effect.happened == 2, "once in each of the two runs"


async def test_at_most_once_may_be_caught_like_any_failure_and_is_recorded_as_such() -> None:
    effect = Effect()

    async def flow(ctx: Context[Any]) -> Any:
        try:
            await ctx.step("pay", effect, at_most_once=True)
        except StepFailed as error:
            await ctx.sleep("ask somebody", "1h")
            return error.error
        return None

    definition, clock = Workflow("flow", flow), ManualClock()
    store = stores.memory()
    mortal: Any = MortalStore(store, 2, after_commit=False)
    with pytest.raises(PersistenceError):
        await Runtime(mortal, [definition], clock=clock, concurrency=0).run(definition, id="run")
    clock.advance("31s")
    runtime = Runtime(store, [definition], clock=clock, concurrency=0)
    assert isinstance((await runtime.sweep())["run"], Suspended)
    clock.advance("1h")
    assert await runtime.sweep() == {"run": Ok("OutcomeUnknown")}
    assert effect.happened == 1
