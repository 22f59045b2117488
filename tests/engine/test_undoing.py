"""What was done is undone once, under its own key, whatever happens in between: retries, deploys, forks, deadlines, deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, current_step, step, stores, testing, workflow
from perdure.backends.memory.store import MemoryDatabase, MemoryStore
from perdure.engine.timers_and_signals import Waits
from perdure.errors import CompensationFailed, DeadlineExceeded, NotUndone, RunCancelled, RunDead, SnapshotCorrupt, StepTimeout
from perdure.model.own_names import CANCEL_WITHOUT_UNDO
from tests.engine.worlds import World, world
from tests.patience import turns


class Provider:
    """Takes and returns money. A request that repeats a key is the same request."""

    def __init__(self) -> None:
        self.charged: dict[str, int] = {}
        self.refunded: dict[str, str] = {}
        self.calls: list[str] = []
        self.fails = 0

    async def charge(self, cents: int) -> int:
        key = current_step().idempotency_key
        self.calls.append(f"charge {key}")
        return self.charged.setdefault(key, cents)

    async def refund(self, cents: int | None) -> None:
        info = current_step()
        assert info.undoes is not None
        self.refund_of(info.undoes, info.idempotency_key)

    def refund_of(self, charge: str, key: str) -> None:
        self.calls.append(f"refund {charge}")
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the provider is away")
        self.refunded.setdefault(key, charge)

    @property
    def kept(self) -> set[str]:
        """The keys of charges that were not refunded."""
        unknown = set(self.refunded.values()) - self.charged.keys()
        assert not unknown, f"refunded what was never charged: {unknown}"
        return self.charged.keys() - set(self.refunded.values())


class Code:
    """A workflow's code, which a deploy may change."""

    def __init__(self, body: Callable[[Context], Any]) -> None:
        self.body = body

    def workflow(self, **options: Any) -> Workflow[[], Any]:
        async def flow(ctx: Context) -> Any:
            return await self.body(ctx)

        return Workflow("flow", flow, on_definition_change="ignore", **options)


in_an_hour = step(retry=Retry(attempts=5, wait_initial="1h", wait_max="2h"))


async def nothing(*_: Any) -> None:
    pass


async def fail() -> None:
    raise ValueError("no money")


# 1. A run always ends.


async def test_a_branch_that_waits_for_a_child_keeps_no_run_from_undoing_and_ending() -> None:
    provider = Provider()

    async def child(ctx: Context) -> None:
        await ctx.wait_for_signal("never")

    waits = Workflow("child", child)

    async def slow() -> None:
        await asyncio.sleep(3600)

    async def body(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        failing = ctx.step("fail", late_failure)
        await asyncio.gather(ctx.child(waits), failing, ctx.step("slow", slow))

    async def late_failure() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        raise ValueError("no money")

    flow = Code(body).workflow()
    async with Runtime(stores.memory(), [flow, waits]) as runtime:
        run = await runtime.start(flow, id="run")
        async with asyncio.timeout(30):
            with pytest.raises(ValueError, match="no money"):
                await run
        child_run = await runtime.get("run/child")
        assert child_run is not None
        assert await child_run.status() == "cancelled"
    assert not provider.kept


# 2 and 3. The key of a step changes only when that step is undone.


async def test_a_charge_in_doubt_without_a_compensation_keeps_its_key_when_another_step_was_undone() -> None:
    provider = Provider()
    is_slow = True

    async def charge() -> int:
        cents = await provider.charge(5)
        if is_slow:
            await asyncio.sleep(3600)
        return cents

    async def body(ctx: Context) -> str:
        await ctx.step("book", provider.charge, 1, compensate=provider.refund)
        await ctx.step("charge", charge, timeout=0.01)
        return "paid"

    flow = Code(body).workflow()
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepTimeout)
        is_slow = False
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("paid")}
    assert provider.kept == {"run/charge", "run/book~1"}


async def test_a_compensation_names_the_charge_that_was_made_however_often_it_has_failed() -> None:
    provider = Provider()

    async def refund(cents: int | None, *, key: str) -> None:
        provider.refund_of(key, current_step().idempotency_key)

    async def body(ctx: Context) -> None:
        undo = partial(refund, key=ctx.idempotency_key("charge"))
        await ctx.step("book", provider.charge, 1, compensate=provider.refund)
        await ctx.step("charge", provider.charge, 5, compensate=undo)
        await ctx.step(fail)

    flow = Code(body).workflow()
    provider.fails = 1
    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, CompensationFailed)
        assert provider.kept == {"run/charge"}
        for attempt in (1, 2):
            await here.runtime.retry("run")
            outcome = (await here.runtime.sweep())["run"]
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, ValueError)
            assert not provider.kept, attempt
    # The charge counted as done after its refund had failed, so it was not made again then.
    assert set(provider.charged) == {"run/book", "run/book~1", "run/book~2", "run/charge", "run/charge~1"}
    assert provider.refunded["run/%compensate/charge"] == "run/charge"


async def test_a_charge_in_doubt_that_a_retry_does_not_reach_again_is_not_forgotten() -> None:
    provider = Provider()

    async def charge(number: int) -> None:
        await provider.charge(number)
        await asyncio.sleep(3600)

    async def body(ctx: Context) -> None:
        await ctx.map("charge", charge, [1, 2], concurrency=1, on_error=on_error, compensate=provider.refund, timeout=0.01)
        raise ValueError("both may have been charged")

    on_error: Any = "collect"
    flow = Code(body).workflow()
    provider.fails = 2
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        assert provider.kept == {"run/charge[0]", "run/charge[1]"}
        on_error = "raise"
        await here.runtime.retry("run")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, CompensationFailed)
        assert "charge[1]" in str(outcome.error)
        assert (await here.runtime.describe("run")).not_undone == ("charge[1]",)
    assert provider.kept == {"run/charge[1]"}


