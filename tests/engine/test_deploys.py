"""Code that changes under stored runs: what stops a run, that no effect happens twice, and that every stopped run goes on."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, current_step, step, stores
from perdure.errors import PerdureError, RunCancelled, RunConflict, RunDiverged, SnapshotCorrupt
from perdure.store import FullStore
from perdure.testing import ManualClock
from tests.engine.worlds import world
from tests.patience import PATIENCE
from tests.simulation import LoopClock, simulate

Body = Callable[[Context[Any]], Coroutine[Any, Any, Any]]


class Effects:
    """Step functions whose effects are counted, and a body made from a list of keys."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    async def work(self, key: str) -> str:
        self.count[key] += 1
        return key

    def body(self, *keys: str, **aliases: list[str]) -> Body:
        """The keys as steps, in this order; "nap" is a sleep that lets the run be stored."""

        async def flow(ctx: Context[Any]) -> list[str]:
            done: list[str] = []
            for key in keys:
                if key == "nap":
                    await ctx.sleep("nap", "1h")
                else:
                    done.append(await ctx.step(key, self.work, key, aliases=aliases.get(key, [])))
            return done

        return flow


async def drive(store: FullStore, definition: Workflow[Any, Any], later: str = "0s") -> Any:
    """What a worker with this code makes of the run when so much time has passed."""
    async with world(definition, store=store) as here:
        here.clock.advance(f"{CLOCK.spend(later)}s")
        return (await here.runtime.sweep()).get("run")


class Spent:
    """How much time has passed in this test, for clocks that start anew with each worker."""

    seconds = 0

    def spend(self, later: str) -> int:
        self.seconds += int(later.removesuffix("s"))
        return self.seconds


CLOCK = Spent()


@pytest.fixture(autouse=True)
def _new_clock() -> None:
    CLOCK.seconds = 0


async def begin(store: FullStore, definition: Workflow[Any, Any]) -> None:
    async with world(definition, store=store) as here:
        assert isinstance(await here.runtime.run(definition.name, id="run"), Suspended)


BEFORE = ["charge", "mail", "nap", "end"]

# The new code, whether it is stopped, and the code that mends it.
DEPLOYS: dict[str, tuple[list[str], bool, list[str], dict[str, Any]]] = {
    "nothing": (BEFORE, False, BEFORE, {}),
    "insert before": (["new", *BEFORE], True, BEFORE, {}),
    "insert between": (["charge", "new", "mail", "nap", "end"], True, BEFORE, {}),
    "insert after": (["charge", "mail", "nap", "new", "end"], False, BEFORE, {}),
    "insert at the wait": (["charge", "mail", "new", "nap", "end"], False, BEFORE, {}),
    "remove": (["mail", "nap", "end"], True, ["mail", "nap", "end"], {"retired": {"charge"}}),
    "remove, with nothing new after it": (["mail", "nap"], True, ["mail", "nap"], {"retired": {"charge"}}),
    "rename": (["charge card", "mail", "nap", "end"], True, BEFORE, {}),
    "swap two": (["mail", "charge", "nap", "end"], False, BEFORE, {}),
}


@pytest.mark.parametrize("deploy", DEPLOYS)
@pytest.mark.parametrize("policy", ["stop", "run"])
async def test_the_deploy_matrix(deploy: str, policy: Any) -> None:
    changed, is_stopped, mended, options = DEPLOYS[deploy]
    effects, store = Effects(), stores.memory()
    quiet: dict[str, Any] = {"on_unknown_steps": "ignore", "on_definition_change": "ignore"}
    await begin(store, Workflow("flow", effects.body(*BEFORE)))
    outcome = await drive(store, Workflow("flow", effects.body(*changed), on_divergence=policy, **quiet), "3600s")
    if policy == "run" or not is_stopped:
        assert outcome == Ok([key for key in changed if key != "nap"])
    else:
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunDiverged)
        assert effects.count == {"charge": 1, "mail": 1}, "nothing happened"
        row = await store.get("run")
        assert row is not None
        assert (row.status, row.problem, row.attempts) == ("pending", str(outcome.error), row.attempts)
        outcome = await drive(store, Workflow("flow", effects.body(*mended), **quiet, **options), "5s")
        assert outcome == Ok([key for key in mended if key != "nap"])
        row = await store.get("run")
        assert row is not None
        assert (row.status, row.problem) == ("completed", None)
    if policy == "stop":
        assert set(effects.count.values()) == {1}


