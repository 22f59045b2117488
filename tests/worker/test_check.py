"""`runtime.check()`: stored runs are replayed against new code, and nothing is executed or written."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import CheckReport, Context, Err, Ok, Runtime, Suspended, Workflow, stores, workflow
from perdure.model.journal import Entry
from perdure.operations.replay_check import ReplayCheck, RunCheck
from perdure.store import Store, require
from tests.campaign import IS_FULL, times
from tests.engine.bodies import BODIES, World, flow_of
from tests.engine.bodies import Body as TimedBody
from tests.engine.own_waits import own_wait
from tests.engine.test_branches_replay_alike import drive_to_the_end, undisturbed
from tests.engine.test_deploys import BEFORE, DEPLOYS
from tests.engine.test_deploys import Effects as DeployEffects
from tests.patience import PATIENCE
from tests.simulation import LoopClock, MortalStore, SlowStore, simulate
from tests.worker.flows import Gate, ask, client, greet, nap

Body = Callable[..., Coroutine[Any, Any, Any]]


class Effects:
    """Step functions that count how often they were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def do(self, name: str) -> str:
        self.calls.append(name)
        return name

    async def step(self, ctx: Context, name: str, **options: Any) -> str:
        return await ctx.step(name, self.do, name, **options)


@pytest.fixture
def effects() -> Effects:
    return Effects()


async def everything_in(store: Store) -> dict[str, Any]:
    """All that a store has of its runs: rows with their leases, journals and inboxes."""
    runs = await store.list(limit=1000)
    return {run.id: [await store.get(run.id), await store.journal(run.id), await store.inbox(run.id)] for run in runs}


async def start(store: Store, body: Body, *args: Any, run_id: str = "r", name: str = "flow", **options: Any) -> None:
    """A run that the old code has left suspended."""
    async with client(store, Workflow(name, body, **options), unload_grace=0) as before:
        assert isinstance(await before.run(name, *args, id=run_id), Suspended)