# 4. A run whose code does not say how it is undone does not end.


def changes(provider: Provider) -> dict[str, Callable[[Context], Any]]:
    async def as_it_was(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        await ctx.wait_for_signal("go")
        await ctx.step(fail)

    async def inserted(ctx: Context) -> None:
        await ctx.wait_for_signal("approval")
        await as_it_was(ctx)

    async def renamed(ctx: Context) -> None:
        await ctx.step("pay", provider.charge, 5, compensate=provider.refund)
        await ctx.wait_for_signal("go")
        await ctx.step(fail)

    async def removed(ctx: Context) -> None:
        await ctx.wait_for_signal("go")
        await ctx.step(fail)

    async def without_compensation(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5)
        await ctx.wait_for_signal("go")
        await ctx.step(fail)

    async def without_wait(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5)

    return {each.__name__: each for each in (as_it_was, inserted, renamed, removed, without_compensation, without_wait)}


CHANGES = ("inserted", "renamed", "removed", "without_compensation")


async def charged_and_waiting(here: World, flow: Workflow[[], Any], **options: Any) -> None:
    await here.runtime.start(flow, id="run", **options)
    assert isinstance((await here.runtime.sweep())["run"], Suspended)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("by", ["cancel", "failure", "deadline"])
@pytest.mark.parametrize("retired", [(), {"charge"}], ids=["kept", "retired"])
async def test_a_run_whose_code_cannot_undo_what_it_has_done_waits_for_code_that_can(change: str, by: str, retired: Any) -> None:
    if retired and by == "failure" and change in ("inserted", "renamed"):
        return  # that run goes another way, and does not end here
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])
    flow = code.workflow(retired=retired)
    async with world(flow) as here:
        await charged_and_waiting(here, flow, **({"deadline": "10s"} if by == "deadline" else {}))
        code.body = bodies[change]
        if by == "cancel":
            await here.runtime.cancel("run")
        elif by == "failure":
            await here.runtime.signal("run", "go")
        for _ in range(3):
            await here.later("2h")
            described = await here.runtime.describe("run")
            assert described.status not in ("failed", "cancelled", "completed"), described.status
            assert provider.kept >= {"run/charge"}
            assert described.problem is not None
            assert described.not_undone == ("charge",)
            assert [info.id for info in await here.runtime.stuck_runs()] == ["run"]
        with pytest.raises(NotUndone, match="charge"):
            await here.runtime.delete("run")
        code.body = bodies["as_it_was"]
        outcome = (await here.later("1d"))["run"]
        assert isinstance(outcome, Err)
        expected = {"cancel": RunCancelled, "failure": ValueError, "deadline": DeadlineExceeded}[by]
        assert isinstance(outcome.error, expected)
        assert not provider.kept
        assert (await here.runtime.describe("run")).not_undone == ()


@pytest.mark.parametrize("change", CHANGES[:3])
async def test_retired_says_how_a_step_is_undone_that_the_code_no_longer_has(change: str) -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])
    flow = code.workflow(retired={"charge": provider.refund})
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        code.body = bodies[change]
        await here.runtime.cancel("run")
        outcome = (await here.runtime.sweep())["run"]
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunCancelled)
    assert not provider.kept


@dataclass
class Payment:
    cents: int


async def test_the_result_of_a_retired_step_is_what_its_compensation_takes() -> None:
    undone: list[Payment] = []

    def pay() -> Payment:
        return Payment(5)

    def undo(payment: Payment) -> None:
        undone.append(payment)

    async def body(ctx: Context) -> None:
        await ctx.step(pay, compensate=undo)
        await ctx.wait_for_signal("go")

    code = Code(body)
    flow = code.workflow(retired={"pay": undo})
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        code.body = lambda ctx: ctx.wait_for_signal("go")
        await here.runtime.cancel("run")
        assert isinstance((await here.runtime.sweep())["run"], Err)
    assert undone == [Payment(5)]


async def test_retired_may_say_that_nothing_is_to_be_undone() -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])
    flow = code.workflow(retired={"charge": None})
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        code.body = bodies["removed"]
        await here.runtime.cancel("run")
        outcome = (await here.runtime.sweep())["run"]
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, RunCancelled)
    assert provider.kept == {"run/charge"}


def test_retired_takes_functions_or_none() -> None:
    with pytest.raises(TypeError, match="charge"):
        Code(nothing).workflow(retired={"charge": "refund"})


@pytest.mark.parametrize("change", ["as_it_was", *CHANGES])
async def test_cancel_without_undo_ends_the_run_and_says_what_it_left(change: str) -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])
    flow = code.workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        code.body = bodies[change]
        await here.runtime.cancel("run", undo=False)
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        assert outcome.error.not_undone == ["charge"]
        assert "charge" in str(outcome.error)
        assert (await here.runtime.describe("run")).not_undone == ("charge",)
        assert provider.kept == {"run/charge"}
        # A retry goes on with what is there, and its cancel undoes as usual.
        code.body = bodies["as_it_was"]
        await here.runtime.retry("run")
        assert isinstance((await here.runtime.sweep())["run"], Suspended)
        await here.runtime.cancel("run")
        assert isinstance((await here.runtime.sweep())["run"], Err)
    assert not provider.kept