async def test_a_renamed_step_with_an_alias_goes_on_under_its_former_name() -> None:
    effects, store = Effects(), stores.memory()
    await begin(store, Workflow("flow", effects.body(*BEFORE)))
    renamed = effects.body("charge card", "mail", "nap", "end", **{"charge card": ["debit", "charge"]})
    outcome = await drive(store, Workflow("flow", renamed, on_definition_change="ignore", on_changed_arguments="ignore"), "3600s")
    assert outcome == Ok(["charge", "mail", "end"])
    assert effects.count == {"charge": 1, "mail": 1, "end": 1}


async def test_a_step_in_doubt_keeps_the_idempotency_key_of_its_oldest_name() -> None:
    keys: list[str] = []

    async def charge() -> None:
        keys.append(current_step().idempotency_key)

    @step(aliases=["charge", "charge card"])
    async def debit() -> None:
        keys.append(current_step().idempotency_key)

    async def old(ctx: Context[Any]) -> None:
        await ctx.step(charge)

    async def new(ctx: Context[Any]) -> None:
        await ctx.step(debit)

    for body in (old, new):
        async with world(Workflow("flow", body)) as here:
            assert await here.runtime.run("flow", id="run") == Ok(None)
    assert keys == ["run/charge"] * 2


async def test_items_of_a_map_have_aliases_too_and_a_lowered_concurrency_stops_nothing() -> None:
    effects, store = Effects(), stores.memory()

    def flow(name: str, concurrency: int, *aliases: str) -> Workflow[Any, Any]:
        async def body(ctx: Context[Any]) -> Any:
            done = await ctx.map(name, effects.work, ["a", "b", "c", "d"], concurrency=concurrency, aliases=aliases)
            await ctx.sleep("nap", "1h")
            other = asyncio.ensure_future(ctx.step("new", effects.work, "new"))
            return [*done, await other]

        return Workflow("flow", body, on_definition_change="ignore")

    await begin(store, flow("each", 4))
    assert await drive(store, flow("every", 1, "each"), "3600s") == Ok(["a", "b", "c", "d", "new"])
    assert set(effects.count.values()) == {1}


async def test_a_retired_step_is_not_missed() -> None:
    effects, store = Effects(), stores.memory()
    await begin(store, Workflow("flow", effects.body(*BEFORE)))
    changed = Workflow("flow", effects.body("new", "mail", "nap", "end"), retired={"charge"}, on_definition_change="ignore")
    outcome = await drive(store, changed, "3600s")
    assert isinstance(outcome, Err), "mail is recorded as well, and not asked for before `new`"
    effects.count.clear()
    fits = Workflow("flow", effects.body("mail", "new", "nap", "end"), retired={"charge"}, on_definition_change="ignore")
    assert await drive(store, fits, "5s") == Ok(["mail", "new", "end"])
    assert effects.count == {"new": 1, "end": 1}


@pytest.mark.parametrize("began_under", ["the old code", "the new code"])
async def test_patched_decides_once_for_each_run(began_under: str) -> None:
    effects, store = Effects(), stores.memory()

    async def new(ctx: Context[Any]) -> list[Any]:
        is_new = await ctx.patched("fraud-check")
        if is_new:
            await ctx.step("check", effects.work, "check")
        await ctx.step("charge", effects.work, "charge")
        await ctx.sleep("nap", "1h")
        return [is_new, await ctx.patched("fraud-check")]

    began = effects.body("charge", "nap") if began_under == "the old code" else new
    await begin(store, Workflow("flow", began))
    is_new = began_under == "the new code"
    assert await drive(store, Workflow("flow", new, on_definition_change="ignore"), "3600s") == Ok([is_new, is_new])
    assert effects.count == ({"check": 1, "charge": 1} if is_new else {"charge": 1})
    keys = [entry.key for entry in await store.journal("run") if entry.phase == "close"]
    assert keys == (["patched:fraud-check", "check", "charge", "nap"] if is_new else ["charge", "nap"])


async def test_patched_in_a_branch_beside_others() -> None:
    effects, store = Effects(), stores.memory()

    def flow(*, has_patch: bool) -> Workflow[Any, Any]:
        async def left(ctx: Context[Any]) -> bool:
            is_new = has_patch and await ctx.patched("left")
            if is_new:
                await ctx.step("inserted", effects.work, "inserted")
            await ctx.step("left", effects.work, "left")
            return is_new

        async def body(ctx: Context[Any]) -> Any:
            both = await asyncio.gather(left(ctx), ctx.step("right", effects.work, "right"))
            await ctx.sleep("nap", "1h")
            return both

        return Workflow("flow", body, on_definition_change="ignore")

    await begin(store, flow(has_patch=False))
    assert await drive(store, flow(has_patch=True), "3600s") == Ok([False, "right"])
    assert effects.count == {"left": 1, "right": 1}


