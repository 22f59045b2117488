"""A handled error is the same on a replay: a workflow function gets what was recorded of it, from the first run on."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perdure import (
    Context,
    Err,
    Ok,
    PerdureWarning,
    ResumeStateCollector,
    Retry,
    RetryAfter,
    RunDiverged,
    StepFailed,
    StepTraceback,
    Suspended,
    Workflow,
    stores,
    workflow,
)
from perdure.errors import CompensationFailed
from tests.engine.own_waits import own_wait
from tests.engine.replays import Body, raised, twice
from tests.engine.worlds import world

if TYPE_CHECKING:
    from collections.abc import Iterator


class Refused(Exception):
    """An error with something that cannot be stored."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        self.response = object()


async def refuse() -> None:
    raise Refused(402)


def shape(error: BaseException) -> Any:
    """What of an error this page is about."""
    return type(error), error.args, str(error), hasattr(error, "response"), getattr(error, "__notes__", None)


# Rule 1: what is recorded and then raised is rebuilt from its record.


async def step(ctx: Context[Any]) -> Any:
    return await raised(ctx.step(refuse))


async def map_item(ctx: Context[Any]) -> Any:
    async def each(_: int) -> None:
        await refuse()

    (found,) = await ctx.map("each", each, [1], on_error="collect")
    assert isinstance(found, Err)
    return found.error


async def child(ctx: Context[Any]) -> Any:
    return await raised(ctx.child(refusing))


@workflow
async def refusing(ctx: Context[Any]) -> None:
    await refuse()


@pytest.mark.parametrize("body", [step, map_item, child])
async def test_the_first_run_gets_what_a_replay_gets(body: Body) -> None:
    async def seen(ctx: Context[Any]) -> Any:
        error = await body(ctx)
        return shape(error), shape(error.__cause__)

    if body is child:
        first, second = await _twice_with_a_child(seen)
    else:
        first, second = await twice(seen)
    assert first == second
    kind, args, _, has_response, notes = first[0]
    assert (kind, args, has_response) == (Refused, (402,), False)
    assert any("response (object)" in note for note in notes)
    assert first[1][0] is StepTraceback


async def _twice_with_a_child(body: Body) -> list[Any]:
    given: list[Any] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        given.append(await body(ctx))
        await ctx.wait_for_signal("go")

    async with world(flow, refusing) as here:
        await here.runtime.run(flow, id="run")
        while len(given) < 1:
            await here.runtime.sweep()
        given.clear()
        await here.runtime.resume("run")
        await here.runtime.signal("run", "go")
        await here.runtime.sweep()
    return given[-2:] if len(given) > 1 else given * 2


async def test_a_transaction_raises_what_was_recorded(tmp_path: Path) -> None:
    store = stores.sqlite(str(tmp_path / "app.db"))

    async def body(ctx: Context[Any]) -> Any:
        async def fail(_: Any) -> None:
            await refuse()

        return shape(await raised(ctx.transaction("pay", fail)))

    first, second = await twice(body, store=store)
    assert first == second
    assert first[0] is Refused
    assert first[3] is False


async def test_the_outcome_of_a_run_is_rebuilt_for_each_who_waits_for_it() -> None:
    async with world(refusing) as here:
        outcomes = await asyncio.gather(*(here.runtime.run(refusing, id="run") for _ in range(2)))
        outcomes.append(await here.runtime.run(refusing, id="run"))
        errors = [outcome.error for outcome in outcomes if isinstance(outcome, Err)]
    assert len({id(error) for error in errors}) == 3
    assert len({repr(shape(error)) for error in errors}) == 1
    assert shape(errors[0])[:4] == (Refused, (402,), "402", False)


async def test_a_child_that_is_awaited_twice_raises_two_instances() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        started = ctx.start_child(refusing)
        first, second = await raised(started._wait()), await raised(started._wait())
        return first is second, type(first) is type(second) is Refused

    async with world(flow, refusing) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.sweep()
        assert await here.runtime.resume("run") == Ok((False, True))