async def check(store: Store, *flows: Workflow[Any, Any], **options: Any) -> CheckReport:
    """The report of new code, after it was seen that nothing has changed, nobody was told and nothing was warned of."""
    told: list[Any] = []
    stored = await everything_in(store)
    patience = options.pop("patience", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with client(store, *flows, on_event=told.append, **options) as after, asyncio.timeout(PATIENCE):
            report = await after.check(patience=patience)
    assert await everything_in(store) == stored
    assert told == []
    return report


async def check_one(store: Store, body: Body, *, name: str = "flow", patience: float = 5, **options: Any) -> RunCheck:
    """What the report of new code says of the one run that there is."""
    report = await check(store, Workflow(name, body, **options), patience=patience, unload_grace=0)
    (found,) = report.results
    return found


async def put_entry(store: Store, run_id: str, entry: Entry) -> None:
    """Add an entry to the journal of a suspended run as its holder would."""
    claim = await store.acquire(run_id, 30, due_only=False)
    assert claim is not None
    await store.record(claim.lease, [entry])
    await store.release(claim.lease)


def two_steps(effects: Effects, first: str = "a", second: str = "b", **options: Any) -> Body:
    async def flow(ctx: Context) -> str:
        await effects.step(ctx, first, **options)
        await effects.step(ctx, second)
        return str(await ctx.wait_for_signal("go"))

    return flow


@pytest.fixture
async def stored(store: Store, effects: Effects) -> Store:
    """A store with one run that recorded the steps a and b and waits for a signal that is there already."""
    await start(store, two_steps(effects))
    await store.signal("r", "go", b'"gone"')
    assert effects.calls == ["a", "b"]
    effects.calls.clear()
    return store


async def test_the_same_code_fits(stored: Store, effects: Effects) -> None:
    assert await check_one(stored, two_steps(effects)) == RunCheck(run_id="r", workflow="flow", version=1, verdict="fits")
    assert effects.calls == []
    async with client(stored, Workflow("flow", two_steps(effects)), unload_grace=0) as after:
        assert await after.resume("r") == Ok("gone")


async def test_steps_that_come_after_what_is_recorded_fit(stored: Store, effects: Effects) -> None:
    async def longer(ctx: Context) -> str:
        await two_steps(effects)(ctx)
        return await effects.step(ctx, "c")

    async def with_a_step_before_the_wait(ctx: Context) -> str:
        await effects.step(ctx, "a")
        await effects.step(ctx, "b")
        return await effects.step(ctx, "c")

    assert (await check_one(stored, longer, on_definition_change="ignore")).verdict == "fits"
    assert (await check_one(stored, with_a_step_before_the_wait, on_definition_change="ignore")).verdict == "fits"
    assert effects.calls == []


async def test_a_renamed_step_stops_and_the_report_names_both_keys(stored: Store, effects: Effects) -> None:
    found = await check_one(stored, two_steps(effects, "a", "renamed"))
    assert (found.verdict, found.at) == ("stops", "renamed")
    assert found.problem is not None
    assert "stopped before 'renamed', which is new: 'b' is recorded" in found.problem
    assert effects.calls == []


async def test_the_problem_is_the_one_that_a_worker_would_store(stored: Store, effects: Effects) -> None:
    found = await check_one(stored, two_steps(effects, "a", "renamed"))
    async with client(stored, Workflow("flow", two_steps(effects, "a", "renamed")), unload_grace=0) as after:
        outcome = (await after.sweep())["r"]
    assert isinstance(outcome, Err)
    row = await stored.get("r")
    assert row is not None
    assert row.problem == found.problem
    assert effects.calls == []


async def test_a_renamed_step_beside_others_stops(store: Store, effects: Effects) -> None:
    def both(first: str) -> Body:
        async def flow(ctx: Context) -> Any:
            await asyncio.gather(effects.step(ctx, first), effects.step(ctx, "b"))
            return await ctx.wait_for_signal("go")

        return flow

    await start(store, both("a"))
    assert (await check_one(store, both("a"))).verdict == "fits"
    found = await check_one(store, both("renamed"))
    assert (found.verdict, found.at) == ("stops", "renamed")
    assert effects.calls == ["a", "b"]


async def test_aliases_retired_names_and_the_old_tolerance_fit(stored: Store, effects: Effects) -> None:
    async def without_a(ctx: Context) -> None:
        await effects.step(ctx, "b")
        await effects.step(ctx, "c")

    ignore: dict[str, Any] = {"on_changed_arguments": "ignore", "on_definition_change": "ignore"}
    assert (await check_one(stored, two_steps(effects, "renamed", aliases=["a"]), **ignore)).verdict == "fits"
    assert (await check_one(stored, without_a, **ignore)).verdict == "stops"
    assert (await check_one(stored, without_a, retired={"a"}, **ignore)).verdict == "fits"
    assert (await check_one(stored, without_a, on_divergence="run", **ignore)).verdict == "fits"
    assert effects.calls == []


async def test_a_workflow_that_was_renamed_is_found_by_its_alias(stored: Store, effects: Effects) -> None:
    renamed = Workflow("renamed", two_steps(effects), aliases=["flow"])
    async with client(stored, renamed) as after:
        assert [each.verdict for each in (await after.check(workflow=renamed)).results] == ["fits"]
        assert (await after.check(workflow="renamed")).results == ()


async def test_a_step_that_became_a_sleep_stops(stored: Store) -> None:
    async def flow(ctx: Context) -> None:
        await ctx.sleep("a", "1h")

    found = await check_one(stored, flow)
    assert (found.verdict, found.at) == ("stops", "a")
    assert found.problem is not None
    assert "recorded 'a' as a step, but the code now asks for it as a sleep" in found.problem


async def test_changed_code_and_other_arguments_warn_or_stop_as_the_options_say(stored: Store, effects: Effects) -> None:
    async def flow(ctx: Context) -> Any:
        await ctx.step("a", effects.do, "other")
        await effects.step(ctx, "b")
        return await ctx.wait_for_signal("go")

    found = await check_one(stored, flow)
    code, arguments = found.warnings
    assert (found.verdict, found.problem) == ("warns", None)
    assert "the code of 'flow' has changed" in code
    assert "recorded 'a' as called with other arguments" in arguments
    found = await check_one(stored, flow, on_changed_arguments="error", on_definition_change="ignore")
    assert (found.verdict, found.at, found.warnings) == ("stops", "a", ())
    found = await check_one(stored, flow, on_definition_change="error")
    assert (found.verdict, found.at, found.warnings) == ("stops", None, ())
    assert (await check_one(stored, flow, on_changed_arguments="ignore", on_definition_change="ignore")).verdict == "fits"
    assert effects.calls == []


async def test_a_removed_step_before_a_wait_warns_that_it_may_stop_later(stored: Store, effects: Effects) -> None:
    async def flow(ctx: Context) -> Any:
        await effects.step(ctx, "b")
        return await ctx.wait_for_signal("go")

    found = await check_one(stored, flow, on_definition_change="ignore")
    assert found.verdict == "warns"
    (warning,) = found.warnings
    assert warning.startswith("'a' is recorded and not asked for up to where the run waits, so it stops if it asks for")
    assert warning.endswith("removed: @workflow(retired={'a'})")
    assert (await check_one(stored, flow, on_definition_change="ignore", retired={"a"})).verdict == "fits"


async def test_a_body_that_ends_early_stops(stored: Store, effects: Effects) -> None:
    async def flow(ctx: Context) -> str:
        return await effects.step(ctx, "a")

    found = await check_one(stored, flow, on_definition_change="ignore", on_unknown_steps="ignore")
    assert (found.verdict, found.at) == ("stops", None)
    assert "was stopped where its function ends: 'b' is recorded and this code does not ask for it" in str(found.problem)
    assert (await check_one(stored, flow, on_definition_change="ignore", retired={"b"})).verdict == "fits"
    assert (await check_one(stored, flow, on_definition_change="ignore", on_divergence="run")).verdict == "fits"


async def test_a_body_that_raises_by_itself_would_fail_the_run(stored: Store, effects: Effects) -> None:
    async def flow(ctx: Context) -> str:
        value: Any = await effects.step(ctx, "a")
        return str(value.cents)

    found = await check_one(stored, flow)
    assert found.verdict == "stops"
    assert "where its function raises AttributeError: 'str' object has no attribute 'cents' (test_check.py:" in str(found.problem)
    found = await check_one(stored, flow, retired={"b"})
    assert found.verdict == "stops"
    said = "the body raises an error of its own, and the run would fail: AttributeError: 'str' object has no attribute 'cents'"
    assert found.problem == said


async def test_a_body_that_ends_with_a_recorded_error_fits(store: Store) -> None:
    async def fail() -> None:
        raise ValueError("not today")

    async def careful(ctx: Context) -> None:
        try:
            await ctx.step(fail)
        except ValueError:
            await ctx.wait_for_signal("go")

    async def careless(ctx: Context) -> None:
        await ctx.step(fail)

    await start(store, careful)
    assert (await check_one(store, careless, on_definition_change="ignore")).verdict == "fits"


@dataclass
class Money:
    cents: int


@dataclass
class Price:
    euros: int


async def test_a_record_and_an_input_that_the_code_cannot_read_stop(store: Store) -> None:
    def flow_of(kind: Any, taken: Any) -> Body:
        async def flow(ctx: Context, amount: Any) -> Any:
            await ctx.step("price", lambda: Money(1), returns=kind)
            return await ctx.wait_for_signal("go")

        flow.__annotations__["amount"] = taken
        return flow

    await start(store, flow_of(Money, Money), Money(2))
    ignore: dict[str, Any] = {"on_definition_change": "ignore"}
    assert (await check_one(store, flow_of(Money, Money), **ignore)).verdict == "fits"
    record = await check_one(store, flow_of(Price, Money), **ignore)
    read = await check_one(store, flow_of(Money, Price), **ignore)
    assert (record.verdict, read.verdict) == ("stops", "stops")
    assert "the record of step 'price' of run 'r' cannot be read back" in str(record.problem)
    assert "the input of run 'r' cannot be read back" in str(read.problem)


async def test_a_journal_that_cannot_be_read_stops(stored: Store, effects: Effects) -> None:
    await put_entry(stored, "r", Entry(seq=4, key="", phase="drop", kind="run", payload=b"{"))
    found = await check_one(stored, two_steps(effects))
    assert found.verdict == "stops"
    assert "the journal of run 'r' cannot be read back" in str(found.problem)


async def test_a_workflow_or_a_version_that_is_missing_here_is_unknown(stored: Store, effects: Effects) -> None:
    found = await check_one(stored, two_steps(effects), version=2)
    assert (found.verdict, found.version) == ("unknown", 1)
    assert "goes on in version 1 of workflow 'flow', and registered here is version 2" in str(found.problem)
    (found,) = (await check(stored, nap)).results
    assert (found.verdict, found.workflow) == ("unknown", "flow")
    assert "workflow 'flow' is not registered here (registered: nap)" in str(found.problem)


async def test_a_run_that_was_restored_without_its_input_is_unknown(store: Store) -> None:
    foreign = {
        "formatVersion": 1,
        "workflowName": "greet",
        "steps": {"greet": {"ok": True, "value": "hi"}},
        "execution": {"status": "running", "lastUpdated": "2026-01-31T12:00:00Z"},
    }
    await require(store, "operators").save("p", foreign)
    (found,) = (await check(store, greet)).results
    assert (found.verdict, found.problem) == (
        "unknown",
        "it was restored without its input, and waits for a start that brings it",
    )


async def test_a_body_that_hangs_is_unknown_and_unloaded(stored: Store, effects: Effects) -> None:
    ended: list[str] = []

    async def flow(ctx: Context) -> None:
        await effects.step(ctx, "a")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("unloaded")

    found = await check_one(stored, flow, patience=0.05)
    assert (found.verdict, found.problem) == ("unknown", "its body was busy with something of its own for 0.05 s")
    assert ended == ["unloaded"]


async def test_a_body_that_polls_something_for_ever_is_unknown(stored: Store, effects: Effects) -> None:
    async def flow(ctx: Context) -> None:
        await effects.step(ctx, "a")
        while True:  # noqa: ASYNC110 - the very thing that is tested
            await asyncio.sleep(0)

    assert (await check_one(stored, flow, patience=0.05)).verdict == "unknown"


@pytest.mark.parametrize("wait", [own_wait, asyncio.sleep])
async def test_a_body_with_a_wait_of_its_own_is_waited_for(stored: Store, effects: Effects, wait: Any) -> None:
    def slow(second: str) -> Body:
        async def flow(ctx: Context) -> Any:
            await effects.step(ctx, "a")
            await wait(0.02)
            await effects.step(ctx, second)
            await wait(0.02)
            return await ctx.wait_for_signal("go")

        return flow

    assert (await check_one(stored, slow("b"), on_definition_change="ignore")).verdict == "fits"
    assert (await check_one(stored, slow("renamed"))).verdict == "stops"
    assert effects.calls == []


async def test_a_patch_gives_what_it_would_give(store: Store, effects: Effects) -> None:
    taken: list[bool] = []

    async def short(ctx: Context) -> Any:
        await effects.step(ctx, "a")
        return await ctx.wait_for_signal("go")

    async def patched(ctx: Context) -> Any:
        await effects.step(ctx, "a")
        if (await asyncio.gather(ctx.patched("fraud-check"), asyncio.sleep(0)))[0]:
            taken.append(True)
            await effects.step(ctx, "fraud")
        else:
            taken.append(False)
        await effects.step(ctx, "b")
        return await ctx.wait_for_signal("go")

    ignore: dict[str, Any] = {"on_definition_change": "ignore"}
    await start(store, two_steps(effects), run_id="past")
    assert (await check_one(store, patched, **ignore)).verdict == "fits"
    assert taken == [False]
    await require(store, "operators").delete("past")
    await start(store, short, run_id="before")
    assert (await check_one(store, patched, **ignore)).verdict == "fits"
    assert taken == [False, True]

    async def broken(ctx: Context) -> None:
        await effects.step(ctx, "a")
        if await ctx.patched("fraud-check"):
            raise LookupError("no such check")

    assert (await check_one(store, broken, **ignore)).verdict == "stops"
    assert effects.calls == ["a", "b", "a"]


async def test_a_map_with_lowered_concurrency_fits(store: Store, effects: Effects) -> None:
    def mapping(concurrency: int, name: str = "item") -> Body:
        async def each(item: int) -> int:
            effects.calls.append(f"{item}")
            return item

        async def flow(ctx: Context) -> Any:
            await ctx.map(name, each, range(8), concurrency=concurrency)
            return await ctx.wait_for_signal("go")

        return flow

    await start(store, mapping(8))
    effects.calls.clear()
    assert (await check_one(store, mapping(2), on_definition_change="ignore")).verdict == "fits"
    assert (await check_one(store, mapping(2, "renamed"))).at == "renamed[0]"
    assert effects.calls == []


async def test_a_race_a_time_limit_and_a_retry_in_its_pause_fit(store: Store, effects: Effects) -> None:
    async def fail() -> None:
        effects.calls.append("fail")
        raise ValueError("not yet")

    async def flow(ctx: Context) -> Any:
        await ctx.race(ctx.wait_for_signal("never"), effects.step(ctx, "a"))
        async with ctx.timeout("limit", "1d"):
            await ctx.step(fail, retry=5)

    await start(store, flow)
    assert (await check_one(store, flow)).verdict == "fits"
    assert effects.calls == ["a", "fail"]


async def test_a_cache_is_neither_asked_nor_written(store: Store, effects: Effects) -> None:
    class Cache(dict[str, str]):
        asked = 0

        def get(self, *args: Any) -> Any:
            self.asked += 1
            return super().get(*args)

    cache = Cache()

    async def flow(ctx: Context) -> Any:
        for _ in range(2):
            await effects.step(ctx, "a", key="user:1")
        await ctx.wait_for_signal("go")
        await effects.step(ctx, "b", key="user:2")

    async def longer(ctx: Context) -> Any:
        for _ in range(2):
            await effects.step(ctx, "a", key="user:1")
        await effects.step(ctx, "b", key="user:2")

    await start(store, flow, cache=cache)
    kept, cache.asked = dict(cache), 0
    assert (await check_one(store, flow, cache=cache)).verdict == "fits"
    assert (await check_one(store, longer, cache=cache, on_definition_change="ignore")).verdict == "fits"
    assert (dict(cache), cache.asked, effects.calls) == (kept, 0, ["a"])


async def test_deps_are_passed(store: Store) -> None:
    async def flow(ctx: Context) -> Any:
        return await ctx.wait_for_signal(ctx.deps["signal"])

    await start(store, flow, deps={"signal": "go"})
    (found,) = (await check(store, Workflow("flow", flow), deps={"signal": "go"})).results
    assert found.verdict == "fits"


async def test_a_run_that_is_to_be_cancelled_or_was_claimed_too_often_or_is_held_fits(stored: Store, effects: Effects) -> None:
    await stored.cancel("r")
    await require(stored, "operators").hold("r")
    (found,) = (await check(stored, Workflow("flow", two_steps(effects)), max_attempts=0)).results
    assert found.verdict == "fits"


async def test_pending_running_and_suspended_runs_are_checked_and_ended_ones_are_not(store: Store, effects: Effects) -> None:
    async with client(store, greet, ask) as runtime:
        await runtime.run(greet, "Ada", id="ended")
        await runtime.start(greet, "Ada", id="pending")
        await runtime.run(ask, id="suspended")
        await runtime.start(greet, "Ada", id="running")
        assert await store.acquire("running", 30) is not None
    report = await check(store, greet, ask)
    assert (
        {each.run_id for each in report.fits} == {"pending", "suspended", "running"} == {each.run_id for each in report.results}
    )


async def test_a_run_that_a_worker_drives_at_the_same_moment_is_only_read(store: Store) -> None:
    gate = Gate()
    async with Runtime(store, [gate.flow]) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(gate.flow, id="g1")
        await gate.reached.wait()
        before = await store.get("g1")
        report = await runtime.check()
        assert [(each.run_id, each.verdict) for each in report.results] == [("g1", "fits")]
        after = await store.get("g1")
        assert before is not None
        assert after is not None
        assert (before.epoch, before.lease_owner, before.status) == (after.epoch, after.lease_owner, after.status)
        gate.opened.set()
        assert await run == "through"
    assert (gate.calls, gate.cancelled) == (1, 0)


async def test_checks_beside_a_worker_disturb_no_run(store: Store, effects: Effects) -> None:
    flow = Workflow("flow", two_steps(effects))
    async with Runtime(store, [flow], unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        runs = [await runtime.start(flow, id=f"r{n}") for n in range(20)]
        for run in runs:
            assert await runtime.check()
            await run.signal("go", run.id)
        assert [await run for run in runs] == [run.id for run in runs]
        assert (await runtime.check()).results == ()
    assert sorted(effects.calls) == ["a"] * 20 + ["b"] * 20


async def test_three_hundred_runs(store: Store, effects: Effects) -> None:
    flow = Workflow("flow", two_steps(effects))
    async with client(store, flow, nap, unload_grace=0) as before:
        for number in range(300):
            await (before.run(flow, id=f"f{number}") if number % 3 else before.start(nap, id=f"n{number}"))
    report = await check(store, Workflow("flow", two_steps(effects, "a", "renamed")), nap)
    assert (len(report.fits), len(report.stops), len({each.run_id for each in report.results})) == (100, 200, 300)
    async with client(store, flow, nap) as after:
        assert len((await after.check(limit=150)).results) == 150
        assert len((await after.check(workflow=nap)).results) == 100
        assert {each.run_id for each in (await after.check(prefix="n29")).results} == {"n291", "n294", "n297"}
    assert len(effects.calls) == 400


async def test_a_report_reads_in_a_terminal(stored: Store, effects: Effects) -> None:
    async with client(stored, nap) as before:
        await before.start(nap, id="n")
    report = await check(stored, Workflow("flow", two_steps(effects, "a", "renamed"), on_definition_change="ignore"), nap)
    assert not report
    first, stop, why = str(report).splitlines()
    assert first == "checked 2: fits 1, stops 1, unknown 0, warns 0"
    assert stop == "stops: 1 run of flow (version 1) at 'renamed': r"
    assert why.startswith("  the run was stopped before 'renamed', which is new")
    assert await check(stored, nap)  # what is unknown does not stop
    assert CheckReport(())


async def test_runs_that_stop_for_one_reason_are_listed_together_and_a_warning_does_not_say_that_a_run_does_not_fit(
    store: Store, effects: Effects
) -> None:
    for run_id in ("r", "s"):
        await start(store, two_steps(effects), run_id=run_id)
    report = await check(store, Workflow("flow", two_steps(effects, "a", "renamed"), on_definition_change="ignore"))
    (stops,) = report.reasons
    assert (stops.verdict, stops.workflow, stops.at, set(stops.run_ids)) == ("stops", "flow", "renamed", {"r", "s"})
    assert "'r'" not in stops.reason

    async def changed(ctx: Context) -> str:
        await effects.step(ctx, "a")
        await effects.step(ctx, "b")
        return f"{await ctx.wait_for_signal('go')}"

    warned = await check(store, Workflow("flow", changed))
    assert (bool(warned), len(warned.warns), len(warned.reasons)) == (True, 2, 1)
    assert "not fit" not in str(warned)


@pytest.mark.parametrize("bad", [0, -1, True, "1", 2**31, 2**64])
async def test_a_number_that_no_store_takes_is_refused(store: Store, bad: Any) -> None:
    async with client(store) as runtime:
        for ask in (runtime.check, runtime.list, runtime.stuck_runs, runtime.approvals, runtime.sweep):
            with pytest.raises(ValueError, match="limit must be"):
                await ask(limit=bad)
        with pytest.raises(ValueError, match="limit must be"):
            await store.list(limit=bad)
        with pytest.raises(ValueError, match="batch must be"):
            await runtime.cancel_many(all=True, batch=bad)


async def test_no_patience_is_refused(store: Store) -> None:
    async with client(store) as runtime:
        with pytest.raises(ValueError, match="patience must be longer than zero"):
            await runtime.check(patience=0)


async def test_a_check_that_is_cancelled_ends_the_body(stored: Store, effects: Effects) -> None:
    reached = asyncio.Event()
    ended: list[str] = []

    async def flow(ctx: Context) -> None:
        await effects.step(ctx, "a")
        reached.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("unloaded")

    async with client(stored, Workflow("flow", flow)) as after:
        checking = asyncio.create_task(after.check())
        await reached.wait()
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking
    assert ended == ["unloaded"]


async def test_a_check_leaves_no_drive_behind(stored: Store, effects: Effects) -> None:
    await check_one(stored, two_steps(effects))
    gc.collect()
    assert [found for found in gc.get_objects() if isinstance(found, ReplayCheck)] == []


@workflow
async def unregistered(ctx: Context) -> None:
    await ctx.wait_for_signal("go")


async def test_a_workflow_that_is_passed_is_registered(store: Store) -> None:
    async with client(store, unregistered) as before:
        await before.run(unregistered, id="u")
    async with client(store) as after:
        assert [each.verdict for each in (await after.check(workflow=unregistered)).results] == ["fits"]


VERDICTS = {
    "nothing": "fits",
    "insert before": "stops",
    "insert between": "stops",
    "insert after": "fits",
    "insert at the wait": "fits",
    "remove": "warns",
    "remove, with nothing new after it": "warns",
    "rename": "stops",
    "swap two": "fits",
}


@pytest.mark.parametrize("deploy", DEPLOYS)
async def test_the_deploy_matrix(deploy: str) -> None:
    changed, _, mended, options = DEPLOYS[deploy]
    made, store = DeployEffects(), stores.memory()
    await start(store, made.body(*BEFORE))
    options = {"on_definition_change": "ignore", **options}
    assert (await check_one(store, made.body(*changed), on_definition_change="ignore")).verdict == VERDICTS[deploy]
    assert (await check_one(store, made.body(*mended), **options)).verdict == "fits"
    assert made.count == {"charge": 1, "mail": 1}


async def kill_and_check(body: TimedBody, seed: int, dies_at: int) -> None:
    made, store = World(seed), stores.memory()
    mortal: Any = MortalStore(SlowStore(store, random.Random(seed)), dies_at, after_commit=True)
    await drive_to_the_end(mortal, flow_of(body, made))
    ran = made.ran.copy()
    async with client(store, flow_of(body, made), clock=LoopClock(), unload_grace=0.5) as after:
        report = await after.check()
    row = await store.get("run")
    assert report.fits == report.results, report
    assert row is not None
    assert row.ended or report.fits
    assert made.ran == ran


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_unchanged_code_fits_wherever_it_was_killed(body: TimedBody) -> None:
    for seed in range(times(100)):
        writes = simulate(undisturbed(body, seed)).writes
        for dies_at in range(1, writes) if IS_FULL else random.Random(seed).choices(range(1, writes), k=5):
            simulate(kill_and_check(body, seed, dies_at))