async def test_a_run_that_does_not_fit_is_tried_again_with_growing_pauses_and_counts_no_attempt() -> None:
    effects, store = Effects(), stores.memory()
    await begin(store, Workflow("flow", effects.body(*BEFORE)))
    row = await store.get("run")
    assert row is not None
    attempts = row.attempts
    wrong = Workflow("flow", effects.body("new", *BEFORE), on_definition_change="ignore")
    async with world(wrong, store=store, max_attempts=3) as here:
        here.clock.advance("1h")
        for pause in [5, 10, 20, 40, 80, 160, 300, 300]:
            assert isinstance((await here.runtime.sweep())["run"], Err)
            here.clock.advance(f"{pause - 1}s")
            assert await here.runtime.sweep() == {}
            here.clock.advance("1s")
        run = await here.runtime.get("run")
        assert run is not None
        assert "was stopped before 'new'" in (await run.problem() or "")
        assert "was stopped before 'new'" in ((await here.runtime.list())[0].problem or "")
    row = await store.get("run")
    assert row is not None
    assert row.attempts <= attempts
    assert effects.count == {"charge": 1, "mail": 1}


@dataclass
class Address:
    street: str


@dataclass
class Moved:
    street: str
    city: str


async def test_a_record_that_the_new_class_cannot_read_stops_the_run_until_it_can() -> None:
    store = stores.memory()

    def flow(kind: Any) -> Workflow[Any, Any]:
        async def locate() -> Any:
            return Address("Main St")

        async def body(ctx: Context[Any]) -> Any:
            found = await ctx.step("locate", locate, returns=kind)
            await ctx.sleep("nap", "1h")
            return found.street

        return Workflow("flow", body, on_definition_change="ignore")

    await begin(store, flow(Address))
    outcome = await drive(store, flow(Moved), "3600s")
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, SnapshotCorrupt)
    assert await drive(store, flow(Address), "5s") == Ok("Main St")


async def test_a_renamed_workflow_takes_the_runs_of_its_former_name() -> None:
    effects, store = Effects(), stores.memory()
    await begin(store, Workflow("flow", effects.body(*BEFORE)))
    assert await drive(store, Workflow("payment", effects.body(*BEFORE)), "3600s") is None, "not its run"
    renamed = Workflow("payment", effects.body(*BEFORE), aliases=["flow"], on_definition_change="ignore")
    assert await drive(store, renamed) == Ok(["charge", "mail", "end"])
    assert set(effects.count.values()) == {1}


async def test_a_run_is_found_under_the_former_name_of_its_workflow_by_its_id_too() -> None:
    effects, store = Effects(), stores.memory()
    old = Workflow("flow", effects.body("charge"))
    assert await old.run(id="run", store=store) == Ok(["charge"])
    renamed = Workflow("payment", effects.body("charge"), aliases=["flow"])
    assert await renamed.run(id="run", store=store) == Ok(["charge"])
    other = Workflow("other", effects.body("charge"), aliases=["flowing"])
    with pytest.raises(RunConflict, match="another workflow"):
        await other.run(id="run", store=store)
    assert effects.count == {"charge": 1}


async def test_an_old_and_a_new_version_go_on_side_by_side() -> None:
    effects, store = Effects(), stores.memory()
    old = Workflow("flow", effects.body(*BEFORE))
    new = Workflow("flow", effects.body("other", "nap"), version=2)
    await begin(store, old)
    async with world(old, new, store=store) as here:
        assert isinstance(await here.runtime.run("flow", id="newer"), Suspended)
        assert await here.later("1h") == {"run": Ok(["charge", "mail", "end"]), "newer": Ok(["other"])}
    assert set(effects.count.values()) == {1}


# What is no divergence although recorded results are left when something new begins.


async def test_what_came_after_a_failure_that_retry_set_aside_is_not_missed() -> None:
    effects, broken = Effects(), [True]

    async def body(ctx: Context[Any]) -> Any:
        async def fail() -> str:
            if broken:
                raise ValueError("broken")
            return "well"

        try:
            return await ctx.step(fail)
        except ValueError:
            await ctx.step("clean up", effects.work, "clean up")
            raise

    async with world(Workflow("flow", body)) as here:
        assert isinstance(await here.runtime.run("flow", id="run"), Err)
        broken.clear()
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("well")}