async def test_only_a_bare_call_raises_the_original() -> None:
    errors: list[Exception] = []

    async def body(ctx: Context[Any]) -> None:
        errors.append(await raised(ctx.step(refuse)))

    async def longer(ctx: Context[Any]) -> None:
        await raised(ctx.step(refuse))
        errors.append(await raised(ctx.step(refuse, key="new")))

    await Workflow("flow", body)()
    collector = ResumeStateCollector()
    await Workflow("flow", body, on_event=collector.handle_event)()
    await Workflow("flow", longer, resume_state=collector.resume_state())()
    await Workflow("flow", body).run(id="run", store=stores.memory())
    assert [hasattr(error, "response") for error in errors] == [True, False, False, False]


async def test_what_ends_a_bare_run_that_somebody_records_is_rebuilt_too() -> None:
    async def body(ctx: Context[Any]) -> None:
        await ctx.step(refuse)

    collector = ResumeStateCollector()
    first = await raised(Workflow("flow", body, on_event=collector.handle_event)())
    second = await raised(Workflow("flow", body, resume_state=collector.resume_state())())
    assert shape(first)[:4] == shape(second)[:4] == (Refused, (402,), "402", False)
    assert hasattr(await raised(Workflow("flow", body)()), "response")


async def test_a_compensation_that_fails_is_told_alike() -> None:
    async def undo(_: Any) -> None:
        await refuse()

    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("charge", asyncio.sleep, 0, compensate=undo)
        raise ValueError("sold out")

    async with world(Workflow("flow", flow)) as here:
        first, second = [await here.runtime.run("flow", id="run") for _ in range(2)]
        assert isinstance(first, Err)
        assert isinstance(second, Err)
        assert isinstance(first.error, CompensationFailed)
        assert repr(first.error) == repr(second.error)
        assert repr(first.error.__cause__) == repr(second.error.__cause__) == "ValueError('sold out')"


# Rule 2: a retry sees the original.


async def test_a_retry_sees_the_original() -> None:
    seen: list[bool] = []

    def is_temporary(error: Exception) -> bool:
        seen.append(hasattr(error, "response"))
        return True

    async def body(ctx: Context[Any]) -> Any:
        return hasattr(await raised(ctx.step(refuse, retry=Retry(2, on=is_temporary, wait_jitter=0))), "response")

    async with world(Workflow("flow", body)) as here:
        assert isinstance(await here.runtime.run("flow", id="run"), Suspended)
        assert await here.later("1s") == {"run": Ok(False)}
    assert seen == [True]


async def test_retry_after_is_recorded_as_the_next_try_and_without_retry_is_a_failure() -> None:
    async def wait() -> None:
        raise RetryAfter("1h")

    async def body(ctx: Context[Any]) -> Any:
        alone = await raised(ctx.step(wait, key="alone"))
        return type(alone).__name__, type(await raised(ctx.step(wait, retry=2, key="retried"))).__name__

    flow = Workflow("flow", body)
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert (await here.later("59m")) == {}
        assert await here.later("1m") == {"run": Ok(("RetryAfter", "RetryAfter"))}


# Rule 3: attributes.


async def test_one_log_line_for_each_class_and_attribute(caplog: pytest.LogCaptureFixture) -> None:
    class Told(Exception):
        """Of another name, so that nothing was said of it before."""

    told = type("Told", (Exception,), {"__module__": __name__})
    globals()["Told"] = told

    async def fail() -> None:
        error = told("x")
        error.lock = object()
        error.page = object()
        raise error

    async def body(ctx: Context[Any]) -> None:
        for number in range(3):
            await raised(ctx.step(fail, key=f"fail {number}"))

    async with world(Workflow("flow", body)) as here:
        await here.runtime.run("flow", id="run")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.partition(", whose ")[2].partition(":")[0] for line in lines] == ["lock is not recorded", "page is not recorded"]
    assert lines[0].startswith(f"step 'fail 0' of run 'run' of workflow 'flow' failed with {__name__}.Told, whose lock")


# Rule 4: the traceback.