async def test_cancel_without_undo_while_the_function_runs_lets_it_clean_up() -> None:
    provider = Provider()
    cleaned, is_waiting = [], asyncio.Event()

    async def body(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cleaned.append(await ctx.step("clean", lambda: "cleaned"))
            raise

    flow = Code(body).workflow()
    async with Runtime(stores.memory(), [flow]) as runtime:
        run = await runtime.start(flow, id="run")
        await is_waiting.wait()
        # Asked twice at once: the second request does not go ahead of what the first one has asked the store.
        await asyncio.gather(run.cancel(undo=False), runtime.cancel("run", undo=False))
        with pytest.raises(RunCancelled, match="not undone: 'charge'"):
            await run
    assert cleaned == ["cleaned"]
    assert provider.kept == {"run/charge"}


async def test_children_of_a_run_that_is_cancelled_without_undo_undo_nothing_either() -> None:
    provider = Provider()
    bodies = changes(provider)

    async def child(ctx: Context) -> None:
        await bodies["as_it_was"](ctx)

    paying = Workflow("paying", child)

    async def body(ctx: Context) -> None:
        await ctx.child(paying)

    flow = Code(body).workflow()
    async with world(flow, paying) as here:
        await here.runtime.start(flow, id="run")
        for _ in range(3):
            await here.runtime.sweep()
        await here.runtime.cancel("run", undo=False)
        for _ in range(4):
            await here.later("1m")
        assert (await here.runtime.describe("run/paying")).status == "cancelled"
        assert (await here.runtime.describe("run")).status == "cancelled"
    assert provider.kept == {"run%2Fpaying/charge"}


async def test_a_run_does_not_start_over_with_something_that_its_code_could_not_undo() -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])
    flow = code.workflow(retired={"charge"})

    async def again(ctx: Context) -> None:
        await ctx.wait_for_signal("go")
        await ctx.continue_as()

    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        code.body = again
        await here.runtime.signal("run", "go")
        await here.runtime.sweep()
        described = await here.runtime.describe("run")
        assert (described.status, described.generation, described.not_undone) == ("pending", 0, ("charge",))


async def test_a_parent_says_which_child_cannot_be_undone() -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])

    async def child(ctx: Context) -> None:
        await code.body(ctx)

    paying = Workflow("paying", child, on_definition_change="ignore")

    async def body(ctx: Context) -> None:
        await ctx.child(paying)

    flow = Workflow("parent", body)
    async with world(flow, paying) as here:
        await here.runtime.start(flow, id="run")
        for _ in range(3):
            await here.runtime.sweep()
        code.body = bodies["removed"]
        await here.runtime.cancel("run/paying")
        await here.runtime.sweep()
        await here.runtime.sweep()
        described = await here.runtime.describe("run")
        assert described.status == "suspended"
        assert described.problem is not None
        assert "run/paying" in described.problem
    assert provider.kept == {"run%2Fpaying/charge"}


# 5. A run that died while it undid what it had done resumes that.


@pytest.mark.parametrize("by", ["failure", "cancel"])
async def test_a_retry_of_a_run_that_died_while_it_compensated_goes_on_undoing(by: str) -> None:
    provider = Provider()
    is_away = True

    async def refund(cents: int | None) -> None:
        if cents == 1 and is_away:
            raise SystemExit(1)  # ends the attempt, and is no failure of the step
        await provider.refund(cents)

    async def body(ctx: Context) -> None:
        for cents in (1, 2):
            await ctx.step(f"charge {cents}", provider.charge, cents, compensate=refund)
        if by == "cancel":
            await ctx.wait_for_signal("never")
        await ctx.step(fail)

    flow = Code(body).workflow()
    async with world(flow, max_attempts=2) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        if by == "cancel":
            await here.runtime.cancel("run")
        outcome: Any = None
        for _ in range(8):
            outcome = (await here.later("2h")).get("run", outcome)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunDead)
        assert (await here.runtime.describe("run")).not_undone == ("charge 1",)
        is_away, calls = False, len(provider.calls)
        await here.runtime.retry("run")
        outcome = (await here.later("2h"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled if by == "cancel" else ValueError)
    assert provider.calls[calls:] == ["refund run/charge 1"]
    assert not provider.kept


# 6. What is done again gets its time again.


async def test_a_time_limit_begins_again_with_what_is_done_again() -> None:
    provider = Provider()
    fails = True

    async def body(ctx: Context) -> str:
        try:
            async with ctx.timeout("limit", "1m"):
                await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        except TimeoutError:
            return "the wrong branch"
        if fails:
            await ctx.step(fail)
        return "paid"

    flow = Code(body).workflow()
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        fails = False
        here.clock.advance("1h")
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("paid")}
    assert provider.kept == {"run/charge~1"}


# 7. A fork undoes what it has done itself.


@pytest.mark.parametrize("take_over", [False, True])
async def test_a_fork_undoes_its_own_steps_and_what_it_takes_over(take_over: bool) -> None:
    provider = Provider()
    fails = False

    async def last() -> str:
        if fails:
            raise ValueError("no")
        return "paid"

    async def body(ctx: Context) -> str:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        await ctx.step("fee", provider.charge, 1, compensate=provider.refund)
        return await ctx.step("last", last)

    flow = Code(body).workflow()
    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok("paid")
        fails = True
        await here.runtime.fork("run", from_step="fee", id="fork", take_over=take_over)
        assert isinstance((await here.runtime.sweep())["fork"], Err)
        assert provider.kept == ({"run/fee"} if take_over else {"run/charge", "run/fee"})
        assert (await here.runtime.describe("fork")).not_undone == ()
        fails = False
        await here.runtime.retry("fork")
        assert await here.runtime.sweep() == {"fork": Ok("paid")}
    again = {"fork/fee~1", "fork/charge~1"} if take_over else {"fork/fee~1", "run/charge"}
    assert provider.kept == {"run/fee"} | again


