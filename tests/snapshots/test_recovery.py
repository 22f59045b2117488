"""A run goes on elsewhere as if nothing had happened: from any point, as often as it takes, and nothing is done twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, WaitingFor, Workflow, current_step, open_store, stores
from perdure.errors import PerdureWarning, StepChanged, StepFailed, StepTimeout
from perdure.events import Event
from perdure.model.durations import MICROSECOND, Duration
from perdure.options import EngineSettings
from perdure.state import (
    MemoryKeyValueStore,
    ResumeState,
    ResumeStateCollector,
    Snapshot,
    StatePersistence,
    StepResult,
    parse_state,
)
from tests.campaign import IS_FULL, times
from tests.codec.models import ALL, Account, Box, Color, Crate, Item, Level, Loose, Order, Page, Place, Point, Tone, User
from tests.codec.same import same
from tests.codec.test_values import VALUES
from tests.engine.bodies import BODIES, Body, World, chains, flow_of
from tests.simulation import LoopClock, simulate
from tests.snapshots.elsewhere import There, exported, returning, through_text


class Elsewhere(Exception):
    """An error with fields of its own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


both: Final = pytest.mark.parametrize("as_state", [False, True], ids=["snapshot", "state"])


class TestValuesOfOurOwn:
    """What a step recorded here, it gives elsewhere: the same value, of the same type."""

    @settings(max_examples=times(1000), suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(VALUES, min_size=1, max_size=3), st.booleans())
    def test_every_value_resumes_with_its_types(self, values: list[Any], as_state: bool) -> None:
        seen: list[list[Any]] = []

        async def body(ctx: Context) -> None:
            steps = [ctx.step("value", returning(value), key=f"{n}") for n, value in enumerate(values)]
            seen.append([await step for step in steps])

        async def main() -> None:
            flow = Workflow("flow", body)
            run = await flow.start()
            await run
            state = await exported(run, as_state=as_state)
            again = await flow.start(snapshot=state)
            await again
            assert (await exported(again, as_state=as_state)).get("steps") == state.get("steps")

        asyncio.run(main())
        assert len(seen) == 2
        assert same(seen[0], values)
        assert same(seen[1], values)

    CLASSES: Final = [
        Order(1, [Item("a", Decimal("1.50"))], Color.BLUE), Item("x"), Point(1.0, -0.0), Page([Item("a")], "next"),
        Account(7, ("admin",)), Place(1.5, {"a"}), Box(3, Item("b")), Crate(2), User(name="Ada", tags={"x"}), Loose(a=1),
        Level.HIGH, Tone.SOFT, {"items": [Item("a")], Level.LOW: (Point(1, 2),)},
    ]  # fmt: skip

    @both
    @pytest.mark.parametrize("value", CLASSES, ids=lambda value: type(value).__name__)
    async def test_every_kind_of_class_resumes_as_itself(self, value: Any, as_state: bool) -> None:
        seen: list[Any] = []
        hint: Any = ALL | dict[Any, Any] if not isinstance(value, dict) else dict[str | Level, list[Item] | tuple[Point, ...]]

        async def body(ctx: Context) -> None:
            seen.append(await ctx.step("value", returning(value), returns=hint))

        flow = Workflow("flow", body)
        run = await flow.start()
        await run
        await flow.run(snapshot=await exported(run, as_state=as_state))
        assert seen == [value, value]
        assert type(seen[1]) is type(value)

    @both
    async def test_an_exception_is_raised_again_as_its_own_class(self, as_state: bool) -> None:
        seen: list[Exception] = []

        def fail() -> None:
            try:
                raise KeyError("inner", 1)
            except KeyError as inner:
                error = Elsewhere("outer", 7)
                error.add_note("look there")
                raise error from inner

        async def body(ctx: Context) -> None:
            for key, fn in (("own", fail), ("os", lambda: open("/nowhere/at/all")), ("group", self.fail_together)):  # noqa: SIM115, PTH123
                try:
                    await ctx.step(key, fn)
                except Exception as error:
                    seen.append(error)

        flow = Workflow("flow", body)
        run = await flow.start()
        await run
        await flow.run(snapshot=await exported(run, as_state=as_state))
        for first, again in zip(seen[:3], seen[3:], strict=True):
            assert (type(again), str(again), repr(again.args)) == (type(first), str(first), repr(first.args))
        own, missing, group = seen[3:]
        assert isinstance(own, Elsewhere)
        note, of_step = own.__notes__
        assert (own.code, note, type(own.__cause__)) == (7, "look there", KeyError)
        assert of_step.startswith("in step 'own' of run ")
        assert isinstance(missing, FileNotFoundError)
        assert missing.filename == "/nowhere/at/all"
        assert isinstance(group, ExceptionGroup)
        assert [type(one) for one in group.exceptions] == [ValueError, Elsewhere]

    def fail_together(self) -> None:
        raise ExceptionGroup("many", [ValueError("a"), Elsewhere("b", 2)])

    @both
    @pytest.mark.parametrize(
        "error",
        ["CODE", {"code": {1, 2}}, Point(1, 2), ValueError("inside"), Elsewhere("x", 3), None],
        ids=lambda error: type(error).__name__,
    )
    async def test_an_err_is_the_same_err_again(self, error: Any, as_state: bool) -> None:
        seen: list[StepFailed] = []

        async def fail() -> Ok[int] | Err[Point | Any]:
            return Err(error, cause=LookupError("why"))

        async def body(ctx: Context) -> None:
            try:
                await ctx.step(fail)
            except StepFailed as failed:
                seen.append(failed)

        flow = Workflow("flow", body)
        run = await flow.start()
        await run
        snapshot = await run.snapshot()
        cause = snapshot.steps["fail"].cause
        assert cause is not None
        assert (cause["name"], cause["message"]) == ("LookupError", "why")
        again = await flow.start(snapshot=await exported(run, as_state=as_state))
        await again
        assert (await again.snapshot()).steps == snapshot.steps
        first, second = seen
        assert (second.was_returned, type(second.error), str(second)) == (True, type(first.error), str(first))
        if not isinstance(error, Exception):
            assert second.error == error

    @both
    async def test_a_timed_out_step_and_a_class_that_is_not_known_elsewhere(self, as_state: bool) -> None:
        seen: list[Exception] = []

        class Local(Exception):
            pass

        async def fail(local: bool) -> None:
            if local:
                raise Local("here only")
            await asyncio.get_running_loop().create_future()

        async def body(ctx: Context) -> None:
            for local in (True, False):
                try:
                    await ctx.step("fail", fail, local, key=f"{local}", timeout=0.001)
                except Exception as error:
                    seen.append(error)

        flow = Workflow("flow", body)
        run = await flow.start()
        await run
        await flow.run(snapshot=await exported(run, as_state=as_state))
        assert [type(error) for error in seen] == [StepFailed, StepTimeout] * 2
        assert [str(error) for error in seen[:2]] == [str(error) for error in seen[2:]]