async def test_a_branch_that_is_busy_with_io_of_its_own_is_waited_for() -> None:
    effects, store = Effects(), stores.memory()

    def flow(pace: float) -> Workflow[Any, Any]:
        async def slow(ctx: Context[Any]) -> str:
            await asyncio.sleep(pace)
            return await ctx.step("slow", effects.work, "slow")

        async def body(ctx: Context[Any]) -> Any:
            both = asyncio.gather(slow(ctx), ctx.step("quick", effects.work, "quick"))
            if pace < 0.1:
                await both
                await ctx.sleep("nap", "1h")
            await ctx.step("new", effects.work, "new")
            return await both

        return Workflow("flow", body, on_definition_change="ignore")

    await begin(store, flow(0.05))
    # The clock stands still, so patience is the grace: the busy branch is given a second of the real loop.
    async with world(flow(0.2), store=store, unload_grace="1s") as here:
        here.clock.advance("1h")
        sweeping = asyncio.ensure_future(here.runtime.sweep())
        await asyncio.sleep(0.4)
        here.clock.advance("2s")
        assert await sweeping == {"run": Ok(["slow", "quick"])}
    assert set(effects.count.values()) == {1}


@pytest.mark.one_loop
async def test_nothing_new_begins_whenever_a_body_that_does_not_rest_asks_for_it() -> None:
    """After 200 turns such a body counts as at rest: about the first and the second time, each turn may be the one."""
    effects, store, spins = Effects(), stores.memory(), range(190, 420)

    async def before(ctx: Context[Any], turns: int) -> None:
        await ctx.step("charge", effects.work, "charge")
        await ctx.sleep("nap", "1h")

    async def after(ctx: Context[Any], turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await ctx.step("charge card", effects.work, "charge card")

    async with world(Workflow("flow", before), store=store) as here:
        for turns in spins:
            await here.runtime.run("flow", turns, id=f"run {turns}")
    async with world(Workflow("flow", after, on_definition_change="ignore"), store=store) as here:
        here.clock.advance("1h")
        outcomes = await here.runtime.sweep(limit=len(spins))
    assert len(outcomes) == len(spins)
    assert all(isinstance(outcome, Err) and isinstance(outcome.error, RunDiverged) for outcome in outcomes.values())
    assert effects.count == {"charge": len(spins)}


async def test_a_cancelled_run_is_not_judged() -> None:
    effects, store = Effects(), stores.memory()
    await begin(store, Workflow("flow", effects.body(*BEFORE)))
    async with world(Workflow("flow", effects.body("new", *BEFORE), on_definition_change="ignore"), store=store) as here:
        await here.runtime.cancel("run")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert not isinstance(outcome.error, RunDiverged)
    assert effects.count == {"charge": 1, "mail": 1}


async def test_changed_code_may_clean_up_when_its_run_is_cancelled() -> None:
    effects, store = Effects(), stores.memory()
    await begin(store, Workflow("flow", effects.body(*BEFORE)))

    async def changed(ctx: Context[Any]) -> None:
        try:
            await ctx.wait_for_signal("nobody sends it")
        finally:
            await ctx.step("clean up", effects.work, "clean up")

    async with world(Workflow("flow", changed, on_definition_change="ignore"), store=store) as here:
        await here.runtime.cancel("run")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
    assert effects.count == {"charge": 1, "mail": 1, "clean up": 1}


async def test_a_retried_step_in_its_pause_is_no_new_call() -> None:
    """It has an open entry, so it goes on although a result is left. It is recorded, and only the end of the run waits."""
    effects, store = Effects(), stores.memory()

    async def flaky() -> str:
        effects.count["flaky"] += 1
        if effects.count["flaky"] == 1:
            raise OSError("not yet")
        return "flaky"

    def flow(*keys: str) -> Workflow[Any, Any]:
        async def body(ctx: Context[Any]) -> Any:
            for key in keys:
                await ctx.step(key, effects.work, key)
            return await ctx.step(flaky, retry=Retry(2, wait_initial="1h", wait_max="1h", wait_jitter=0))

        return Workflow("flow", body, on_definition_change="ignore", on_unknown_steps="ignore")

    await begin(store, flow("charge", "mail"))
    for later in ("3600s", "5s"):
        outcome = await drive(store, flow("charge"), later)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunDiverged)
        assert (outcome.error.asked, outcome.error.missing) == (None, ["mail"])
    assert await drive(store, flow("charge", "mail"), "10s") == Ok("flaky")
    assert effects.count == {"charge": 1, "mail": 1, "flaky": 2}