# 8. No two steps share a key.


async def test_no_two_steps_share_an_idempotency_key() -> None:
    keys: list[str] = []

    async def charge() -> None:
        keys.append(current_step().idempotency_key)

    async def child(ctx: Context) -> None:
        for key in ("charge", "a~1", "a;generation=1", "a%7E1", "x/y", "%compensate/charge"):
            await ctx.step("charge", charge, key=key)
        await ctx.scope("x").step("y", charge)
        await ctx.scope("x/y").step("z", charge)
        await ctx.scope("x").scope("y").step("z", charge)
        await ctx.scope("a~1").step("z", charge)

    async def body(ctx: Context) -> None:
        await child(ctx)
        await ctx.step("charge", charge, key="c/charge")
        for own_id in ("order/c", "order;generation=1", "order%2Fc"):
            await ctx.child(Workflow("c", child), key=own_id, id=own_id)

    flow = Code(body).workflow()
    assert isinstance(await flow.run(id="order", store=stores.memory()), Ok)
    assert len(keys) == 4 * 10 + 1
    assert len(set(keys)) == len(keys)
    assert keys[0] == "order/charge"


# Children.


async def test_a_child_that_completed_is_compensated_and_done_again_as_another_run() -> None:
    provider = Provider()
    fails = True

    async def pay(ctx: Context, cents: int) -> int:
        return await ctx.step("charge", provider.charge, cents)

    paying = Workflow("paying", pay)

    async def refund(cents: int) -> None:
        assert current_step().undoes == "run/paying"
        provider.refund_of("run%2Fpaying/charge", current_step().idempotency_key)

    async def body(ctx: Context) -> int:
        paid = await ctx.child(paying, 5, compensate=refund)
        if fails:
            await ctx.step(fail)
        return paid

    flow = Code(body).workflow()
    async with Runtime(stores.memory(), [flow, paying]) as runtime:
        run = await runtime.start(flow, id="run")
        with pytest.raises(ValueError, match="no money"):
            await run
        assert not provider.kept
        fails = False
        await runtime.retry("run")
        assert await run == 5
        assert await runtime.get("run/paying~1") is not None
    assert provider.kept == {"run%2Fpaying%7E1/charge"}


async def test_items_of_a_map_of_children_are_compensated() -> None:
    undone: list[int] = []

    async def double(ctx: Context, number: int) -> int:
        return 2 * number

    async def undo(number: int) -> None:
        undone.append(number)

    doubling = Workflow("doubling", double)

    async def body(ctx: Context) -> None:
        await ctx.map(doubling, [1, 2, 3], concurrency=1, compensate=undo)
        await ctx.step(fail)

    flow = Code(body).workflow()
    assert isinstance(await flow.run(id="run", store=stores.memory()), Err)
    assert undone == [6, 4, 2]


async def test_a_child_that_is_open_undoes_itself_and_is_not_compensated() -> None:
    provider = Provider()
    undone: list[int] = []

    async def pay(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        await ctx.wait_for_signal("never")

    paying = Workflow("paying", pay)

    async def body(ctx: Context) -> None:
        await ctx.child(paying, compensate=undone.append)

    flow = Code(body).workflow()
    async with Runtime(stores.memory(), [flow, paying]) as runtime:
        run = await runtime.start(flow, id="run")
        child = None
        while child is None or not isinstance(await child.outcome(), Suspended):
            child = await runtime.get("run/paying")
            await asyncio.sleep(0)
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run
    assert not provider.kept
    assert undone == []


async def test_a_detached_child_has_no_compensation() -> None:
    async def body(ctx: Context) -> None:
        ctx.start_child(Workflow("c", nothing), detached=True, compensate=nothing)

    outcome = await Code(body).workflow().run(id="run", store=stores.memory())
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, TypeError)


# Copies of a run.


async def test_a_snapshot_knows_how_often_each_step_was_undone() -> None:
    provider = Provider()
    fails = True

    async def body(ctx: Context) -> str:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        if fails:
            await ctx.step(fail)
        return "paid"

    flow = Code(body).workflow()
    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        for _ in range(2):
            await here.runtime.retry("run")
            await here.runtime.sweep()
        run = await here.runtime.get("run")
        assert run is not None
        snapshot = await run.snapshot()
    assert snapshot.to_dict()["metadata"]["perdure"]["undone"] == {"charge": 2}
    there = stores.memory()
    await there.save("run", snapshot)
    fails = False
    assert await flow.run(id="run", store=there, retry_failed=True) == Ok("paid")
    assert provider.kept == {"run/charge~3"}
    elsewhere = await flow.run(id="other", store=stores.memory(), snapshot=snapshot, retry_failed=True)
    assert elsewhere == Ok("paid")
    assert provider.kept == {"run/charge~3", "other/charge~3"}


async def test_a_compensation_is_told_the_key_of_a_step_that_was_renamed() -> None:
    provider = Provider()
    name, aliases = "charge", list[str]()

    async def body(ctx: Context) -> None:
        undoing = step(aliases=aliases)(partial(provider.charge)) if aliases else provider.charge
        await ctx.step(name, undoing, 5, compensate=provider.refund)
        await ctx.wait_for_signal("go")

    flow = Code(body).workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        name, aliases = "pay", ["charge"]
        await here.runtime.cancel("run")
        assert isinstance((await here.runtime.sweep())["run"], Err)
    assert not provider.kept
    assert set(provider.refunded) == {"run/%compensate/charge"}