class TestWhereItStood:
    """A run goes on elsewhere exactly where it stood: deadlines, attempts, intents, what was decided, and what was random."""

    async def test_a_sleep_keeps_its_deadline(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> datetime:
            await ctx.sleep("nap", "1h")
            return ctx.now()

        flow = Workflow("flow", body)
        first = await here.begin(flow)
        assert isinstance(first, Suspended)
        here.clock.advance("20m")
        again = await there.begin(flow, snapshot=through_text(await here.snapshot()))
        assert isinstance(again, Suspended)
        assert again.wake_at == first.wake_at
        expected = Ok(datetime(2026, 1, 1, 1, 0, tzinfo=UTC))
        assert await there.later("40m") == expected
        assert (await here.runtime.sweep())["there"] == expected

    async def test_a_sleep_that_is_over_by_now_does_not_wait_again(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> str:
            await ctx.sleep("nap", "1h")
            return "awake"

        flow = Workflow("flow", body)
        await here.begin(flow)
        snapshot = through_text(await here.snapshot())
        here.clock.advance("2h")
        assert await there.begin(flow, snapshot=snapshot) == Ok("awake")

    async def test_a_signal_that_was_received_is_received_and_the_wait_for_another_goes_on(
        self, here: There, there: There
    ) -> None:
        async def body(ctx: Context) -> list[Point | str]:
            first = await ctx.wait_for_signal("go", returns=Point)
            return [first, await ctx.wait_for_signal("stop", timeout="2h", default="none came")]

        flow = Workflow("flow", body)
        await here.begin(flow)
        await here.runtime.signal("there", "go", {"x": 1.0, "y": 2.0})
        await here.runtime.sweep()
        waiting = await there.begin(flow, snapshot=through_text(await here.snapshot()))
        assert isinstance(waiting, Suspended)
        assert waiting.waiting_for == (WaitingFor("signal", "stop"),)
        assert waiting.wake_at == datetime(2026, 1, 1, 2, tzinfo=UTC)
        assert await there.later("2h") == Ok([Point(1, 2), "none came"])
        last = There(here.clock)
        assert await last.begin(flow, snapshot=through_text(await there.snapshot())) == Ok([Point(1, 2), "none came"])

    async def test_a_race_and_a_time_limit_come_out_as_they_did(self, here: There, there: There) -> None:
        ran: list[str] = []

        async def work(label: str) -> str:
            ran.append(label)
            return label

        async def body(ctx: Context) -> list[Any]:
            async def slow() -> str:
                await ctx.sleep("slow", "1h")
                return await ctx.step("after slow", work, "slow")

            async def fast() -> str:
                await ctx.sleep("fast", "1m")
                return await ctx.step("after fast", work, "fast")

            log: list[Any] = [await ctx.race("which", slow(), fast())]
            try:
                async with ctx.timeout("limit", "1m"):
                    await ctx.wait_for_signal("never")
            except TimeoutError:
                log.append(await ctx.step("late", work, "late"))
            await ctx.sleep("end", "1h")
            return log

        flow = Workflow("flow", body)
        await here.begin(flow)
        await here.later("1m")
        await here.later("1m")
        assert ran == ["fast", "late"]
        assert isinstance(await there.begin(flow, snapshot=through_text(await here.snapshot())), Suspended)
        assert await there.later("1h") == Ok(["fast", "late"])
        assert ran == ["fast", "late"]

    async def test_a_time_limit_keeps_its_deadline(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> str:
            try:
                async with ctx.timeout("limit", "1h"):
                    await ctx.sleep("long", "5h")
            except TimeoutError:
                return f"late at {ctx.now():%H:%M}"
            return "in time"

        flow = Workflow("flow", body)
        await here.begin(flow)
        here.clock.advance("30m")
        assert isinstance(await there.begin(flow, snapshot=through_text(await here.snapshot())), Suspended)
        assert await there.later("30m") == Ok("late at 01:00")

    async def test_a_retry_keeps_its_count_and_its_next_try(self, here: There, there: There) -> None:
        attempts: list[int] = []

        async def flaky() -> None:
            attempts.append(current_step().attempt)
            raise OSError("no")

        async def body(ctx: Context) -> None:
            await ctx.step(flaky, retry=Retry(attempts=3, wait_initial="1h", wait_max="1h", wait_jitter=0))

        flow = Workflow("flow", body)
        waiting = await here.begin(flow)
        assert isinstance(waiting, Suspended)
        here.clock.advance("30m")
        again = await there.begin(flow, snapshot=through_text(await here.snapshot()))
        assert isinstance(again, Suspended)
        assert (again.wake_at, attempts) == (waiting.wake_at, [1])
        await there.later("30m")
        last = There(here.clock)
        await last.begin(flow, snapshot=through_text(await there.snapshot()))
        outcome = await last.later("1h")
        assert isinstance(outcome, Err)
        assert attempts == [1, 2, 3]

    async def test_an_at_most_once_step_that_was_begun_is_not_begun_again(self, here: There, there: There) -> None:
        ran: list[str] = []
        snapshots: list[dict[str, Any]] = []

        async def charge() -> None:
            ran.append("charge")
            snapshots.append(through_text(await here.snapshot()))

        async def body(ctx: Context) -> None:
            await ctx.step(charge, at_most_once=True)

        flow = Workflow("flow", body)
        assert await here.begin(flow) == Ok(None)
        outcome = await there.begin(flow, snapshot=snapshots[0])
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepFailed)
        assert outcome.error.error == "OutcomeUnknown"
        assert ran == ["charge"]

    async def test_an_intent_binds_only_code_that_still_says_at_most_once(self, here: There, there: There) -> None:
        ran: list[str] = []
        snapshots: list[dict[str, Any]] = []
        is_bound = [True]

        async def charge() -> str:
            ran.append("charge")
            if is_bound[0]:
                snapshots.append(through_text(await here.snapshot()))
            return "paid"

        async def body(ctx: Context) -> str:
            return await ctx.step(charge, at_most_once=is_bound[0])

        flow = Workflow("flow", body)
        await here.begin(flow)
        is_bound[0] = False
        assert await there.begin(flow, snapshot=snapshots[0]) == Ok("paid")
        assert ran == ["charge"] * 2

    async def test_the_time_and_what_is_random_are_the_same(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> list[Any]:
            drawn: list[Any] = [ctx.now(), ctx.uuid4(), ctx.random(), ctx.scope("s").uuid4(), ctx.uuid4(key="k")]
            await ctx.step("a", lambda: 1)
            drawn += [ctx.now(), ctx.uuid4()]
            await ctx.sleep("nap", "1h")
            return [*drawn, ctx.now(), ctx.random()]

        flow = Workflow("flow", body)
        await here.begin(flow)
        snapshot = through_text(await here.snapshot())
        expected = await here.later("1h")
        here.clock.advance("1d")
        outcome = await there.begin(flow, snapshot=snapshot)
        # The sleep was recorded at another time, because no worker ran when it was over.
        assert isinstance(outcome, Ok)
        assert isinstance(expected, Ok)
        now = outcome.value[-2]
        assert [*outcome.value[:-2], outcome.value[-1]] == [*expected.value[:-2], expected.value[-1]]
        assert now - expected.value[-2] == timedelta(days=1)
        last = There(here.clock)
        assert await last.begin(flow, snapshot=through_text(await here.snapshot())) == expected

    async def test_records_keep_their_order_and_the_journal_is_the_same(self, here: There, there: There) -> None:
        async def body(ctx: Context) -> None:
            async def branch(n: int) -> None:
                await ctx.sleep(f"nap{n}", f"{10 - n}m")
                await ctx.step(f"step{n}", lambda: n)

            await asyncio.gather(*map(branch, range(3)))
            await ctx.sleep("end", "1h")

        flow = Workflow("flow", body)
        await here.begin(flow)
        for _ in range(10):
            here.clock.advance("1m")
            await here.runtime.sweep()
        snapshot = await here.snapshot()
        assert list(snapshot.steps) == ["nap2", "step2", "nap1", "step1", "nap0", "step0"]
        await there.begin(flow, snapshot=through_text(snapshot))
        journals = [await place.store.journal("there") for place in (here, there)]
        said = [
            [(e.seq, e.key, e.phase, e.kind, e.name, e.payload, e.attempt, e.started_at, e.ended_at) for e in j] for j in journals
        ]
        assert said[1] == said[0]
        # Drop entries are not in a snapshot, and leave no gap.
        assert [entry.seq for entry in journals[1]] == list(range(1, len(journals[1]) + 1))

    async def test_a_run_that_went_on_in_a_file_is_there_for_the_next_process(self, here: There, tmp_path: Path) -> None:
        ran: list[str] = []

        async def body(ctx: Context) -> list[Any]:
            log: list[Any] = [ctx.uuid4(), await ctx.step("a", returning({1}))]
            log.append(await ctx.step("b", ran.append, "b"))
            await ctx.sleep("nap", "1h")
            return [*log, ctx.uuid4()]

        flow = Workflow("flow", body)
        await here.begin(flow)
        dsn = f"sqlite:///{tmp_path}/runs.db"
        waiting = await flow.run(id="there", store=dsn, snapshot=through_text(await here.snapshot()))
        assert isinstance(waiting, Suspended)
        here.clock.advance("1h")
        runtime = Runtime(open_store(dsn), [flow], clock=here.clock, concurrency=0)
        there = await runtime.sweep()
        await runtime.close()
        assert there == await here.runtime.sweep()
        assert ran == ["b"]

    async def test_the_arguments_of_a_recorded_step_are_still_compared(self, here: There, there: There) -> None:
        async def body(ctx: Context, n: int) -> int:
            return await ctx.step("a", lambda n: n, n)

        flow = Workflow("flow", body)
        await here.begin(flow, 1)
        with pytest.warns(PerdureWarning, match="called with other arguments"):
            assert await there.begin(flow, 2, snapshot=through_text(await here.snapshot())) == Ok(1)

    async def test_another_kind_under_a_recorded_key_is_a_changed_step(self, here: There, there: There) -> None:
        def flow(kind: str) -> Workflow[[], None]:
            async def body(ctx: Context) -> None:
                await (ctx.sleep("a", 0) if kind == "sleep" else ctx.step("a", lambda: 1))

            return Workflow("flow", body, on_definition_change="ignore")

        await here.begin(flow("sleep"))
        for state in (through_text(await here.snapshot()), await (await here.run()).resume_state()):
            outcome = await There(here.clock).begin(flow("step"), snapshot=state)
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, StepChanged)


class Noting(World):
    """Step functions that note under which key they ran."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.keys: list[str] = []

    async def work(self, label: str) -> str:
        self.keys.append(current_step().key)
        return await super().work(label)


class Cut(NamedTuple):
    """A run at one event: its state as it leaves the process, and what the body had seen by then."""

    snapshot: dict[str, Any]
    seen: list[tuple[str, Any]]


class Simulated:
    """One run in virtual time, on a store of its own."""

    def __init__(self, body: Body, seed: int) -> None:
        self.world = Noting(seed)
        self.flow = flow_of(body, self.world)
        self.store = stores.memory()
        self.cuts: list[Cut] = []
        self._length = -1

    async def to_the_end(self, snapshot: Any = None, go: Any = None) -> Any:
        """The value, through suspensions, the first of which is when the signal is sent, if there is one."""
        runtime = Runtime(self.store, [self.flow], clock=LoopClock(), unload_grace=0.5, concurrency=0, on_event=self.listen)
        outcome = await self.flow.run(id="run", store=self.store, snapshot=snapshot, on_event=self.listen)
        if go is not None and isinstance(outcome, Suspended):
            await runtime.signal("run", "go", go)
        while isinstance(outcome, Suspended):
            await asyncio.sleep(0.5)
            outcome = await runtime.resume("run")
        return outcome.unwrap()

    def listen(self, event: Event) -> None:
        """Keep the run as it is, unless nothing was recorded since the last event."""
        if event.view.length != self._length or event.is_terminal:
            self._length = event.view.length
            self.cuts.append(Cut(through_text(event.snapshot), list(self.world.seen)))


def _settings() -> EngineSettings:
    return EngineSettings(clock=LoopClock(), unload_grace=MICROSECOND // 2)


async def resumed_at_events(body: Body, seed: int, most: int | None) -> None:
    """Check that the run goes on alike from what its events carry: from each, or from a few of them and the last."""
    whole = Simulated(body, seed)
    value = await whole.to_the_end()
    cuts = whole.cuts if most is None else [*random.Random(seed).sample(whole.cuts[:-1], most), whole.cuts[-1]]
    for number, (snapshot, seen) in enumerate(cuts):
        again = Simulated(body, 1000 * seed + number)
        result = await again.to_the_end(snapshot)
        recorded = snapshot["steps"]
        assert not recorded.keys() & set(again.world.keys), "recorded steps ran again"
        expected = [(key, value) for key, value in seen if key in recorded]
        assert again.world.seen[: len(expected)] == expected, "the body saw other values, or in another order"
        told = again.cuts[-1].snapshot["steps"]
        assert list(told.items())[: len(recorded)] == list(recorded.items())
        if body is chains or snapshot["execution"]["status"] == "completed":
            assert result == value
    assert not again.world.keys, "everything was recorded, and yet something ran"


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_run_resumes_from_what_any_of_its_events_carries(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.worker.single_run._settings", _settings)
    for seed in range(times(30)):
        simulate(resumed_at_events(body, seed, None if IS_FULL or seed == 0 else 6))


async def refused() -> Err[Any]:
    return Err({"code", 1})


async def everything(world: World, ctx: Context[Any]) -> Any:
    """Whatever can be recorded, in an order and with results that do not depend on timing."""
    log: list[Any] = [ctx.uuid4(), ctx.random(), ctx.scope("s").uuid4(), await world.step(ctx, "first")]

    async def third_time_lucky() -> int:
        await world.work("flaky")
        if current_step().attempt < 3:
            raise OSError(current_step().attempt, "not yet")
        return current_step().attempt

    log.append(await ctx.step("flaky", third_time_lucky, retry=Retry(attempts=3, wait_initial="2s", wait_jitter=0)))
    await ctx.sleep("nap", "5s")
    log.append(await ctx.wait_for_signal("go", timeout="1h", default="none"))
    log.append(await ctx.wait_for_signal("never", timeout="3s", default="none"))
    try:
        async with ctx.timeout("limit", "2s"):
            await ctx.sleep("long", "1h")
    except TimeoutError:
        log.append(await world.step(ctx, "late"))
    try:
        await ctx.step(refused)
    except StepFailed as failed:
        log.append(failed.error)

    async def after(name: str, duration: str) -> str:
        # No step after this: by the time the run goes on both may be over, and who is first is a matter of the deadlines alone.
        await ctx.sleep(f"before {name}", duration)
        return name

    log.append(await ctx.race("race", after("slow", "9s"), after("fast", "3s")))
    log.append(await ctx.map("mapped", world.work, ["x", "y", "z"], concurrency=2))
    try:
        log.append(await ctx.step("once", world.work, "once", at_most_once=True))
    except StepFailed as failed:
        log.append(failed.error)
    return [*log, ctx.uuid4()]


async def everything_resumed(seed: int) -> None:
    """Check that from every event on the run comes to what it came to undisturbed, with the attempts that were left."""
    whole = Simulated(everything, seed)
    value = await whole.to_the_end(go="signal")
    assert whole.world.keys.count("flaky") == 3
    assert value[5:9] == ["signal", "none", "<late>", {"code", 1}]
    assert any("inbox" in cut.snapshot["metadata"]["perdure"] for cut in whole.cuts)
    for number, (snapshot, _) in enumerate(whole.cuts):
        again = Simulated(everything, number)
        record = snapshot["metadata"]["perdure"]
        opened = [line[0] for line in record.get("journal", {}).values() if line[1] == "open"]
        # A signal that was sent goes with the run; otherwise it is sent to the run that takes over.
        was_sent = "inbox" in record or "go" in snapshot["steps"]
        result = await again.to_the_end(snapshot, go=None if was_sent else "signal")
        assert not snapshot["steps"].keys() & set(again.world.keys)
        assert again.world.keys.count("flaky") == (0 if "flaky" in snapshot["steps"] else 3 - opened.count("flaky"))
        if "once" in opened and "once" not in snapshot["steps"]:
            assert result[-2] == "OutcomeUnknown"
            assert "once" not in again.world.keys
            result[-2] = value[-2]
        assert result == value


def test_whatever_can_be_recorded_resumes_from_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.worker.single_run._settings", _settings)
    for seed in range(times(20)):
        simulate(everything_resumed(seed))


async def test_a_signal_that_waits_in_the_inbox_goes_with_the_run(here: There, there: There) -> None:
    async def body(ctx: Context) -> Any:
        await ctx.sleep("nap", "1h")
        return await ctx.wait_for_signal("go")

    flow = Workflow("flow", body)
    await here.begin(flow)
    await here.runtime.signal("there", "go", "early")
    await there.begin(flow, snapshot=through_text(await here.snapshot()))
    assert await there.later("1h") == Ok("early")


class Crash(NamedTuple):
    """The end of a process: in the function of a step after it charged, or before or after the save that first has the step."""

    step: int
    when: Literal["in the step", "before the save", "after the save"]


class Watched(MemoryKeyValueStore):
    """A key-value store that sees to it that a state never loses what an earlier one had."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, StepResult] = {}

    async def set(self, key: str, value: str, ttl: Duration | None = None) -> None:
        steps = parse_state(value).steps
        assert {name: steps.get(name) for name in self.steps} == self.steps, "the saved state has shrunk, or changed"
        assert list(steps)[: len(self.steps)] == list(self.steps), "the saved steps are in another order"
        self.steps = steps
        await super().set(key, value, ttl)


class Process:
    """Goes on from the saved state, saves what it does, and dies where the test says. After that it changes nothing."""

    def __init__(self, kv: Watched, charged: list[int], *, saves_at: str, as_snapshot: bool) -> None:
        self.persistence = StatePersistence(kv)
        self.kv = kv
        self.charged = charged
        self.saves_at = saves_at
        self.as_snapshot = as_snapshot
        self.crash: Crash | None = None
        self.is_dead = False

    async def live(self, flow: Workflow[[], Any], crash: Crash | None) -> Any:
        """The outcome, or None when it died."""
        self.crash = crash
        collector = ResumeStateCollector()

        async def on_event(event: Event) -> None:
            collector.handle_event(event)
            if not self.is_dead and self.saves_at in ("any event", event.type):
                await self._save(event.snapshot if self.as_snapshot else collector.resume_state())

        state = await self.persistence.load("order")
        running = flow.run(resume_state=state, on_event=on_event, deps=self)
        self._task = asyncio.ensure_future(running)
        await asyncio.wait([self._task])
        assert self._task.cancelled() is self.is_dead
        return None if self.is_dead else self._task.result()

    async def charge(self, step: int) -> str:
        """The effect that must not happen twice."""
        if not self.is_dead:
            self.charged.append(step)
        if self.crash == Crash(step, "in the step"):
            self._die()
        if self.is_dead:
            await asyncio.get_running_loop().create_future()
        return f"receipt {step}"

    async def _save(self, state: ResumeState | Snapshot) -> None:
        crash = self.crash
        is_last = crash is not None and crash.when != "in the step" and f"charge:{crash.step}" in state.steps
        if crash is None or not is_last or crash.when == "after the save":
            await self.persistence.save("order", state)
        if is_last:
            self._die()

    def _die(self) -> None:
        self.is_dead = True
        self._task.cancel()


CHARGES: Final = 4
CRASHES: Final = st.builds(Crash, st.integers(0, CHARGES - 1), st.sampled_from(get_args(get_type_hints(Crash)["when"])))


async def _charge_all(ctx: Context[Process]) -> list[str]:
    return [await ctx.step("charge", ctx.deps.charge, n, key=f"charge:{n}") for n in range(CHARGES)]


def expected_charges(crashes: list[Crash | None]) -> list[int]:
    """What is charged over these lives: each step once, and again after each crash between its charge and its save."""
    charged: list[int] = []
    saved = 0
    for crash in crashes:
        is_over = crash is None or (crash.step < saved and crash.when == "in the step")
        if crash is None or is_over:
            charged += range(saved, CHARGES)
            saved = CHARGES
        elif crash.step >= saved:
            charged += range(saved, crash.step + 1)
            saved = crash.step + (crash.when == "after the save")
    return charged


@pytest.mark.parametrize("as_snapshot", [False, True], ids=["state", "snapshot"])
@pytest.mark.parametrize("saves_at", ["any event", "step_complete"])
@settings(max_examples=times(500))
@given(st.lists(CRASHES, max_size=6))
def test_whatever_crashes_in_whatever_order_each_charge_is_made_once_unless_it_could_not_be_saved(
    saves_at: str, as_snapshot: bool, crashes: list[Crash]
) -> None:
    lives = [*crashes, None]

    async def main() -> None:
        kv, charged = Watched(), list[int]()
        for crash in lives:
            outcome = await Process(kv, charged, saves_at=saves_at, as_snapshot=as_snapshot).live(_charge_flow, crash)
            assert outcome in (None, Ok([f"receipt {n}" for n in range(CHARGES)]))
        assert outcome is not None
        assert charged == expected_charges(lives)
        assert list(kv.steps) == [f"charge:{n}" for n in range(CHARGES)]

    asyncio.run(main())


_charge_flow: Final = Workflow("charge_all", _charge_all)


def test_crashes_that_spare_the_time_between_a_charge_and_its_save_charge_exactly_once() -> None:
    """The sentence people care about, for every sequence of three such crashes."""

    async def main(crashes: tuple[Crash, ...]) -> None:
        kv, charged = Watched(), list[int]()
        for crash in (*crashes, None):
            await Process(kv, charged, saves_at="step_complete", as_snapshot=False).live(_charge_flow, crash)
        assert charged == list(range(CHARGES))

    for steps in itertools.product(range(CHARGES), repeat=3):
        asyncio.run(main(tuple(Crash(step, "after the save") for step in steps)))


async def _charge_together(ctx: Context[Process]) -> list[str]:
    async def branch(n: int) -> str:
        await ctx.step("think", asyncio.sleep, random.Random(n).random(), key=f"think:{n}")
        return await ctx.step("charge", ctx.deps.charge, n, key=f"charge:{n}")

    return await asyncio.gather(*map(branch, range(CHARGES)))


@settings(max_examples=times(500))
@given(st.lists(CRASHES, max_size=4), st.sampled_from(["any event", "step_complete"]))
def test_branches_that_were_saved_are_never_run_again_and_those_that_were_not_are(crashes: list[Crash], saves_at: str) -> None:
    flow = Workflow("charge_together", _charge_together)

    async def main() -> None:
        kv = Watched()
        for crash in [*crashes, None]:
            known, charged = dict(kv.steps), list[int]()
            outcome = await Process(kv, charged, saves_at=saves_at, as_snapshot=False).live(flow, crash)
            assert not {f"charge:{n}" for n in charged} & known.keys(), "a saved step ran again"
            assert len(set(charged)) == len(charged)
            lost = {f"charge:{n}" for n in charged} - kv.steps.keys()
            assert crash is not None or not lost
            if crash is not None and crash.when == "after the save":
                assert f"charge:{crash.step}" in kv.steps
        assert outcome == Ok([f"receipt {n}" for n in range(CHARGES)])

    simulate(main())
