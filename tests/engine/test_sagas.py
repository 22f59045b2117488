"""Compensations: what a failed or cancelled run had done is undone once, in reverse order; a retry does it all again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, current_step, step, stores
from perdure.errors import CompensationFailed, DuplicateStep, PersistenceError, RunCancelled, RunDiverged, StepFailed, StepTimeout
from perdure.store import Store
from tests.engine.worlds import World, world
from tests.patience import turns

STEPS = ("flight", "hotel", "car")


class Travel:
    """A world of bookings. Bookings are known by idempotency key, as a provider would know them."""

    def __init__(self) -> None:
        self.booked: dict[str, str] = {}
        self.said: list[str] = []
        self.fails_at: str | None = None
        self.error: Exception = ValueError("sold out")
        self.hangs_at: str | None = None
        self.is_hanging = asyncio.Event()
        self.keys: list[str] = []

    async def book(self, what: str) -> str:
        self.keys.append(current_step().idempotency_key)
        if what == self.fails_at:
            raise self.error
        self.booked[what] = f"{what}-number"
        self.said.append(f"book {what}")
        if what == self.hangs_at:
            self.is_hanging.set()
            await asyncio.sleep(3600)
        return f"{what}-number"

    def cancel(self, what: str) -> Callable[[str | None], Any]:
        async def undo(number: str | None) -> None:
            assert number in (None, f"{what}-number")
            self.booked.pop(what, None)
            self.said.append(f"undo {what}" + ("" if number else " in doubt"))

        return undo

    def workflow(self) -> Workflow[[], str]:
        async def trip(ctx: Context) -> str:
            for what in STEPS:
                await ctx.step(f"book {what}", self.book, what, compensate=self.cancel(what))
            return "the trip is booked"

        return Workflow("trip", trip)


@pytest.mark.parametrize("failing", STEPS)
async def test_a_failure_undoes_every_completed_step_once_in_reverse_order_and_a_retry_books_all(failing: str) -> None:
    travel = Travel()
    trip = travel.workflow()
    travel.fails_at = failing
    done = STEPS[: STEPS.index(failing)]
    async with world(trip) as here:
        outcome = await here.runtime.run(trip, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueError)
        assert travel.said == [*(f"book {what}" for what in done), *(f"undo {what}" for what in reversed(done))]
        assert not travel.booked
        before, travel.fails_at, travel.said, travel.keys = travel.keys, None, [], []
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("the trip is booked")}
    assert travel.said == [f"book {what}" for what in STEPS]
    assert list(travel.booked) == list(STEPS)
    # A provider that knows the first booking by its key must not answer with the one that was undone.
    assert before == [f"run/book {what}" for what in STEPS[: len(done) + 1]]
    assert travel.keys == [f"run/book {what}" + ("~1" if what in done else "") for what in STEPS]


@pytest.mark.parametrize("hanging", STEPS)
async def test_a_cancel_undoes_every_step_also_the_one_in_doubt(hanging: str) -> None:
    travel = Travel()
    trip = travel.workflow()
    travel.hangs_at = hanging
    done = STEPS[: STEPS.index(hanging)]
    async with world(trip) as here:
        running = asyncio.ensure_future(here.runtime.run(trip, id="run"))
        await travel.is_hanging.wait()
        await here.runtime.cancel("run")
        outcome = await running
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        undone = [f"undo {hanging} in doubt", *(f"undo {what}" for what in reversed(done))]
        assert travel.said == [*(f"book {what}" for what in (*done, hanging)), *undone]
        assert not travel.booked
        travel.hangs_at, travel.said = None, []
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("the trip is booked")}
    assert travel.said == [f"book {what}" for what in STEPS]


async def test_a_suspended_run_compensates_nothing_until_it_is_cancelled() -> None:
    travel = Travel()

    async def trip(ctx: Context) -> None:
        await ctx.step("book flight", travel.book, "flight", compensate=travel.cancel("flight"))
        try:
            await ctx.wait_for_signal("go")
        finally:
            travel.said.append("left")

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert travel.said == ["book flight", "left"]
        await here.runtime.cancel("run")
        await here.runtime.sweep()
    assert travel.said == ["book flight", "left", "left", "undo flight"]
    assert not travel.booked


async def test_a_run_that_completes_compensates_nothing() -> None:
    travel = Travel()
    trip = travel.workflow()
    async with world(trip) as here:
        assert await here.runtime.run(trip, id="run") == Ok("the trip is booked")
    assert not [line for line in travel.said if line.startswith("undo")]


async def test_without_a_store_a_failure_is_compensated_too() -> None:
    travel = Travel()
    trip = travel.workflow()
    travel.fails_at = "car"
    with pytest.raises(ValueError, match="sold out"):
        await trip()
    assert travel.said == ["book flight", "book hotel", "undo hotel", "undo flight"]


async def test_an_err_that_is_returned_is_a_failure() -> None:
    travel = Travel()

    async def trip(ctx: Context) -> Ok[str] | Err[str]:
        await ctx.step("book flight", travel.book, "flight", compensate=travel.cancel("flight"))
        return Err("changed my mind")

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Err("changed my mind")
    assert travel.said == ["book flight", "undo flight"]


@pytest.mark.parametrize("in_doubt", [True, False])
async def test_a_step_that_timed_out_is_in_doubt_and_one_that_raised_is_not(in_doubt: bool) -> None:
    travel = Travel()
    travel.hangs_at = "flight" if in_doubt else None
    travel.fails_at = None if in_doubt else "flight"

    async def trip(ctx: Context) -> None:
        await ctx.step("book flight", travel.book, "flight", timeout=0.01, compensate=travel.cancel("flight"))

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepTimeout if in_doubt else ValueError)
    assert travel.said == (["book flight", "undo flight in doubt"] if in_doubt else [])


async def test_an_at_most_once_step_of_unknown_outcome_is_in_doubt() -> None:
    travel = Travel()
    travel.hangs_at = "flight"

    async def trip(ctx: Context) -> None:
        await ctx.step("book flight", travel.book, "flight", at_most_once=True, compensate=travel.cancel("flight"))

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await travel.is_hanging.wait()
        driving.cancel()  # the process gives it back in the middle of the step
        await asyncio.wait([driving])
        outcome = (await here.later("1m"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepFailed)
    assert travel.said == ["book flight", "undo flight in doubt"]


async def test_branches_that_were_under_way_are_undone_too() -> None:
    travel = Travel()
    travel.hangs_at, travel.fails_at = "hotel", "car"

    async def trip(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.step("book hotel", travel.book, "hotel", compensate=travel.cancel("hotel")))
            await travel.is_hanging.wait()
            await ctx.step("book car", travel.book, "car", compensate=travel.cancel("car"))

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
    assert travel.said == ["book hotel", "undo hotel in doubt"]


async def test_tasks_that_the_function_left_behind_are_ended_before_anything_is_undone() -> None:
    travel = Travel()
    travel.hangs_at = "hotel"

    async def trip(ctx: Context) -> None:
        behind = asyncio.create_task(ctx.step("book hotel", travel.book, "hotel", compensate=travel.cancel("hotel")))
        await travel.is_hanging.wait()
        assert not behind.done()
        raise RuntimeError("of the function's own")

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RuntimeError)
    assert travel.said == ["book hotel", "undo hotel in doubt"]


async def test_nothing_is_undone_while_a_step_that_was_left_behind_still_runs() -> None:
    said: list[str] = []
    has_begun = asyncio.Event()

    async def book() -> None:
        has_begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await turns()  # it may still book in its clean-up
            said.append("the step has ended")

    async def trip(ctx: Context) -> None:
        behind = asyncio.create_task(ctx.step(book, compensate=lambda _: said.append("undone")))
        await has_begun.wait()
        assert not behind.done()
        raise ValueError("sold out")

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
    assert said == ["the step has ended", "undone"]


async def test_compensations_of_a_map_run_in_reverse_order() -> None:
    travel = Travel()

    async def undo(number: str | None) -> None:
        travel.said.append(f"undo {number}")

    async def trip(ctx: Context) -> None:
        await ctx.map("book", travel.book, STEPS, concurrency=1, compensate=undo)
        raise ValueError("no money")

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
    assert travel.said[-3:] == ["undo car-number", "undo hotel-number", "undo flight-number"]


async def test_a_compensation_may_be_a_plain_function_with_retries_of_its_own() -> None:
    travel = Travel()
    travel.fails_at = "hotel"
    attempts = []

    @step(retry=Retry(attempts=2, wait_initial=0, wait_jitter=0))
    def undo(number: str | None) -> None:
        attempts.append(number)
        if len(attempts) == 1:
            raise OSError("not now")

    async def trip(ctx: Context) -> None:
        await ctx.step("book flight", travel.book, "flight", compensate=undo)
        await ctx.step("book hotel", travel.book, "hotel", compensate=undo)

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueError)
    assert attempts == ["flight-number"] * 2


@pytest.mark.parametrize("by", ["failure", "cancel"])
async def test_a_compensation_that_fails_is_reported_with_the_error_and_the_others_run(by: str) -> None:
    travel = Travel()

    async def fail(number: str | None) -> None:
        raise OSError("the hotel does not answer")

    async def trip(ctx: Context) -> None:
        await ctx.step("book flight", travel.book, "flight", compensate=travel.cancel("flight"))
        await ctx.step("book hotel", travel.book, "hotel", compensate=fail)
        await ctx.wait_for_signal("go")
        raise ValueError("sold out")

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await (here.runtime.cancel("run") if by == "cancel" else here.runtime.signal("run", "go"))
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, CompensationFailed)
        assert "book hotel" in str(outcome.error)
        assert "the hotel does not answer" in str(outcome.error)
        assert isinstance(outcome.error.__cause__, ValueError if by == "failure" else RunCancelled)
        run = await here.runtime.get("run")
        assert run is not None
        assert await run.status() == "failed"
        stored = await run.outcome()
        assert isinstance(stored, Err)
        assert str(stored.error) == str(outcome.error)
        assert travel.booked == {"hotel": "hotel-number"}
        # What could not be undone counts as done: a retry must not book it a second time.
        travel.said.clear()
        await here.runtime.retry("run")
        await here.runtime.sweep()
    assert travel.said == (["book flight"] if by == "cancel" else ["book flight", "undo flight"])


async def crash_at(number: int, trip: Workflow[[], str], *, is_after: bool, cancels: bool) -> tuple[bool, World]:
    """Drive the run until its store has been called so often, let that process die there, and let another one go on."""
    store, calls = stores.memory(), 0

    class Dying:
        def __getattr__(self, name: str) -> Any:
            verb = getattr(store, name)
            if name not in ("create", "claim", "acquire", "record", "suspend", "finish", "release", "inbox", "cancel", "get"):
                return verb

            async def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls < number:
                    return await verb(*args, **kwargs)
                if calls == number and is_after:
                    await verb(*args, **kwargs)
                raise PersistenceError("this process", "is dead")

            return call

    dying: Store = Dying()
    async with world(trip, store=dying) as here:
        try:
            await here.runtime.run(trip, id="run")
            if cancels:
                await here.runtime.cancel("run")
                await here.runtime.sweep()
        except PersistenceError:
            pass
        clock = here.clock
    clock.advance("1h")  # its lease ends
    runtime = Runtime(store, [trip], clock=clock, concurrency=0, unload_grace=0)
    return calls >= number, World(runtime, clock)


def waiting_trip(travel: Travel, *, waits: bool) -> Workflow[[], str]:
    async def trip(ctx: Context) -> str:
        for what in STEPS[:2]:
            await ctx.step(f"book {what}", travel.book, what, compensate=travel.cancel(what))
        if waits:
            await ctx.wait_for_signal("go")
        await ctx.step("book car", travel.book, "car", compensate=travel.cancel("car"))
        return "the trip is booked"

    return Workflow("trip", trip)


def poor_trip(travel: Travel, names: dict[str, str]) -> Workflow[[], str]:
    async def trip(ctx: Context) -> str:
        await ctx.step(names["flight"], travel.book, "flight", compensate=travel.cancel("flight"))
        await ctx.step("book hotel", travel.book, "hotel", compensate=travel.cancel("hotel"))
        raise ValueError("no money")

    return Workflow("trip", trip)


@pytest.mark.parametrize("by", ["failure", "cancel"])
@pytest.mark.parametrize("is_after", [False, True])
async def test_a_crash_at_any_store_call_undoes_everything_once_and_a_retry_is_as_if_nothing_had_happened(
    by: str, is_after: bool
) -> None:
    for number in range(1, 100):
        travel = Travel()
        flow = waiting_trip(travel, waits=by == "cancel")
        travel.fails_at = "car"
        crashed, here = await crash_at(number, flow, is_after=is_after, cancels=by == "cancel")
        if await here.runtime.get("run") is None:
            await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        run = await here.runtime.get("run")
        assert run is not None
        if by == "cancel" and not (await run.snapshot()).execution.completed_at:
            await here.runtime.cancel("run")
            await here.runtime.sweep()
        assert await run.status() == ("failed" if by == "failure" else "cancelled"), number
        assert not travel.booked, number
        undone = [line.removesuffix(" in doubt") for line in travel.said if line.startswith("undo")]
        assert [line for at, line in enumerate(undone) if line not in undone[:at]] == ["undo hotel", "undo flight"], number
        assert len(undone) <= 3, (number, travel.said)  # at most the one in flight at the crash runs again
        travel.fails_at, travel.said = None, []
        await here.runtime.retry("run")
        await here.runtime.sweep()
        if by == "cancel":
            await here.runtime.signal("run", "go")
            await here.runtime.sweep()
        assert await run == "the trip is booked"
        assert [line for at, line in enumerate(travel.said) if line not in travel.said[:at]] == [f"book {what}" for what in STEPS]
        await here.runtime.close()
        if not crashed:
            print(f"{number - 1} crash points")
            return
    pytest.fail("there were more calls than were tried")


async def test_a_step_that_was_renamed_while_its_run_is_undone_stops_the_run_before_anything_is_done_twice() -> None:
    stopped = 0
    for number in range(1, 100):
        travel = Travel()
        names = {"flight": "book flight"}
        flow = poor_trip(travel, names)
        crashed, here = await crash_at(number, flow, is_after=True, cancels=False)
        recorded = await here.keys("run")
        names["flight"], before = "reserve flight", list(travel.said)
        outcome = (await here.runtime.sweep()).get("run")
        if "book flight" in recorded and outcome is not None:
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, RunDiverged)
            assert travel.said == before
            names["flight"] = "book flight"
            assert isinstance((await here.later("1h"))["run"], Err)
            assert not travel.booked
            stopped += "%compensate/book hotel" in recorded
        await here.runtime.close()
        if not crashed:
            break
    assert stopped, "no crash fell between two compensations"


@pytest.mark.parametrize("is_retried", [False, True])
async def test_a_fork_does_not_count_as_done_what_was_undone(is_retried: bool) -> None:
    travel = Travel()
    trip = travel.workflow()
    travel.fails_at = "car"
    async with world(trip) as here:
        await here.runtime.run(trip, id="run")
        travel.fails_at = None
        if is_retried:
            await here.runtime.retry("run")
            await here.runtime.sweep()
        travel.said, travel.booked = [], {}
        await here.runtime.fork("run", from_step="book car", id="fork")
        assert (await here.runtime.sweep())["fork"] == Ok("the trip is booked")
    assert travel.said == [f"book {what}" for what in STEPS]


async def test_a_snapshot_of_an_undone_run_is_retried_like_the_run() -> None:
    travel = Travel()
    trip = travel.workflow()
    travel.fails_at = "car"
    async with world(trip) as here:
        await here.runtime.run(trip, id="run")
        run = await here.runtime.get("run")
        assert run is not None
        snapshot = await run.snapshot()
    travel.fails_at, travel.said, before, travel.keys = None, [], travel.keys, []
    outcome = await trip.run(id="run", store=stores.memory(), snapshot=snapshot, retry_failed=True)
    assert outcome == Ok("the trip is booked")
    assert travel.said == [f"book {what}" for what in STEPS]
    assert before == ["run/book flight", "run/book hotel", "run/book car"]
    assert travel.keys == ["run/book flight~1", "run/book hotel~1", "run/book car"]


async def test_a_fork_of_a_cancelled_run_is_not_cancelled() -> None:
    travel = Travel()

    async def trip(ctx: Context) -> str:
        try:
            return str(await ctx.wait_for_signal("go"))
        finally:
            await ctx.step("tidy", travel.book, "tidy")

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        await here.runtime.fork("run", from_step="tidy", id="fork")
        await here.runtime.signal("fork", "go", "gone")
        assert (await here.runtime.sweep())["fork"] == Ok("gone")


async def test_the_same_key_twice_is_refused_and_the_first_is_undone() -> None:
    travel = Travel()

    async def trip(ctx: Context) -> None:
        await ctx.step("book", travel.book, "flight", compensate=travel.cancel("flight"))
        await ctx.step("book", travel.book, "hotel", compensate=travel.cancel("hotel"))

    flow = Workflow("trip", trip)
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DuplicateStep)
    assert travel.said == ["book flight", "undo flight"]


@pytest.mark.parametrize("compensate", [1, "undo", None])
async def test_what_is_no_function_is_refused_as_a_compensation(compensate: Any) -> None:
    async def trip(ctx: Context) -> None:
        await ctx.step("book", asyncio.sleep, 0, compensate=compensate)

    flow = Workflow("trip", trip)
    if compensate is None:
        await flow()
    else:
        with pytest.raises(TypeError, match="compensate= takes a function"):
            await flow()