# What a failure cancelled is not cancelled any more after a retry.


@pytest.mark.parametrize("cause", ["step", "function"])
async def test_what_the_failure_cancelled_is_not_cancelled_when_the_run_is_replayed_after_a_retry(cause: str) -> None:
    fails, done = True, list[str]()

    async def break_down(ctx: Context) -> None:
        await ctx.sleep("a while", "1m")
        if fails and cause == "function":
            raise ValueError("not yet")
        await ctx.step("break", lambda: 1 / 0 if fails else None)

    async def wait(ctx: Context) -> None:
        async with ctx.timeout("limit", "1h"):
            await ctx.wait_for_signal("go")
        await ctx.step("after", done.append, "after")

    async def body(ctx: Context) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait(ctx))
            group.create_task(break_down(ctx))
        await ctx.wait_for_signal("end")
        return "ended"

    flow = Code(body).workflow()
    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        assert isinstance((await here.later("2m"))["run"], Err)
        fails = False
        await here.runtime.retry("run")
        await here.runtime.sweep()
        await here.runtime.signal("run", "go")
        await here.later("1m")
        await here.runtime.signal("run", "end")
        assert await here.later("1m") == {"run": Ok("ended")}
    assert done == ["after"]


async def test_a_cancelled_run_that_cannot_undo_pauses_also_when_its_deadline_has_passed() -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])
    flow = code.workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow, deadline="1m")
        code.body = bodies["renamed"]
        await here.runtime.cancel("run")
        for _ in range(3):
            await here.later("1h")
            row = await here.runtime.store.get("run")
            assert row is not None
            assert row.wake_at is not None
            assert row.wake_at > here.clock.now()
            assert await here.runtime.sweep() == {}


async def test_a_fork_of_a_run_that_was_retried_keeps_what_was_done_again() -> None:
    provider = Provider()
    fails = True

    async def body(ctx: Context) -> str:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        if fails:
            await ctx.step(fail)
        return await ctx.step("last", lambda: "paid")

    flow = Code(body).workflow()
    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        fails = False
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok("paid")}
        await here.runtime.fork("run", from_step="last", id="fork")
        assert await here.runtime.sweep() == {"fork": Ok("paid")}
    assert provider.kept == {"run/charge~1"}


async def test_what_is_undone_is_not_done_again_by_code_that_changes_in_the_middle() -> None:
    provider, is_charged = Provider(), asyncio.Event()
    is_removed, is_away = False, True

    async def refund(cents: int | None) -> None:
        if cents == 1 and is_away:
            raise SystemExit(1)
        await provider.refund(cents)

    async def charge_for_long(cents: int) -> None:
        await provider.charge(cents)
        is_charged.set()
        await asyncio.sleep(3600)

    async def fail_when_charged() -> None:
        await is_charged.wait()
        raise ValueError("no money")

    async def body(ctx: Context) -> None:
        await ctx.step("first", provider.charge, 1, compensate=refund)
        charging = asyncio.create_task(ctx.step("charge", charge_for_long, 5, compensate=refund))
        if not is_removed:
            await ctx.step("fail", fail_when_charged)
        await charging

    flow = Code(body).workflow()
    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        assert "refund run/charge" in provider.calls
        is_removed, calls = True, list(provider.calls)
        await here.later("1h")
        assert provider.calls == calls
        is_removed = is_away = False
        outcome = (await here.later("1d"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueError)
    assert not provider.kept


async def test_a_child_that_is_cancelled_before_it_gets_to_a_charge_in_doubt_says_so() -> None:
    provider = Provider()

    async def charge() -> None:
        await provider.charge(5)
        await asyncio.sleep(3600)

    async def pay(ctx: Context) -> None:
        if waits:
            await ctx.wait_for_signal("never")
        await ctx.step("charge", charge, timeout=0.01, compensate=provider.refund)

    waits, provider.fails = False, 1
    paying = Code(pay).workflow()
    async with world(paying) as here:
        assert isinstance(await here.runtime.run(paying, id="run"), Err)
        waits = True
        await here.runtime.retry("run")
        await here.runtime.sweep()
        await here.runtime.cancel("run")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, CompensationFailed)
        assert (await here.runtime.describe("run")).not_undone == ("charge",)


async def test_a_refused_duplicate_is_not_compensated() -> None:
    provider = Provider()

    async def check() -> str:
        return "checked"

    async def body(ctx: Context) -> None:
        await ctx.step(check, key="k", at_most_once=True)
        await ctx.step("charge", provider.charge, 5, key="k", compensate=provider.refund)

    assert isinstance(await Code(body).workflow().run(id="run", store=stores.memory()), Err)
    assert provider.calls == []


async def test_a_run_that_has_begun_to_undo_does_not_complete_with_code_that_does_not_fail() -> None:
    provider = Provider()
    fails = is_away = True

    async def refund(cents: int | None) -> None:
        if cents == 1 and is_away:
            raise SystemExit(1)
        await provider.refund(cents)

    async def body(ctx: Context) -> str:
        await ctx.step("first", provider.charge, 1, compensate=refund)
        await ctx.step("charge", provider.charge, 5, compensate=refund)
        if fails:
            raise ValueError("no money")
        return "paid"

    flow = Code(body).workflow()
    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        assert provider.kept == {"run/first"}
        fails = is_away = False
        await here.later("1h")
        described = await here.runtime.describe("run")
        assert (described.status, described.problem is None) == ("pending", False)
        fails = True
        assert isinstance((await here.later("1d"))["run"], Err)
    assert not provider.kept