def test_a_time_limit_of_asyncio_that_has_passed_passes_on_the_replay_too() -> None:
    """That it has passed is recorded, so the replay goes the same way although the step would be fast enough now."""
    effects, store = Effects(), stores.memory()

    async def hang() -> str:
        effects.count["hang"] += 1
        if effects.count["hang"] == 1:
            await asyncio.sleep(3600)
        return "in time"

    async def body(ctx: Context[Any]) -> Any:
        try:
            async with asyncio.timeout(10):
                value = await ctx.step(hang)
        except TimeoutError:
            value = await ctx.step("fallback", effects.work, "fallback")
        await ctx.sleep("nap", "1h")
        return value

    async def main() -> Any:
        runtime = Runtime(store, [Workflow("flow", body)], clock=LoopClock(), concurrency=0)
        await runtime.run("flow", id="run")
        await asyncio.sleep(4000)
        try:
            return await runtime.resume("run")
        finally:
            await runtime.close()

    assert simulate(main()) == Ok("fallback")
    assert effects.count == {"hang": 1, "fallback": 1}


async def test_a_step_recorded_after_a_task_group_failed_is_missed_when_it_is_renamed() -> None:
    """The group cancels its running child on the replay too, so what follows is owed."""
    effects, store = Effects(), stores.memory()

    async def hang() -> None:
        effects.count["hang"] += 1
        await asyncio.sleep(3600)

    async def fail() -> None:
        await asyncio.sleep(0.001)
        raise ValueError("stop the group")

    def flow(key: str) -> Workflow[Any, Any]:
        async def body(ctx: Context[Any]) -> str:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(ctx.step(hang))
                    group.create_task(ctx.step(fail))
            except ExceptionGroup:
                paid = await ctx.step(key, effects.work, "charge")
            await ctx.sleep("nap", "1h")
            return paid

        return Workflow("flow", body, on_definition_change="ignore")

    await begin(store, flow("charge"))
    outcome = await drive(store, flow("debit"), "3600s")
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunDiverged)
    assert await drive(store, flow("charge"), "5s") == Ok("charge")
    assert effects.count == {"hang": 1, "charge": 1}


def test_the_message_names_both_keys_and_the_ways_out() -> None:
    text = str(RunDiverged("run", "debit", ["charge", "mail"]))
    ways_out = ("aliases=['charge']", "retired={'charge'}", "ctx.patched", "on_divergence")
    assert all(part in text for part in ("'run'", "'debit'", "'charge', 'mail'", *ways_out))
    assert isinstance(RunDiverged("run", "a", ["b"]), PerdureError)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"aliases": "flow"}, "aliases= takes a list"),
        ({"retired": "charge"}, "retired= takes the names"),
        ({"on_divergence": "warn"}, "on_divergence is one of stop, run"),
        ({"version": 0}, "version"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        Workflow("flow", Effects().body(), **options)


async def test_a_run_is_stopped_by_a_random_key() -> None:
    effects, store = Effects(), stores.memory()
    keys = iter(["one", "two", "three"])

    async def body(ctx: Context[Any]) -> None:
        await ctx.step("work", effects.work, "charge", key=next(keys))
        await ctx.sleep("nap", "1h")

    flow = Workflow("flow", body)
    await begin(store, flow)
    outcome = await drive(store, flow, "3600s")
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunDiverged)
    assert effects.count == {"charge": 1}


async def test_a_worker_logs_a_problem_once_as_an_error_and_goes_on_once_it_is_mended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    effects, store = Effects(), stores.memory()
    await begin(store, Workflow("flow", effects.body(*BEFORE)))
    clock = ManualClock()
    clock.advance("1h")
    wrong = Workflow("flow", effects.body("new", *BEFORE), on_definition_change="ignore")
    with caplog.at_level(logging.INFO, "perdure"):
        async with Runtime(store, [wrong], clock=clock) as runtime:
            for count, pause in enumerate(("5s", "10s", "20s"), 1):
                await wait_for_problem(runtime, count)
                clock.advance(pause)
    levels = [record.levelname for record in caplog.records if "was stopped before 'new'" in record.getMessage()]
    assert levels[0] == "ERROR"
    assert set(levels[1:]) == {"INFO"}
    async with Runtime(store, [Workflow("flow", effects.body(*BEFORE))], clock=clock) as runtime:
        clock.advance("5m")
        run = await runtime.get("run")
        assert run is not None
        async with asyncio.timeout(PATIENCE):
            assert await run == ["charge", "mail", "end"]
    assert set(effects.count.values()) == {1}


async def wait_for_problem(runtime: Runtime, count: int) -> None:
    """Return when the worker has tried the run so often."""
    async with asyncio.timeout(PATIENCE):
        while (row := await runtime.store.get("run")) is None or row.problem_count < count or row.status != "pending":  # noqa: ASYNC110 - a worker at work
            await asyncio.sleep(0.01)