async def test_the_traceback_of_a_step_is_shown_on_the_first_run_and_on_a_replay() -> None:
    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(refuse))
        assert isinstance(error.__cause__, StepTraceback)
        return error.__cause__.text, "".join(traceback.format_exception(error.__cause__))

    first, second = await twice(body)
    assert first == second
    assert "in refuse\n    raise Refused(402)" in first[0]
    assert first[1] in (first[1], "")


async def test_the_outcome_shows_where_the_step_raised_and_where_the_function_did() -> None:
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(refuse)

    async with world(Workflow("flow", flow)) as here:
        for _ in range(2):
            outcome = await here.runtime.run("flow", id="run")
            assert isinstance(outcome, Err)
            cause = outcome.error.__cause__
            assert isinstance(cause, StepTraceback)
            assert cause.text.index("raise Refused(402)") < cause.text.index("await ctx.step(refuse)")
            assert cause.__cause__ is None
            assert cause.text.count("raise Refused(402)") == 1


def fail_elsewhere() -> None:
    raise ValueError("elsewhere")


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as made:
        yield made


async def test_the_traceback_of_another_process_takes_the_place_of_the_pools_own(pool: Executor) -> None:
    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step("pay", fail_elsewhere, executor=pool))
        assert isinstance(error.__cause__, StepTraceback)
        return error.__cause__.text, error.__cause__.__cause__

    first, second = await twice(body)
    assert first == second
    assert first[0].startswith("Traceback (most recent call last):")
    assert "in fail_elsewhere\n    raise ValueError" in first[0]
    assert first[0].count("Traceback (most recent call last)") == 1
    assert first[1] is None


# Rules 5 and 6: classes.


@contextmanager
def module(name: str, **classes: type) -> Iterator[ModuleType]:
    """A module that is there for a while, with these classes of its own."""
    made = sys.modules[name] = ModuleType(name)
    for key, cls in classes.items():
        cls.__module__, cls.__qualname__ = name, key
        setattr(made, key, cls)
    try:
        yield made
    finally:
        del sys.modules[name]


def new_class(base: type[Exception] = Exception) -> type[Exception]:
    return type("Declined", (base,), {})


class Shop:
    """A charge that is declined by an error of a class in another module, and what the workflow does about it."""

    def __init__(self, after: Callable[[Context[Any]], Any] | None = None) -> None:
        self.calls: list[str] = []
        self.after = after

    async def charge(self) -> None:
        self.calls.append("charge")
        raise sys.modules["shop"].Declined("no")

    async def note(self, what: str) -> None:
        self.calls.append(what)

    def flow(self, **options: Any) -> Workflow[[], Any]:
        async def body(ctx: Context[Any]) -> str:
            declined: type[Exception] = getattr(sys.modules.get("shop"), "Declined", BufferError)
            try:
                await ctx.step("charge", self.charge)
            except declined:
                if self.after is not None:
                    await self.after(ctx)
                return "declined"
            except StepFailed:
                if options.get("version") == 1:
                    raise
                await ctx.step("alert", self.note, "alert")
            return "charged"

        return Workflow("flow", body, on_definition_change="ignore", **options)


async def nap(ctx: Context[Any]) -> None:
    await ctx.sleep("nap", "1h")


async def note_and_nap(ctx: Context[Any]) -> None:
    await ctx.step("note", asyncio.sleep, 0)
    await ctx.sleep("nap", "1h")


@pytest.mark.filterwarnings("ignore:step 'charge' of run")
@pytest.mark.parametrize("after", [nap, note_and_nap])
@pytest.mark.parametrize("then", ["ends", "asks for something new"])
async def test_a_class_that_is_gone_stops_the_run_until_it_is_back(after: Callable[[Context[Any]], Any], then: str) -> None:
    shop, store = Shop(after), stores.memory()
    flow = shop.flow(version=1) if then == "ends" else shop.flow()
    with module("shop", Declined=new_class()):
        async with world(flow, store=store) as here:
            assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
    async with world(flow, store=store) as here:
        here.clock.advance("1h")
        (found,) = (await here.runtime.check()).results
        assert (found.verdict, found.at) == ("stops", None if then == "ends" else "alert")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunDiverged)
        assert outcome.error.unfound == ["shop.Declined"]
        assert "shop.Declined, so `except shop.Declined` does not match; define it at module level" in str(outcome.error)
    with module("shop", Declined=new_class()):
        async with world(flow, store=store) as here:
            here.clock.advance("1h")
            assert await here.runtime.resume("run") == Ok("declined")
    assert shop.calls == ["charge"]