@pytest.mark.parametrize("what", ["child", "map", "in doubt"])
async def test_a_crash_at_any_store_call_undoes_all_under_the_same_keys(what: str) -> None:
    effects: list[str] = []

    async def note(name: str) -> str:
        effects.append(f"{name} {current_step().idempotency_key}")
        return name

    async def undo(name: str | None) -> None:
        effects.append(f"undo {name} {current_step().undoes}")

    async def slow(name: str) -> None:
        await note(name)
        raise StepTimeout("charge", 1.0)

    @workflow
    async def child(ctx: Context, name: str) -> str:
        return await ctx.step("book", note, name)

    @workflow
    async def parent(ctx: Context) -> None:
        await ctx.step("charge", note if what != "in doubt" else slow, "it", compensate=undo)

    @workflow
    async def with_children(ctx: Context) -> None:
        await ctx.step("charge", note, "it", compensate=undo)
        if what == "child":
            await ctx.child(child, "one", compensate=undo)
        else:
            await ctx.map(child, ["one", "two"], compensate=undo, concurrency=1)
        await ctx.step(fail)

    flow = parent if what == "in doubt" else with_children
    report = await testing.crash_everywhere(flow, effects=effects, workflows=[child])
    assert isinstance(report.outcome, Err)


async def test_a_charge_that_came_after_a_wait_began_is_not_repeated_by_renamed_code_after_a_cancel_and_a_retry() -> None:
    provider = Provider()
    name = "charge"

    async def body(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.wait_for_signal("go"))
            group.create_task(ctx.step(name, provider.charge, 5))

    flow = Code(body).workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        await here.runtime.cancel("run")
        assert isinstance((await here.runtime.sweep())["run"], Err)
        await here.runtime.retry("run")
        name = "pay"
        await here.later("1m")
        assert (await here.runtime.describe("run")).problem is not None
    assert provider.kept == {"run/charge"}


async def test_a_cancelled_parent_whose_child_cannot_end_pauses_and_says_so() -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])

    async def child(ctx: Context) -> None:
        await code.body(ctx)

    paying = Workflow("paying", child, on_definition_change="ignore")

    async def body(ctx: Context) -> None:
        await ctx.child(paying)

    flow = Workflow("parent", body)
    async with world(flow, paying) as here:
        await here.runtime.start(flow, id="run")
        for _ in range(3):
            await here.runtime.sweep()
        code.body = bodies["removed"]
        await here.runtime.cancel("run")
        for _ in range(8):
            await here.later("10s")
        row = await here.runtime.store.get("run")
        assert row is not None
        assert row.problem is not None
        assert "run/paying" in row.problem
        assert row.problem_count > 1
        code.body = bodies["as_it_was"]
        for _ in range(4):
            await here.later("1d")
        assert (await here.runtime.describe("run/paying")).status == "cancelled"
        assert (await here.runtime.describe("run")).status == "cancelled"
    assert not provider.kept


async def test_a_step_that_was_read_from_a_cache_is_not_undone() -> None:
    provider, cache = Provider(), dict[str, str]()

    async def body(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, key="shared", compensate=provider.refund)
        if ctx.run_id == "second":
            await ctx.step(fail)

    flow = Code(body).workflow()
    async with world(flow, cache=cache) as here:
        assert await here.runtime.run(flow, id="first") == Ok(None)
        assert isinstance(await here.runtime.run(flow, id="second"), Err)
    assert provider.calls == ["charge first/shared"]


# What a review found.


async def test_a_fork_does_under_its_own_key_what_the_original_had_cancelled_and_done_again() -> None:
    provider = Provider()
    is_slow, fails = True, False

    async def charge() -> None:
        await provider.charge(5)
        if is_slow:
            await asyncio.sleep(3600)

    async def note() -> None:
        nonlocal is_slow
        is_slow = False

    async def body(ctx: Context) -> None:
        try:
            async with ctx.timeout("limit", 0.01):
                await ctx.step("charge", charge, compensate=provider.refund)
        except TimeoutError:
            pass
        await ctx.step("note", note)
        await ctx.step("second note", nothing)
        await ctx.step("charge", charge, compensate=provider.refund)
        if fails:
            raise ValueError("out of stock")

    flow = Code(body).workflow()
    async with Runtime(stores.memory(), [flow]) as runtime:
        await (await runtime.start(flow, id="order"))
        fails = True
        with pytest.raises(ValueError, match="out of stock"):
            await (await runtime.fork("order", from_step="second note", id="again"))
    assert provider.calls == ["charge order/charge", "charge order/charge", "charge again/charge", "refund again/charge"]


async def test_a_snapshot_that_is_retried_elsewhere_knows_the_charge_in_doubt() -> None:
    provider = Provider()
    is_slow = True

    async def charge() -> None:
        await provider.charge(5)
        if is_slow:
            await asyncio.sleep(3600)

    async def body(ctx: Context) -> str:
        await ctx.step("charge", charge, timeout=0.01, compensate=provider.refund)
        return "paid"

    flow = Code(body).workflow()
    provider.fails = 1
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="order"), Err)
        run = await here.runtime.get("order")
        assert run is not None
        snapshot = await run.snapshot()
    is_slow = False
    assert await flow.run(id="moved", store=stores.memory(), snapshot=snapshot, retry_failed=True) == Ok("paid")
    assert provider.kept == {"order/charge"}


