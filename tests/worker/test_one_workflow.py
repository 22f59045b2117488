"""A workflow run by itself: `wf(...)`, `wf.run(...)`, `wf.start(...)`, without a Runtime."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Context, Err, Ok, Suspended, workflow
from perdure.errors import InvalidInput, RunCancelled, RunConflict, StepFailed
from perdure.store import Store
from tests.patience import PATIENCE
from tests.worker.flows import Flaky, Gate, ask, client, greet, reaches


async def test_calling_gives_the_value_or_raises() -> None:
    @workflow
    async def fails(ctx: Context) -> None:
        raise ValueError("no")

    assert await greet("Ada") == "hello Ada!"
    assert await greet(name="Ada", mark="?") == "hello Ada?"
    with pytest.raises(ValueError, match="no"):
        await fails()
    with pytest.raises(InvalidInput, match="missing a required argument: 'name'"):
        await greet()  # type: ignore[call-arg]


async def test_run_gives_an_outcome() -> None:
    @workflow
    async def fails(ctx: Context) -> None:
        raise ValueError("no")

    assert await greet.run("Ada") == Ok("hello Ada!")
    outcome = await fails.run()
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, ValueError)


async def test_a_result_that_is_returned_is_the_outcome_and_not_nested(store: Store) -> None:
    async def refuse() -> Ok[int] | Err[str]:
        return Err("too late")

    @workflow
    async def returns(ctx: Context, good: bool) -> Ok[int] | Err[str]:
        return Ok(1) if good else Err("no")

    @workflow
    async def passes_on(ctx: Context) -> int:
        return await ctx.step(refuse)

    assert await returns.run(True, id="r1", store=store) == Ok(1)
    assert await returns.run(False, id="r2", store=store) == Err("no")
    assert await passes_on.run(id="p1", store=store) == Err("too late")
    run = await passes_on.start(id="p1", store=store)
    with pytest.raises(StepFailed, match="too late"):
        await run


async def test_run_again_with_the_same_id_gives_the_recorded_outcome(store: Store) -> None:
    flaky = Flaky()
    flaky.is_broken = False
    for _ in range(2):
        assert await flaky.flow.run(id="f1", store=store) == Ok("first second")
    assert flaky.calls == ["first", "second"]


async def test_run_again_with_another_input_is_a_conflict(store: Store) -> None:
    await greet.options(id="g1", store=store).run("Ada")
    with pytest.raises(RunConflict):
        await greet.options(id="g1", store=store).run("Eve")
    with pytest.raises(RunConflict):
        await greet.options(id="g1", store=store).start("Eve")


async def test_retry_failed_goes_on_after_what_failed(store: Store) -> None:
    flaky = Flaky()
    assert isinstance(await flaky.flow.run(id="f1", store=store), Err)
    assert isinstance(await flaky.flow.run(id="f1", store=store), Err)
    flaky.is_broken = False
    assert isinstance(await flaky.flow.run(id="f1", store=store), Err)
    assert await flaky.flow.run(id="f1", store=store, retry_failed=True) == Ok("first second")
    assert await flaky.flow.run(id="f1", store=store, retry_failed=True) == Ok("first second")
    assert flaky.calls == ["first", "second", "second"]


async def test_start_with_retry_failed_goes_on_too(store: Store) -> None:
    flaky = Flaky()
    run = await flaky.flow.start(id="f1", store=store)
    with pytest.raises(ValueError, match="not today"):
        await run
    flaky.is_broken = False
    with pytest.raises(ValueError, match="not today"):
        await (await flaky.flow.start(id="f1", store=store))
    assert await (await flaky.flow.start(id="f1", store=store, retry_failed=True)) == "first second"


async def test_start_without_a_store_waits_in_memory_and_a_signal_delivers() -> None:
    run = await ask.start()
    async with asyncio.timeout(PATIENCE):
        await run.signal("answer", {"approved": True})
        assert await run == {"approved": True}


async def test_start_without_a_store_sleeps_in_memory() -> None:
    @workflow
    async def short(ctx: Context) -> str:
        await ctx.sleep("nap", "5ms")
        return "awake"

    run = await short.start()
    async with asyncio.timeout(PATIENCE):
        assert await run.outcome() == Ok("awake")


async def test_start_without_a_store_can_be_cancelled() -> None:
    run = await ask.start()
    async with asyncio.timeout(PATIENCE):
        await asyncio.sleep(0.01)
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run


async def test_start_returns_before_the_run_ends(store: Store) -> None:
    gate = Gate()
    async with asyncio.timeout(PATIENCE):
        run = await gate.flow.start(id="r1", store=store)
        await gate.reached.wait()
        assert await run.status() == "running"
        gate.opened.set()
        assert await run == "through"


async def test_start_goes_on_with_a_run_that_was_left_behind(store: Store) -> None:
    async with client(store) as other:
        await other.start(greet, "Ada", id="g1")  # written, driven by nobody
    async with asyncio.timeout(PATIENCE):
        assert await (await greet.options(id="g1", store=store).start("Ada")) == "hello Ada!"


@pytest.mark.usefixtures("_no_polling")
async def test_start_wakes_its_run_when_it_is_due(store: Store) -> None:
    at = datetime.now(UTC) + timedelta(milliseconds=30)
    async with asyncio.timeout(PATIENCE):
        run = await greet.options(id="g1", store=store, start_at=at).start("Ada")
        assert await run == "hello Ada!"
        assert datetime.now(UTC) >= at


async def test_start_wakes_its_suspended_run_when_a_signal_comes(store: Store) -> None:
    async with client(store) as other, asyncio.timeout(PATIENCE):
        run = await ask.start(id="a1", store=store)
        assert isinstance(await run.outcome(), Suspended)
        await other.signal("a1", "answer", 7)
        assert await run == 7


async def test_a_started_run_that_was_on_hold_goes_on_after_unhold(store: Store) -> None:
    async with client(store) as other, asyncio.timeout(PATIENCE):
        run = await ask.start(id="a1", store=store)
        assert isinstance(await run.outcome(), Suspended)
        await other.hold("a1")
        await run.signal("answer", 7)
        await asyncio.sleep(0.01)
        assert await run.status() == "suspended"
        await other.unhold("a1")
        assert await run == 7


async def test_a_started_run_goes_on_when_its_handle_is_dropped(store: Store) -> None:
    await greet.options(id="g1", store=store).start("Ada")
    await reaches(store, "g1", "completed")


async def test_concurrent_runs_of_one_workflow_do_not_mix(store: Store) -> None:
    @workflow
    async def echo(ctx: Context, number: int) -> list[Any]:
        first = await ctx.step("first", lambda: number)
        second = await ctx.step("second", lambda: number * 10)
        return [ctx.run_id, first, second]

    outcomes = await asyncio.gather(*(echo.run(number, id=f"e{number}", store=store) for number in range(50)))
    assert outcomes == [Ok([f"e{number}", number, number * 10]) for number in range(50)]
