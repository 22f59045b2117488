"""One event at a time: what the body does with the first decides what becomes of the second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, Workflow, stores, workflow
from perdure.errors import PersistenceError
from perdure.model.records import Lease
from perdure.testing import ManualClock
from tests.engine.replays import stored
from tests.engine.worlds import world
from tests.patience import PATIENCE


async def test_a_wait_that_is_about_to_be_cancelled_consumes_no_signal() -> None:
    @workflow
    async def both(ctx: Context[Any]) -> list[Any]:
        await ctx.wait_for_signal("go")
        return [
            await ctx.race(ctx.wait_for_signal("a", key=f"a{n}"), ctx.wait_for_signal("b", key=f"b{n}"), key=f"race{n}")
            for n in range(2)
        ]

    async with world(both) as here:
        await here.runtime.start(both, id="run")
        for name in ("a", "b", "go"):
            await here.runtime.signal("run", name, name)
        assert await here.runtime.sweep() == {"run": Ok(["a", "b"])}


async def test_a_signal_that_comes_with_the_tick_it_races_against_is_kept_for_the_next_round() -> None:
    @workflow
    async def patient(ctx: Context[Any]) -> Any:
        for n in range(5):
            tick = ctx.sleep("tick", "1m", key=f"tick{n}")
            got = await ctx.race(tick, ctx.wait_for_signal("paid", key=f"paid{n}"), key=f"race{n}")
            if got is not None:
                return [n, got]
        return None

    async with world(patient) as here:
        await here.runtime.run(patient, id="run")
        here.clock.advance("1m")
        await here.runtime.signal("run", "paid", "money")
        outcomes = await here.runtime.sweep()
        assert outcomes == {"run": Ok([0, "money"])}, "it was there in time"


async def test_a_time_limit_and_the_signal_inside_it_do_not_both_take_effect() -> None:
    @workflow
    async def limited(ctx: Context[Any]) -> Any:
        try:
            async with ctx.timeout("limit", "1h"):
                return await ctx.wait_for_signal("answer")
        except TimeoutError:
            return ["late", await ctx.wait_for_signal("answer", key="again")]

    async with world(limited) as here:
        await here.runtime.run(limited, id="run")
        here.clock.advance("2h")
        await here.runtime.signal("run", "answer", 42)
        assert await here.runtime.sweep() == {"run": Ok(42)}


async def test_a_signal_that_suspend_did_not_ask_for_is_not_forgotten() -> None:
    store = stores.memory()
    suspend = store.suspend
    told: list[bool] = []

    async def late(lease: Lease, **options: Any) -> Any:
        if not told:
            told.append(True)  # another process, in the moment before the run suspends
            await store.signal("run", "second", b'"2"')
            await store.signal("run", "first", b'"1"')
        return await suspend(lease, **options)

    store.suspend = late  # type: ignore[method-assign]

    @workflow
    async def in_order(ctx: Context[Any]) -> list[Any]:
        return [await ctx.wait_for_signal("first"), await ctx.wait_for_signal("second")]

    async with world(in_order, store=store) as here, asyncio.timeout(PATIENCE):
        assert await here.runtime.run(in_order, id="run") == Ok(["1", "2"])


async def test_at_most_once_is_not_used_up_by_a_deploy_before_it_was_called() -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    charged: list[int] = []

    async def prepare() -> None:
        reached.set()
        await go_on.wait()

    async def charge() -> str:
        charged.append(1)
        return "charged"

    @workflow
    async def pay(ctx: Context[Any]) -> str:
        await ctx.step(prepare)
        return await ctx.step(charge, at_most_once=True)

    store = stores.memory()
    async with Runtime(store, [pay]) as runtime:
        await runtime.start(pay, id="run")
        await reached.wait()
        leaving = asyncio.ensure_future(runtime.close())
        await asyncio.sleep(0)
        go_on.set()
        await leaving
    async with world(pay, store=store) as here:
        here.clock.advance("36500d")  # the worker above went by the real clock
        assert (await here.runtime.sweep())["run"] == Ok("charged")
    assert charged == [1]


@pytest.mark.parametrize("clean_up", [0.0, 0.02])
async def test_cancelling_a_step_gives_the_same_order_as_its_replay(clean_up: float) -> None:
    ran: list[str] = []

    async def quick(label: str) -> str:
        ran.append(label)
        return label

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(clean_up)

    @workflow
    async def flow(ctx: Context[Any]) -> list[str]:
        order: list[str] = []

        async def cancelled() -> None:
            try:
                await ctx.step("slow", slow)
            except asyncio.CancelledError:
                order.append("cancelled")
                raise

        async def canceller() -> None:
            await ctx.step("quick", quick, "c1", key="c1")
            task.cancel()

        async def other() -> None:
            await ctx.step("quick", quick, "o1", key="o1")
            await ctx.step("quick", quick, "o2", key="o2")
            order.append("other")

        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        await asyncio.gather(canceller(), other())
        await asyncio.wait([task])
        await ctx.step("quick", quick, f"first:{order[0]}", key=f"first:{order[0]}")
        await ctx.sleep("until the replay", "1h")
        return order

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        before = list(ran)
        replayed = (await here.later("1h"))["run"]
        assert isinstance(replayed, Ok)
        assert sorted(replayed.value) == ["cancelled", "other"]
    assert ran == before


async def test_retrying_a_run_keeps_the_failures_that_its_body_handled() -> None:
    calls: list[str] = []

    async def card() -> str:
        calls.append("card")
        raise ValueError("declined") if calls.count("card") == 1 else AssertionError("a handled failure is not tried again")

    async def transfer() -> str:
        calls.append("transfer")
        return "paid"

    async def ship() -> str:
        calls.append("ship")
        if calls.count("ship") == 1:
            raise OSError("no van")
        return "shipped"

    @workflow
    async def order(ctx: Context[Any]) -> list[str]:
        try:
            paid = await ctx.step(card)
        except ValueError:
            paid = await ctx.step(transfer)
        return [paid, await ctx.step(ship)]

    async with world(order) as here:
        outcome = await here.runtime.run(order, id="run")
        assert isinstance(outcome, Err)
        await here.runtime.retry("run")
        assert await here.runtime.sweep() == {"run": Ok(["paid", "shipped"])}
    assert calls == ["card", "transfer", "ship", "ship"]


async def test_the_key_of_a_cancelled_sleep_has_a_new_deadline_when_it_is_used_again() -> None:
    @workflow
    async def debounce(ctx: Context[Any]) -> str:
        for n in range(3):
            quiet = asyncio.ensure_future(ctx.sleep("quiet", "10m"))
            more = asyncio.ensure_future(ctx.wait_for_signal("typed", key=f"typed{n}"))
            done, pending = await asyncio.wait([quiet, more], return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.wait([quiet, more])
            if quiet in done:
                return f"quiet after {n} keys"
        return "never quiet"

    async with world(debounce) as here:
        await here.runtime.run(debounce, id="run")
        for _ in range(2):
            here.clock.advance("9m")
            await here.runtime.signal("run", "typed")
            outcomes = await here.runtime.sweep()
            assert isinstance(outcomes["run"], Suspended)
        assert await here.later("9m") == {}
        assert await here.later("1m") == {"run": Ok("quiet after 2 keys")}


async def test_a_suspend_that_fails_leaves_no_task_of_the_body_behind() -> None:
    store = stores.memory()

    async def fails(lease: Lease, **options: Any) -> Any:
        raise PersistenceError("the disk", "is full")

    store.suspend = fails  # type: ignore[method-assign]
    left: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        try:
            await ctx.sleep("nap", "1h")
        finally:
            left.append("body")

    async with world(flow, store=store) as here:
        with pytest.raises(PersistenceError, match="is full"):
            await here.runtime.run(flow, id="run")
        assert left == ["body"]
        assert stored(here).row.status == "pending", "given back at once"


async def test_code_that_swallows_everything_does_not_keep_the_loop_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.body.leaving.CLOSING_SECONDS", 0.05)
    cut_off: list[bool] = []
    swallowed: list[int] = []

    @workflow
    async def greedy(ctx: Context[Any]) -> None:
        while not cut_off:
            try:
                await ctx.sleep("nap", "1h")
            except BaseException:
                swallowed.append(1)

    async with world(greedy) as here, asyncio.timeout(PATIENCE):
        with pytest.warns(UserWarning, match="does not end when it is cancelled"):
            assert isinstance(await here.runtime.run(greedy, id="run"), Suspended)
        cut_off.append(True)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


class Hostile:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("looked at")


@pytest.mark.parametrize("where", ["body", "step"])
async def test_a_value_that_cannot_even_be_looked_at_fails_its_run_and_hangs_nothing(where: str) -> None:
    async def make() -> Any:
        return Hostile()

    async def flow(ctx: Context[Any]) -> Any:
        return await ctx.step(make) if where == "step" else Hostile()

    definition = Workflow("flow", flow)
    async with world(definition) as here, asyncio.timeout(PATIENCE):
        outcome = await here.runtime.run(definition, id="run")
        assert isinstance(outcome, Err)


async def test_a_sweep_at_a_later_instant_goes_on_from_there() -> None:
    from datetime import UTC, datetime, timedelta

    @workflow
    async def naps(ctx: Context[Any]) -> str:
        await ctx.sleep("long", "1h")
        await ctx.sleep("short", "5ms")
        return "awake"

    runtime = Runtime(stores.memory(), [naps], concurrency=0)
    async with asyncio.timeout(PATIENCE):
        await runtime.run(naps, id="run")
        assert await runtime.sweep(now=datetime.now(UTC) + timedelta(hours=2)) == {"run": Ok("awake")}
    await runtime.close()


def test_the_end_of_the_loop_gives_a_run_back_at_once() -> None:
    store = stores.memory()
    is_stuck = asyncio.Event()

    async def forever() -> None:
        is_stuck.set()
        await asyncio.Event().wait()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        if not is_stuck.is_set():
            await ctx.step("stuck", forever)
        return "went on"

    async def first() -> None:
        asyncio.get_running_loop().create_task(flow.run(id="run", store=store))
        await is_stuck.wait()

    async def second() -> Any:
        return await flow.run(id="run", store=store, wait=False)

    asyncio.run(first())
    assert asyncio.run(second()) == Ok("went on")


async def test_a_closed_runtime_is_not_entered_again() -> None:
    runtime = Runtime(stores.memory(), clock=ManualClock())
    async with runtime:
        pass
    with pytest.raises(RuntimeError, match="make a new one"):
        async with runtime:
            pass