async def test_what_came_before_the_last_failure_of_a_step_is_not_repeated_by_renamed_code() -> None:
    provider = Provider()
    name, is_first = "email", True

    is_emailed = asyncio.Event()

    async def email() -> None:
        await provider.charge(1)
        is_emailed.set()

    async def ship() -> None:
        if not is_first:
            await is_emailed.wait()
            await turns(50)
        raise ValueError("no ship")

    async def body(ctx: Context) -> None:
        if is_first:
            await ctx.step("ship", ship)
        await asyncio.gather(ctx.step("ship", ship), ctx.step(name, email))

    flow = Code(body).workflow()
    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        is_first = False
        await here.runtime.retry("run")
        await here.runtime.sweep()
        assert provider.calls == ["charge run/email"]
        name = "mail"
        await here.runtime.retry("run")
        await here.later("1m")
        assert provider.calls == ["charge run/email"]
        assert (await here.runtime.describe("run")).problem is not None


@pytest.mark.parametrize("by", ["cancel", "deadline"])
async def test_a_run_that_waits_for_code_that_can_undo_is_ended_by_a_cancel_that_undoes_nothing(by: str) -> None:
    provider = Provider()
    bodies = changes(provider)
    code = Code(bodies["as_it_was"])
    flow = code.workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow, **({"deadline": "10s"} if by == "deadline" else {}))
        code.body = bodies["renamed"]
        if by == "cancel":
            await here.runtime.cancel("run")
        await here.later("1h")
        assert (await here.runtime.describe("run")).not_undone == ("charge",)
        await here.runtime.cancel("run", undo=False)
        outcome = (await here.later("1h"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        assert outcome.error.not_undone == ["charge"]
        assert await here.runtime.store.inbox("run") == []


async def test_a_request_that_was_made_twice_cancels_no_later_round() -> None:
    provider = Provider()
    rounds = 0

    async def body(ctx: Context) -> str:
        nonlocal rounds
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        if rounds == 1:
            rounds = 2
            await ctx.continue_as()
        if rounds == 0:
            await ctx.wait_for_signal("never")
        return "paid"

    flow = Code(body).workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        for _ in range(2):
            await here.runtime.cancel("run", undo=False)
        assert isinstance((await here.runtime.sweep())["run"], Err)
        rounds = 1
        await here.runtime.retry("run")
        outcome: Any = None
        while swept := await here.runtime.sweep():
            outcome = swept["run"]
        assert outcome == Ok("paid")
        run = await here.runtime.get("run")
        assert run is not None
        assert (await run.snapshot()).to_dict()["metadata"]["perdure"].get("inbox", []) == []


async def test_a_failed_run_that_undoes_already_stops_when_it_is_cancelled_without_undoing() -> None:
    provider = Provider()

    async def refund(cents: int | None) -> None:
        await provider.refund(cents)

    async def body(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=in_an_hour(refund))
        await ctx.step(fail)

    flow = Code(body).workflow()
    provider.fails = 1
    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        assert provider.calls == ["charge run/charge", "refund run/charge"]
        await here.runtime.cancel("run", undo=False)
        outcome = (await here.later("1s"))["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        await here.later("3h")
    assert provider.calls == ["charge run/charge", "refund run/charge"]


async def test_a_cancelled_run_sleeps_until_the_next_try_of_its_compensation() -> None:
    provider = Provider()

    async def refund(cents: int | None) -> None:
        await provider.refund(cents)

    async def body(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=in_an_hour(refund))
        await ctx.wait_for_signal("never")

    flow = Code(body).workflow()
    provider.fails = 1
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        row = await here.runtime.store.get("run")
        assert row is not None
        assert row.wake_at is not None
        assert row.wake_at - here.clock.now() > 3000 * 1_000_000
        assert isinstance((await here.later("3h"))["run"], Err)
    assert not provider.kept


async def test_a_request_that_cannot_be_read_stops_its_run_and_no_other() -> None:
    provider = Provider()
    bodies = changes(provider)
    flow = Code(bodies["as_it_was"]).workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        await here.runtime.store.signal("run", CANCEL_WITHOUT_UNDO, b"{}")
        await here.runtime.signal("run", "go")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, SnapshotCorrupt)
        assert (await here.runtime.describe("run")).status == "pending"
        assert await here.runtime.run(Workflow("other", bodies["without_wait"]), id="other") == Ok(None)


async def test_a_damaged_intent_that_a_retry_has_set_aside_stops_the_run_and_does_not_hang_it() -> None:
    provider = Provider()
    database = MemoryDatabase()

    async def body(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        await ctx.step(fail)

    flow = Code(body).workflow()
    store = MemoryStore(database)
    async with world(flow, store=store) as here, asyncio.timeout(30):
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        with store._lock() as namespace:
            run = namespace.runs["run"]
            run.entries[1] = msgspec.structs.replace(run.entries[1], payload=b'{"type":"intent"}')
        await here.runtime.retry("run")
        outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, SnapshotCorrupt)


async def test_code_that_is_repaired_after_the_first_refund_was_made_and_not_recorded_does_not_complete() -> None:
    provider = Provider()
    is_broken = is_killed = True

    async def refund(cents: int | None) -> None:
        await provider.refund(cents)
        if is_killed:
            raise SystemExit(1)

    async def body(ctx: Context) -> str:
        await ctx.step("charge", provider.charge, 5, compensate=refund)
        if is_broken:
            raise ValueError("a bug")
        return "paid"

    flow = Code(body).workflow()
    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        is_broken = is_killed = False
        await here.later("1m")
        described = await here.runtime.describe("run")
        assert (described.status, described.problem is None) == ("pending", False)
        is_broken = True
        assert isinstance((await here.later("1d"))["run"], Err)
    assert not provider.kept


async def charge_twice(*, by_child: bool, name: str, provider: Provider, again: str) -> str:
    """Rename what is under way; return how the run stands then."""
    is_killed = True

    async def charge() -> None:
        await provider.charge(5)
        if is_killed and not by_child:
            raise SystemExit(1)

    async def pay(ctx: Context) -> None:
        await ctx.step("charge", charge)
        if is_killed:
            await ctx.wait_for_signal("never")

    paying = Workflow("paying", pay)

    async def body(ctx: Context) -> None:
        if by_child:
            await asyncio.gather(ctx.child(paying, key=name), ctx.wait_for_signal("look"))
        else:
            await ctx.step(name, charge, compensate=provider.refund)

    flow = Code(body).workflow()
    async with world(flow, paying) as here:
        await here.runtime.start(flow, id="run")
        for _ in range(3):
            await here.runtime.sweep()
        name, is_killed = again, False
        await here.runtime.signal("run", "look")
        for _ in range(4):
            await here.later("1m")
        return (await here.runtime.describe("run")).status


async def test_a_step_under_way_that_is_renamed_lets_no_run_complete() -> None:
    assert await charge_twice(by_child=False, name="charge", provider=Provider(), again="pay") == "pending"


async def test_a_step_in_doubt_that_is_retired_lets_its_run_complete() -> None:
    provider = Provider()
    is_killed = True

    async def charge() -> None:
        await provider.charge(5)
        raise SystemExit(1)

    async def body(ctx: Context) -> str:
        if is_killed:
            await ctx.step("pay", charge, key="charge", compensate=provider.refund)
        return "paid"

    code = Code(body)
    flow = code.workflow(retired={"charge"})
    async with world(flow) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.sweep()
        is_killed = False
        assert await here.later("1m") == {"run": Ok("paid")}


@pytest.mark.parametrize("by_child", [False, True])
async def test_what_is_under_way_and_renamed_is_not_begun_again(by_child: bool) -> None:
    provider = Provider()
    await charge_twice(by_child=by_child, name="charge", provider=provider, again="pay")
    assert len(provider.charged) == 1


async def test_what_came_after_an_undone_step_is_not_repeated_by_renamed_code() -> None:
    provider = Provider()
    name = "fee"

    async def body(ctx: Context) -> None:
        await ctx.step("charge", provider.charge, 5, compensate=provider.refund)
        await ctx.step(name, provider.charge, 1)
        await ctx.wait_for_signal("go")

    flow = Code(body).workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        await here.runtime.retry("run")
        name = "commission"
        await here.later("1m")
        row = await here.runtime.store.get("run")
    assert "run/commission" not in provider.charged
    assert row is not None
    assert row.problem is not None
    assert "'fee' is recorded" in row.problem


@pytest.mark.parametrize("differs", ["result", "order"])
async def test_after_a_retry_unchanged_code_may_go_another_way_because_of_a_step_that_was_undone(differs: str) -> None:
    """It is called again. It may return something else, or return after what is recorded of another branch."""
    mailed: list[str] = []
    may_end = asyncio.Event()

    async def charge() -> str:
        return current_step().idempotency_key if differs == "result" else "charge"

    async def beside() -> str:
        await may_end.wait()
        return "beside"

    async def refund(_: str | None) -> None:
        """Give the money back."""

    async def mail(which: str) -> None:
        mailed.append(which)

    async def body(ctx: Context) -> None:
        tasks = [asyncio.create_task(ctx.step(charge, compensate=refund))]
        if differs == "order":
            tasks.append(asyncio.create_task(ctx.step(beside)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop().result()
        await ctx.step(f"mail {first}", mail, first)
        may_end.set()
        await asyncio.gather(*tasks)
        await ctx.step(f"parcel {first}", mail, f"parcel {first}")
        await ctx.wait_for_signal("go")

    flow = Code(body).workflow()
    async with world(flow) as here:
        await charged_and_waiting(here, flow)
        await here.runtime.cancel("run")
        await here.runtime.sweep()
        await here.runtime.retry("run")
        await here.later("1m")
        row = await here.runtime.store.get("run")
    assert row is not None
    assert (row.status, row.problem) == ("suspended", None)
    first, second = ("run/charge", "run/charge~1") if differs == "result" else ("charge", "beside")
    assert mailed == [first, f"parcel {first}", second, f"parcel {second}"]


async def test_a_child_that_completed_although_it_was_given_up_is_undone_when_its_key_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undone: list[str] = []

    begun = asyncio.Event()

    async def done(ctx: Context) -> str:
        begun.set()
        return ctx.run_id

    async def undo(run_id: str) -> None:
        undone.append(run_id)

    child = Workflow("child", done)
    has_ended = asyncio.Event()

    async def body(ctx: Context) -> None:
        giving_up = asyncio.create_task(ctx.child(child, compensate=undo))
        await ctx.step("see the end", has_ended.wait)
        giving_up.cancel()
        await asyncio.gather(giving_up, return_exceptions=True)
        monkeypatch.undo()
        await ctx.child(child, compensate=undo)
        await ctx.step(fail)

    flow = Code(body).workflow()
    monkeypatch.setattr(Waits, "_read", lambda *_: None)  # so the parent does not learn that the child has completed
    async with Runtime(stores.memory(), [flow, child]) as runtime:
        run = await runtime.start(flow, id="run")
        await begun.wait()
        found = await runtime.get("run/child")
        assert found is not None
        await found
        has_ended.set()
        with pytest.raises(ValueError, match="no money"):
            await run
    assert len(undone) == 2