@pytest.mark.filterwarnings("ignore:step 'charge' of run")
async def test_a_class_that_is_gone_and_whose_error_ends_the_function_stops_the_run() -> None:
    """Nothing was recorded after the error, but the code that recorded it may have handled it."""
    shop, store = Shop(nap), stores.memory()
    flow = shop.flow(version=1)
    with module("shop", Declined=new_class()):
        async with world(flow, store=store) as here:
            await here.runtime.run(flow, id="run")
            await here.runtime.store.journal("run")
    rows = store._database.namespaces[""].runs["run"].entries
    for seq in [seq for seq, entry in rows.items() if entry.key == "nap"]:
        del rows[seq]
    async with world(flow, store=store) as here:
        here.clock.advance("1h")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunDiverged)
        assert (outcome.error.missing, outcome.error.unfound) == ([], ["shop.Declined"])


async def test_a_check_warns_of_a_class_that_is_gone_where_nothing_stops() -> None:
    store = stores.memory()

    async def charge() -> None:
        raise sys.modules["shop"].Declined("no")

    async def body(ctx: Context[Any]) -> None:
        await raised(ctx.step(charge))
        await ctx.sleep("nap", "1h")

    flow = Workflow("flow", body)
    with module("shop", Declined=new_class()):
        async with world(flow, store=store) as here:
            assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
            assert (await here.runtime.check()).fits
    async with world(flow, store=store) as here:
        (found,) = (await here.runtime.check()).warns
    assert "the error of step 'charge' has a class that is not found here, shop.Declined" in found.warnings[0]


@pytest.mark.filterwarnings("ignore:step 'charge' of run")
async def test_an_error_of_the_function_s_own_after_one_whose_class_is_gone_ends_the_run() -> None:
    store, reached = stores.memory(), asyncio.Event()

    async def charge() -> None:
        raise sys.modules["shop"].Declined("no")

    async def body(ctx: Context[Any]) -> None:
        try:
            await ctx.step(charge)
        except Exception as error:
            reached.set()
            if "shop" in sys.modules:
                await asyncio.get_running_loop().create_future()
            raise LookupError("sold out") from error

    flow = Workflow("flow", body)
    with module("shop", Declined=new_class()):
        async with world(flow, store=store) as here:
            running = asyncio.ensure_future(here.runtime.run(flow, id="run"))
            await reached.wait()
            running.cancel()
            await asyncio.wait([running])
    async with world(flow, store=store) as here:
        assert repr((await here.runtime.sweep())["run"]) == "Err(error=LookupError('sold out'), cause=None)"


@pytest.mark.filterwarnings("ignore:step 'charge' of run")
async def test_with_on_divergence_run_a_class_that_is_gone_stops_nothing() -> None:
    shop, store = Shop(nap), stores.memory()
    flow = shop.flow(on_divergence="run")
    with module("shop", Declined=new_class()):
        async with world(flow, store=store) as here:
            await here.runtime.run(flow, id="run")
    async with world(flow, store=store) as here:
        here.clock.advance("1h")
        assert await here.runtime.resume("run") == Ok("charged")
    assert shop.calls == ["charge", "alert"]


async def test_a_class_that_was_never_found_stops_nothing_and_is_told_once() -> None:
    class Local(ConnectionError):
        pass

    async def fail() -> None:
        raise Local("no")

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(fail))
        return type(error).__name__, isinstance(error, ConnectionError), str(error), error.__notes__

    with pytest.warns(PerdureWarning, match="Local, which is defined in a function; define it at module level") as told:
        first, second = await twice(body)
    assert first == second
    assert first[:2] == ("StepFailed", True)
    assert len(told) == 1


# Rule 7: groups, cancellations, exits, and what is returned.


