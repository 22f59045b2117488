"""A ctx operation returns when its record is acknowledged, and what is recorded reaches the body before anything else does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, stores, workflow
from perdure.errors import PersistenceError, RunCancelled
from tests.engine.own_waits import own_wait
from tests.engine.worlds import world
from tests.patience import PATIENCE, turns
from tests.simulation import HeldBack, LoopClock, _Proxy, simulate


class GatedStore(_Proxy):
    """A store whose records wait for a gate, and of which as many fail as it is told. It notes the writes."""

    def __init__(self) -> None:
        super().__init__(stores.memory())
        self.gate = asyncio.Event()
        self.takes = 0.0
        self.held = asyncio.Event()
        self.failing = 0
        # In the order in which they were sent.
        self.sent: list[str] = []

    @property
    def writes(self) -> Counter[str]:
        return Counter(self.sent)

    def let_through(self) -> None:
        """Let those go on that wait now, and no other."""
        self.held.clear()
        self.gate.set()
        self.gate.clear()

    def _around(self, method: Callable[..., Awaitable[Any]]) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.sent.append(method.__name__)
            if method.__name__ == "record":
                self.held.set()
                await self.gate.wait()
                await asyncio.sleep(self.takes)
                if self.failing:
                    self.failing -= 1
                    raise OSError("disk full")
            return await method(*args, **kwargs)

        return call


async def work(label: str = "work") -> str:
    return label


OPERATIONS: dict[str, Callable[[Context[Any]], Awaitable[Any]]] = {
    "step": lambda ctx: ctx.step(work),
    "plain function": lambda ctx: ctx.step("plain", lambda: 1),
    "sleep": lambda ctx: ctx.sleep("nap", 0),
    "signal": lambda ctx: ctx.wait_for_signal("go"),
    "race": lambda ctx: ctx.race(ctx.step(work), ctx.step("other", asyncio.sleep, 9)),
    "map": lambda ctx: ctx.map("each", work, ["a"]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_the_body_goes_on_when_the_store_has_acknowledged(operation: str) -> None:
    store: Any = GatedStore()
    reached: list[Any] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        reached.append(await OPERATIONS[operation](ctx))

    async with world(flow, store=store) as here:
        run = await here.runtime.start(flow, id="run")
        await run.signal("go", None)
        driving = asyncio.ensure_future(here.runtime.resume("run"))
        await store.held.wait()
        await turns()
        assert not reached
        store.gate.set()
        assert await driving == Ok(None)
        assert len(reached) == 1


async def test_an_error_too_is_raised_when_it_is_recorded() -> None:
    store: Any = GatedStore()
    caught: list[str] = []

    async def fail() -> None:
        raise ValueError("no")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        try:
            await ctx.step(fail)
        except ValueError as error:
            caught.append(str(error))

    async with world(flow, store=store) as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.held.wait()
        await turns()
        assert not caught
        store.gate.set()
        assert await driving == Ok(None)
        assert caught == ["no"]


async def test_a_record_that_fails_never_reaches_the_body() -> None:
    reached: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        reached.append(await ctx.step(work))

    store: Any = GatedStore()
    store.gate.set()
    store.failing = 1
    async with world(flow, store=store) as here:
        with pytest.raises(PersistenceError, match="could not be recorded"):
            await here.runtime.run(flow, id="run")
    assert not reached


async def return_value(ctx: Context[Any]) -> str:
    return "returned"


async def fail(ctx: Context[Any]) -> str:
    raise ValueError("failed")


async def start_over(ctx: Context[Any]) -> str:
    await ctx.continue_as(is_over=True)


@pytest.mark.parametrize("end", [return_value, fail, start_over])
async def test_a_run_does_not_end_when_its_last_record_fails(end: Callable[[Context[Any]], Awaitable[str]]) -> None:
    """Its journal would lack what the record was about, for good."""
    store: Any = GatedStore()
    attempts: list[int] = []

    @workflow
    async def flow(ctx: Context[Any], *, is_over: bool = False) -> str:
        attempts.append(len(attempts))
        if is_over:
            return "started over"
        beside = asyncio.create_task(ctx.step(work))
        await store.held.wait()
        if len(attempts) > 1:
            await beside
        return await end(ctx)

    async with world(flow, store=store) as here, asyncio.timeout(PATIENCE):
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.held.wait()
        await turns()  # the function has ended
        store.failing = 1
        store.gate.set()
        with pytest.raises(PersistenceError, match="could not be recorded"):
            await driving
        assert store.sent == ["create", "record", "release"]
        assert await store.journal("run") == []
        outcome = (await here.later("10s"))["run"]
        if end is start_over:
            assert await here.runtime.sweep() == {"run": Ok("started over")}
            return
        assert await here.keys("run") == ["work"]
        if end is fail:
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, ValueError)
        else:
            assert outcome == Ok("returned")


@pytest.mark.parametrize("moment", range(8))
async def test_after_a_record_that_failed_nothing_more_is_written(moment: int) -> None:
    """Also not a result that comes a moment later, before the run has left memory: the journal would have a gap."""
    store: Any = GatedStore()
    release = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await asyncio.gather(ctx.step(work), ctx.step("slower", release.wait))

    async with world(flow, store=store) as here, asyncio.timeout(PATIENCE):
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.held.wait()
        store.failing = 1
        store.gate.set()
        await turns(moment)
        release.set()
        with pytest.raises(PersistenceError, match="could not be recorded"):
            await driving
        assert store.sent == ["create", "record", "release"]
        assert await here.later("10s") == {"run": Ok(None)}
        assert sorted(await here.keys("run")) == ["slower", "work"]


@pytest.mark.parametrize("is_written", [False, True], ids=["not written", "written"])
def test_a_record_that_the_end_of_the_process_cuts_off_is_sent_again(is_written: bool) -> None:
    """The event loop cancels all tasks then, and whether the write took effect is not known."""
    memory, calls = stores.memory(), list[str]()

    async def charge() -> None:
        calls.append("charge")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(charge)

    async def be_cut_off() -> None:
        store: Any = HeldBack(memory, before=not is_written)
        driving = asyncio.ensure_future(flow.run(id="run", store=store))
        await store.reached.wait()
        assert not driving.done()

    async def go_on() -> None:
        assert [(entry.seq, entry.key, entry.phase) for entry in await memory.journal("run")] == [(1, "charge", "close")]
        assert await flow.run(id="run", store=memory) == Ok(None)

    asyncio.run(be_cut_off())
    asyncio.run(go_on())
    assert calls == ["charge"]


def test_the_end_of_the_process_is_not_recorded_as_a_cancellation_by_the_body() -> None:
    memory, calls = stores.memory(), list[str]()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step(work)
        await ctx.step("hang once", hang_once)

    async def be_cut_off() -> None:
        driving = asyncio.ensure_future(flow.run(id="run", store=memory))
        await begun.wait()
        assert not driving.done()

    async def hang_once() -> None:
        calls.append("hang once")
        begun.set()
        if len(calls) == 1:
            await asyncio.get_running_loop().create_future()

    async def go_on() -> None:
        assert [(entry.key, entry.phase) for entry in await memory.journal("run")] == [("work", "close")]
        assert await flow.run(id="run", store=memory) == Ok(None)

    begun = asyncio.Event()
    asyncio.run(be_cut_off())
    asyncio.run(go_on())
    assert calls == ["hang once"] * 2


async def test_results_that_are_ready_together_share_a_write() -> None:
    store: Any = GatedStore()
    store.gate.set()

    @workflow
    async def flow(ctx: Context[Any]) -> list[str]:
        return list(await asyncio.gather(*(ctx.step(work, str(n), key=str(n)) for n in range(50))))

    async with world(flow, store=store) as here:
        assert await here.runtime.run(flow, id="run") == Ok([str(n) for n in range(50)])
    assert store.writes["record"] == 1


@pytest.mark.parametrize("wait", ["sleep", "signal", "retry"])
async def test_a_run_that_only_waits_makes_two_writes(wait: str) -> None:
    store: Any = GatedStore()
    store.gate.set()

    async def fail() -> None:
        raise OSError("not yet")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        if wait == "sleep":
            await ctx.sleep("nap", "1h")
        elif wait == "signal":
            await ctx.wait_for_signal("go")
        else:
            await ctx.step(fail, retry=Retry(attempts=2, wait_initial="1h", wait_max="1h", wait_jitter=0))

    async with world(flow, store=store) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert store.writes == {"create": 1, "suspend": 1}


async def test_the_deadline_of_a_wait_beside_a_running_step_is_recorded_at_once() -> None:
    store: Any = GatedStore()
    store.gate.set()
    release = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await asyncio.gather(ctx.sleep("nap", "1h"), ctx.step("long", release.wait))

    async with world(flow, store=store) as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await turns()
        assert [(entry.key, entry.phase) for entry in await store.journal("run")] == [("nap", "open")]
        release.set()
        await driving


async def test_a_step_starts_beside_results_that_are_not_acknowledged_but_not_beside_open_entries() -> None:
    store: Any = GatedStore()
    begun = {label: asyncio.Event() for label in ("quick", "beside", "limited")}

    async def note(label: str) -> None:
        begun[label].set()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        quick = asyncio.ensure_future(ctx.step("quick", note, "quick"))
        await own_wait(0.01)
        await ctx.step("beside", note, "beside")
        await quick
        async with ctx.timeout("limit", "1h"):
            await ctx.step("limited", note, "limited")

    async with world(flow, store=store) as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.held.wait()
        await asyncio.wait_for(begun["beside"].wait(), PATIENCE)
        assert await store.journal("run") == []
        store.gate.set()
        await asyncio.wait_for(begun["limited"].wait(), PATIENCE)
        assert ("limit", "open") in [(entry.key, entry.phase) for entry in await store.journal("run")]
        await driving


@pytest.mark.parametrize("options", [{"at_most_once": True}, {"compensate": lambda _: None}], ids=lambda each: next(iter(each)))
async def test_a_step_with_an_intent_starts_when_that_is_recorded_and_not_when_an_earlier_write_is(options: Any) -> None:
    store: Any = GatedStore()
    moves, recorded = asyncio.Event(), list[tuple[str, str]]()

    async def charge() -> None:
        recorded.extend((entry.key, entry.phase) for entry in await store.journal("run"))

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        async def branch() -> None:
            await moves.wait()
            await ctx.step(charge, **options)

        await asyncio.gather(ctx.step(work), branch())

    async with world(flow, store=store) as here, asyncio.timeout(PATIENCE):
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.held.wait()  # the result of the first branch is being written
        moves.set()
        await turns()
        store.let_through()
        await store.held.wait()  # the intent is being written
        await turns()
        store.gate.set()
        assert await driving == Ok(None)
    assert recorded == [("work", "close"), ("charge", "open")]


async def test_a_cancellation_that_comes_with_the_acknowledgement_comes_after_the_result() -> None:
    store: Any = GatedStore()
    said: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        said.append(await ctx.step(work))
        try:
            await ctx.sleep("nap", "1h")
        except asyncio.CancelledError:
            said.append("cancelled")
            raise

    async with world(flow, store=store) as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.held.wait()
        await here.runtime.cancel("run")  # which the holder hears with the reply of its record
        store.gate.set()
        outcome = await driving
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
    assert said == ["work", "cancelled"]


def test_a_time_limit_that_passes_while_the_record_is_written_does_not_hide_the_result() -> None:
    """It takes effect at the next await of its block, and of nothing after the block."""
    store: Any = GatedStore()
    store.gate.set()
    store.takes = 3
    said: list[str] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        async with asyncio.timeout(1):
            said.append(await ctx.step(work, "alone"))
        said.append(await ctx.step("after", work, "after"))
        try:
            async with asyncio.timeout(1):
                said.append(await ctx.step("in", work, "in time"))
                await ctx.step("late", asyncio.sleep, 3600)
        except TimeoutError:
            said.append("timed out")

    async def main() -> None:
        runtime = Runtime(store, [flow], clock=LoopClock(), concurrency=0)
        assert await runtime.run(flow, id="run") == Ok(None)
        await runtime.close()

    simulate(main())
    assert said == ["alone", "after", "in time", "timed out"]


async def test_a_cancelled_call_that_has_a_result_gives_it_and_the_next_await_is_cancelled() -> None:
    store: Any = GatedStore()
    seen: list[list[Any]] = []
    has_run = asyncio.Event()

    async def quick() -> str:
        has_run.set()
        return "done"

    async def branch(ctx: Context[Any], said: list[Any]) -> None:
        said.append(await ctx.step(quick))
        said.append("cleaning up is possible")
        try:
            await ctx.step("never", work)
        except asyncio.CancelledError:
            said.append("cancelled")
            raise

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        said: list[Any] = []
        seen.append(said)
        task = asyncio.ensure_future(branch(ctx, said))
        await asyncio.sleep(0)
        await has_run.wait()
        task.cancel()
        await asyncio.wait([task])
        said.append(task.cancelled())
        await ctx.sleep("nap", "1h")

    async with world(flow, store=store) as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await store.held.wait()
        await turns()
        store.gate.set()
        assert isinstance(await driving, Suspended)
        assert await here.later("1h") == {"run": Ok(None)}
    # What the function awaits by itself is over at once on the replay, so the call is cancelled before it has begun.
    assert seen == [["done", "cleaning up is possible", "cancelled", True], [True]]


async def test_a_key_that_is_used_again_after_a_cancelled_call_replays_to_the_second_call() -> None:
    """The first call found no result when it was cancelled, so it must not get that of the second on a replay."""
    seen: list[list[Any]] = []
    ran: list[str] = []

    async def hang_once() -> str:
        ran.append("hang once")
        if len(ran) == 1:
            await asyncio.sleep(3600)
        return "second"

    async def fail() -> None:
        await asyncio.sleep(0.001)
        raise ValueError("stop the group")

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        said: list[Any] = []
        seen.append(said)

        async def first() -> None:
            try:
                said.append(await ctx.step(hang_once))
            except asyncio.CancelledError:
                said.append("cancelled")
                raise

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(first())
                group.create_task(ctx.step(fail))
        except ExceptionGroup:
            said.append("failed")
        said.append(await ctx.step(hang_once))
        await ctx.sleep("nap", "1h")

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        assert await here.later("1h") == {"run": Ok(None)}
    assert seen == [["cancelled", "failed", "second"]] * 2
    assert ran == ["hang once"] * 2


async def test_a_snapshot_tells_a_cancelled_call_from_a_later_one_with_its_key() -> None:
    """The run goes on elsewhere from its snapshot, and the first call does not get the result of the second."""
    ran: list[str] = []
    seen: list[list[Any]] = []

    async def hang_once() -> str:
        ran.append("hang once")
        if len(ran) == 1:
            await asyncio.sleep(3600)
        return "second"

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        said: list[Any] = []
        seen.append(said)
        said.append(await ctx.race(ctx.step(hang_once), ctx.step("quick", work, "quick")))
        said.append(await ctx.step(hang_once))
        await ctx.sleep("nap", "1h")

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        run = await here.runtime.get("run")
        assert run is not None
        snapshot = await run.snapshot()
    assert await flow.run(id="elsewhere", store=stores.memory(), snapshot=snapshot.to_dict()) == Ok(None)
    assert seen == [["quick", "second"]] * 2
    assert ran == ["hang once"] * 2


async def test_a_cancellation_is_not_lost_behind_a_time_limit_that_passed_too_late() -> None:
    """The record of the limit is in the queue when the run is cancelled, and its block has ended: nothing takes the record."""
    store: Any = GatedStore()
    release = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        async with ctx.timeout("limit", "1s"):
            await release.wait()
        await ctx.sleep("nap", "1h")

    async with world(flow, store=store, unload_grace="1h") as here:
        driving = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        store.gate.set()
        await turns()
        store.gate.clear()
        store.held.clear()
        here.clock.advance("1s")
        await store.held.wait()  # the record that the limit has passed
        release.set()
        await turns()
        await here.runtime.cancel("run")
        store.gate.set()
        async with asyncio.timeout(PATIENCE):
            outcome = await driving
        if isinstance(outcome, Suspended):  # it was leaving memory just then, and is due at once
            outcome = (await here.runtime.sweep())["run"]
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