async def test_a_base_exception_group_fails_the_step_as_an_exception_group() -> None:
    async def fail() -> None:
        raise BaseExceptionGroup("mixed", [ValueError("a"), BaseExceptionGroup("inner", [asyncio.CancelledError("b")])])

    async def body(ctx: Context[Any]) -> Any:
        matched = []
        try:
            await ctx.step(fail)
        except* ValueError as group:
            matched.append(repr(group.exceptions[0]))
        except* StepFailed as group:
            matched.append(str(group.exceptions[0]))
        return matched

    first, second = await twice(body)
    assert first == second
    assert first[0] == "ValueError('a')"


async def test_a_cancellation_that_nobody_asked_for_fails_the_step() -> None:
    async def stop() -> None:
        raise asyncio.CancelledError("by myself")

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(stop))
        return type(error), str(error)

    first, second = await twice(body)
    assert first == second == (StepFailed, "step 'stop' failed: CancelledError: by myself")


async def test_an_exception_that_is_returned_is_rebuilt_by_the_same_code() -> None:
    async def pay() -> Ok[int] | Err[Refused]:
        try:
            await refuse()
        except Refused as error:
            return Err(error)
        return Ok(1)

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(pay))
        assert isinstance(error, StepFailed)
        assert error.was_returned
        return list(shape(error.error)[1:4]), "raise Refused(402)" in str(error.error.__cause__)

    first, second = await twice(body)
    assert first == second
    assert first == ([(402,), "402", False], True)
    assert (await Workflow("flow", body)())[0][2] is True, "a bare run has the original"


# Rule 8: a function that ends early.


class Ends:
    """Workflows that record the steps a and b, and then do less."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def do(self, key: str) -> str:
        self.calls.append(key)
        return key

    async def before(self, ctx: Context[Any]) -> str:
        await ctx.step("a", self.do, "a")
        await ctx.step("b", self.do, "b")
        await ctx.sleep("nap", "1h")
        return "before"

    async def returns(self, ctx: Context[Any]) -> str:
        return await ctx.step("a", self.do, "a")

    async def raises(self, ctx: Context[Any]) -> str:
        await ctx.step("a", self.do, "a")
        raise LookupError("of its own")

    async def starts_over(self, ctx: Context[Any]) -> str:
        await ctx.step("a", self.do, "a")
        return await ctx.continue_as()


async def resumed(ends: Ends, body: Any, **options: Any) -> Any:
    """The outcome of a run that `before` has begun and this code resumes, and what `check` says."""
    store = stores.memory()
    async with world(Workflow("flow", ends.before), store=store) as here:
        assert isinstance(await here.runtime.run("flow", id="run"), Suspended)
    async with world(Workflow("flow", body, on_definition_change="ignore", **options), store=store) as here:
        here.clock.advance("1h")
        (found,) = (await here.runtime.check()).results
        outcome = (await here.runtime.sweep())["run"]
        row = await store.get("run")
        assert row is not None
        is_stopped = isinstance(outcome, Err) and isinstance(outcome.error, RunDiverged)
        assert (found.verdict == "stops") == (is_stopped or body == ends.raises)
        assert (row.status == "pending") == is_stopped
        if is_stopped:
            assert row.problem == found.problem
    return outcome


@pytest.mark.parametrize("how", ["returns", "raises", "starts_over"])
async def test_a_function_that_ends_while_results_are_left_stops_its_run(how: str) -> None:
    ends = Ends()
    outcome = await resumed(ends, getattr(ends, how))
    assert isinstance(outcome.error, RunDiverged)
    assert (outcome.error.asked, outcome.error.missing) == (None, ["b"])
    ending = "ends" if how != "raises" else "raises LookupError: of its own (test_handled_errors.py:"
    assert f"was stopped where its function {ending}" in str(outcome.error)
    assert "'b' is recorded and this code does not ask for it" in str(outcome.error)
    assert ends.calls == ["a", "b"]


@pytest.mark.parametrize("options", [{"retired": {"b"}}, {"on_divergence": "run"}])
async def test_a_function_may_end_early_if_that_is_wanted(options: Any) -> None:
    ends = Ends()
    assert await resumed(ends, ends.returns, **options) == Ok("a")
    outcome = await resumed(ends, ends.raises, **options)
    assert repr(outcome) == "Err(error=LookupError('of its own'), cause=None)"


async def test_on_unknown_steps_has_no_say_in_what_a_run_recorded_itself() -> None:
    ends = Ends()
    for choice in ("ignore", "warn", "error"):
        outcome = await resumed(ends, ends.returns, on_unknown_steps=choice)
        assert isinstance(outcome.error, RunDiverged)


async def test_a_step_that_was_asked_for_and_not_awaited_is_not_missed() -> None:
    calls: list[str] = []

    async def slow() -> None:
        calls.append("slow")

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("a")

    async def body(ctx: Context[Any]) -> None:
        left = asyncio.create_task(ctx.step(slow))
        try:
            await ctx.step(fail)
        finally:
            if not calls_at_end:
                calls_at_end.append(1)
                await ctx.sleep("nap", "1h")
            del left

    calls_at_end: list[int] = [1]
    flow = Workflow("flow", body)
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        await here.runtime.retry("run")
        assert isinstance((await here.runtime.sweep())["run"], Err)
    assert calls == ["slow"]


async def test_a_branch_that_asks_late_is_waited_for_at_the_end() -> None:
    """The function's own I/O was slower on the first run, so a branch that it left recorded a step before the function ended."""
    ends, store, pace = Ends(), stores.memory(), [0.0, 0.2]

    async def body(ctx: Context[Any]) -> str:
        async def branch() -> None:
            await own_wait(pace[0])
            await ctx.step("late", ends.do, "late")

        left = asyncio.create_task(branch())
        await ctx.step("a", ends.do, "a")
        if pace[1]:
            await left
            await ctx.sleep("nap", "1h")
        return "done"

    flow = Workflow("flow", body)
    async with world(flow, store=store) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
    pace[:] = [0.1, 0.0]
    async with world(flow, store=store, unload_grace="5s") as here:
        here.clock.advance("1h")
        assert await here.runtime.resume("run") == Ok("done")
    assert ends.calls.count("late") == 1


async def test_a_cancelled_run_may_end_early() -> None:
    ends, store = Ends(), stores.memory()
    async with world(Workflow("flow", ends.before), store=store) as here:
        await here.runtime.run("flow", id="run")
        await here.runtime.cancel("run")
    async with world(Workflow("flow", ends.returns, on_definition_change="ignore"), store=store) as here:
        await here.runtime.sweep()
        row = await store.get("run")
        assert row is not None
        assert row.status == "cancelled"


async def test_results_of_a_snapshot_follow_on_unknown_steps() -> None:
    ends, store = Ends(), stores.memory()
    await Workflow("flow", ends.before).run(id="run", store=store)
    snapshot = await store.load("run")
    flow = Workflow("flow", ends.returns, on_definition_change="ignore")
    with pytest.warns(PerdureWarning, match="it ended without asking for what is recorded under 'b'"):
        assert await flow.run(snapshot=snapshot) == Ok("a")
    assert await flow.run(snapshot=snapshot, on_unknown_steps="ignore") == Ok("a")
    with pytest.raises(RunDiverged, match="was stopped where its function ends"):
        await flow.run(snapshot=snapshot, on_divergence="stop")
    assert ends.calls == ["a", "b"]


async def test_the_response_of_httpx_is_not_there_on_the_first_run_either() -> None:
    async def pay() -> None:
        httpx.Response(402, request=httpx.Request("GET", "https://bank.example/")).raise_for_status()

    async def body(ctx: Context[Any]) -> Any:
        error = await raised(ctx.step(pay))
        assert type(error) is httpx.HTTPStatusError
        return str(error), hasattr(error, "response"), error.__notes__

    first, second = await twice(body)
    assert first == second
    assert first[0].startswith("Client error '402 Payment Required' for url 'https://bank.example/'")
    assert first[1] is False
    assert "response (httpx.Response)" in first[2][1]
