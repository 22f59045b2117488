"""`ctx.continue_as`: a run starts over with new arguments and an empty journal, and is still the same run."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from perdure import ChildrenOpen, Context, Err, Ok, Runtime, Suspended, current_step, events, stores, workflow
from perdure.backends.memory.store import MemoryStore
from perdure.errors import DeadlineExceeded, InvalidInput, PersistenceError, RunCancelled, RunConflict, StepFailed
from perdure.events import Event, ResumeStateCollector
from perdure.model.journal import Entry
from perdure.model.records import Lease, NewInput, RunRow
from perdure.store import Store
from perdure.testing import ManualClock
from tests.campaign import times
from tests.engine.worlds import world


@workflow
async def count(ctx: Context, number: int, until: int) -> list[Any]:
    """Counts by starting over."""
    key = await ctx.step("next", lambda: current_step().idempotency_key)
    if number < until:
        await ctx.continue_as(number + 1, until)
    return [number, key, ctx.idempotency_key("next")]


async def row_of(store: Store, run_id: str = "run") -> RunRow:
    row = await store.get(run_id)
    assert row is not None
    return row


THREE = Ok([3, "run;generation=3/next", "run;generation=3/next"])


async def test_a_run_starts_over_until_it_returns() -> None:
    async with world(count) as here:
        assert await here.runtime.run(count, 0, 3, id="run") == THREE
        row = await row_of(here.runtime.store)
        assert (row.generation, row.status) == (3, "completed")
        assert await here.keys("run") == ["next"]


async def test_every_way_of_running_goes_on_through_a_new_start() -> None:
    assert await count.run(0, 3, id="run", store=stores.memory()) == THREE
    started = await count.start(0, 3)
    assert (await started)[0] == 3
    assert await started.outcome() == Ok(await started)
    store = stores.memory()
    async with Runtime(store=store, workflows=[count]) as runtime:
        run = await runtime.start(count, 0, 3, id="run")
        assert Ok(await run) == THREE
        other = await runtime.start(count, 0, 3, id="other")
        assert isinstance(await other.outcome(), Ok)
    async with world(count) as here:
        await here.runtime.start(count, 0, 3, id="run")
        assert await here.runtime.resume("run") == THREE


async def test_a_call_in_memory_starts_over() -> None:
    value = await count(0, 3)
    assert value[0] == 3
    assert value[1].endswith(";generation=3/next")


async def test_a_sweep_gives_a_run_that_starts_over_as_due() -> None:
    async with world(count) as here:
        await here.runtime.start(count, 0, 1, id="run")
        (outcome,) = (await here.runtime.sweep()).values()
        assert isinstance(outcome, Suspended)
        assert (await row_of(here.runtime.store)).generation == 1
        assert await here.runtime.sweep() == {"run": Ok([1, *["run;generation=1/next"] * 2])}


async def test_nothing_after_it_runs_but_finally_does() -> None:
    said: list[str] = []

    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> int:
        try:
            if number == 0:
                async with asyncio.TaskGroup():
                    await ctx.continue_as(1)
                said.append("never")  # type: ignore[unreachable]  # it is annotated so
        except Exception:  # which it is not
            said.append("never")
            raise
        else:
            return number
        finally:
            said.append(await ctx.step("clean", lambda: f"cleaned {number}"))

    async with world(flow) as here:
        assert await here.runtime.run(flow, 0, id="run") == Ok(1)
    assert said == ["cleaned 0", "cleaned 1"]


async def test_a_body_that_fails_in_finally_has_failed() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context) -> None:
        try:
            await ctx.continue_as()
        finally:
            raise ValueError("no")

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueError)
        assert (await row_of(here.runtime.store)).generation == 0


async def test_arguments_are_checked_before_anything_changes() -> None:
    refused: list[str] = []

    @workflow(name="flow")
    async def flow(ctx: Context, number: int, *, word: str = "a") -> str:
        for args, kwargs in ((("one",), {}), ((), {}), ((1, 2), {}), ((1,), {"word": 5}), ((1,), {"other": 1})):
            try:
                await ctx.continue_as(*args, **kwargs)
            except InvalidInput as error:
                refused.append(str(error))
        if number == 0:
            await ctx.continue_as(1, word="b")
        return word

    async with world(flow) as here:
        assert await here.runtime.run(flow, 0, id="run") == Ok("b")
        assert (await row_of(here.runtime.store)).generation == 1
    assert len(refused) == 10
    assert "number" in refused[0]


async def test_it_is_refused_in_steps_and_in_other_tasks() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context) -> list[str]:
        async def inside() -> str:
            try:
                await ctx.continue_as()
            except RuntimeError as error:
                return str(error)

        in_step = await ctx.step("inside", inside)
        return [in_step, await asyncio.create_task(inside())]

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, id="run")
        assert isinstance(outcome, Ok)
        in_step, in_task = outcome.value
    assert "inside a step's function" in in_step
    assert "call it in the body itself" in in_task


async def test_open_children_are_refused() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> list[str]:
        with pytest.raises(ChildrenOpen, match="'pay'") as refusal:
            await ctx.continue_as(1)
        return refusal.value.keys

    journal = [
        Entry(seq=1, key="ended", kind="child", phase="open", payload=b'{"id":"a"}'),
        Entry(seq=2, key="ended", kind="child", payload=b"1"),
        Entry(seq=3, key="pay", kind="child", phase="open", payload=b'{"id":"b"}'),
        Entry(seq=4, key="alone", kind="child", phase="open", payload=b'{"id":"c","detached":true}'),
    ]
    async with world(flow, on_unknown_steps="ignore", on_divergence="run") as here:
        store = here.runtime.store
        await here.runtime.start(flow, 0, id="run")
        claim = await store.acquire("run", 10, now=here.clock.store_now())
        assert claim is not None
        await store.record(claim.lease, journal)
        await store.release(claim.lease, now=here.clock.store_now())
        assert await here.runtime.resume("run") == Ok(["pay"])


async def test_signals_that_were_not_received_go_on() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, seen: list[int]) -> list[int]:
        number = await ctx.wait_for_signal("number", returns=int)
        seen = [*seen, number]
        if len(seen) < 4:
            await ctx.continue_as(seen)
        return seen

    async with world(flow) as here:
        await here.runtime.start(flow, [], id="run")
        for number in range(3):
            await here.runtime.signal("run", "number", number, dedupe=f"d{number}")
        assert isinstance(await here.runtime.resume("run"), Suspended)
        await here.runtime.signal("run", "number", 1, dedupe="d1")  # sent again, generations later
        await here.runtime.signal("run", "number", 3, dedupe="d3")
        assert await here.runtime.resume("run") == Ok([0, 1, 2, 3])
        assert (await row_of(here.runtime.store)).generation == 3


async def test_random_values_and_time_are_those_of_the_new_start() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, seen: list[Any]) -> list[Any]:
        seen = [*seen, [str(ctx.uuid4()), ctx.random(), ctx.now().isoformat()]]
        await ctx.sleep("pause", "1h")
        if len(seen) < 3:
            await ctx.continue_as(seen)
        return seen

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, [], id="run"), Suspended)
        for _ in range(2):
            await here.later("1h")
            await here.runtime.sweep()
        (outcome,) = (await here.later("1h")).values()
        assert isinstance(outcome, Ok)
        ids, numbers, instants = zip(*outcome.value, strict=True)
    assert len({*ids}) == len({*numbers}) == 3
    assert instants[0] < instants[1] < instants[2]


async def test_a_replay_starts_over_at_the_same_place() -> None:
    calls: Counter[str] = Counter()

    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> int:
        await ctx.step("work", lambda: calls.update([f"work {number}"]))
        await ctx.sleep("pause", "1h")
        if number < 2:
            await ctx.continue_as(number + 1)
        return number

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, 0, id="run"), Suspended)
        for _ in range(3):
            await here.later("1h")
            await here.runtime.sweep()
        assert (await row_of(here.runtime.store)).status == "completed"
    assert calls == {"work 0": 1, "work 1": 1, "work 2": 1}


class DownAtFirst(MemoryStore):
    """A store that fails when a run first starts over, before or after it is done."""

    failures = 1

    async def continue_as(self, lease: Lease, new: NewInput, *, now: int | None = None) -> None:
        if self.failures:
            self.failures -= 1
            raise PersistenceError("the store", "it is down")
        await super().continue_as(lease, new, now=now)


async def test_a_new_start_that_the_store_did_not_take_is_tried_again() -> None:
    calls: list[int] = []

    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> int:
        await ctx.step("work", calls.append, number)
        if number == 0:
            await ctx.continue_as(1)
        return number

    async with world(flow, store=DownAtFirst()) as here:
        with pytest.raises(PersistenceError):
            await here.runtime.run(flow, 0, id="run")
        row = await row_of(here.runtime.store)
        assert (row.status, row.generation, row.problem is not None) == ("pending", 0, True)
        assert len((await here.runtime.check()).fits) == 1
        assert await here.runtime.resume("run") == Ok(1)
        assert (await row_of(here.runtime.store)).problem is None
    assert calls == [0, 1]


async def test_a_repeated_start_finds_the_run_by_its_first_input() -> None:
    async with world(count) as here:
        await here.runtime.run(count, 0, 2, id="run")
        run = await here.runtime.start(count, 0, 2, id="run")
        assert (await run)[0] == 2
        assert await here.runtime.run(count, 0, 2, id="run") == await run.outcome()
        for other in (1, 2):
            with pytest.raises(RunConflict):
                await here.runtime.start(count, other, 2, id="run")


async def test_a_cancel_reaches_the_new_start_at_its_first_wait() -> None:
    said: list[str] = []

    @workflow(name="flow")
    async def flow(ctx: Context, number: int, run_id: str) -> None:
        said.append(f"start {number}")
        if number == 0:
            await ctx.step("cancel", here.runtime.store.cancel, run_id)
            await ctx.continue_as(1, run_id)
        try:
            await ctx.wait_for_signal("never")
        finally:
            said.append("cancelled")

    async with world(flow) as here:
        outcome = await here.runtime.run(flow, 0, "run", id="run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        assert (await row_of(here.runtime.store)).status == "cancelled"
    # The request may be known before the body has started over: then it ends where it is.
    assert said in (["start 0", "start 1", "cancelled"], ["start 0"])


async def test_a_cancelled_body_cannot_start_over() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> None:
        try:
            await ctx.wait_for_signal("never")
        finally:
            if number < 3:  # and not for ever, if it could
                await ctx.continue_as(number + 1)

    async with world(flow) as here:
        await here.runtime.run(flow, 0, id="run")
        await here.runtime.cancel("run")
        outcome = await here.runtime.resume("run")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        assert (await row_of(here.runtime.store)).generation == 0


async def test_compensations_are_forgotten() -> None:
    undone: list[int] = []

    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> None:
        await ctx.step("book", lambda: number, compensate=undone.append)
        if number < 2:
            await ctx.continue_as(number + 1)
        raise ValueError("sold out")

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, 0, id="run"), Err)
    assert undone == [2]


async def test_the_deadline_stays_that_of_the_run() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> None:
        await ctx.sleep("pause", "20m")
        await ctx.continue_as(number + 1)

    async with world(flow) as here:
        await here.runtime.start(flow, 0, id="run", deadline="1h")
        outcome: Any = None
        for _ in range(8):
            outcome = (await here.later("10m")).get("run", outcome)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert (await row_of(here.runtime.store)).generation == 1


async def test_a_failed_run_is_retried_in_its_generation() -> None:
    fails = [True]

    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> list[str]:
        def work() -> str:
            if number == 2 and fails:
                fails.clear()
                raise ValueError("not yet")
            return current_step().idempotency_key

        key = await ctx.step("work", work)
        if number < 3:
            await ctx.continue_as(number + 1)
        return [key]

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, 0, id="run"), Err)
        await here.runtime.retry("run")
        assert await here.runtime.resume("run") == Ok(["run;generation=3/work"])


async def test_a_fork_of_a_later_generation_is_a_run_of_its_own() -> None:
    async with world(count) as here:
        await here.runtime.run(count, 0, 2, id="run")
        await here.runtime.fork("run", from_step="next", id="fork")
        assert await here.runtime.resume("fork") == Ok([2, "fork/next", "fork/next"])
        row = await row_of(here.runtime.store, "fork")
        assert (row.generation, row.first_input_hash) == (0, None)


async def test_operators_see_the_generation() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> None:
        if number < 2:
            await ctx.continue_as(number + 1)
        await ctx.wait_for_signal("go")

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, 0, id="run"), Suspended)
        described = await here.runtime.describe("run")
        assert (described.generation, described.input) == (2, [[2], {}])
        assert described.continued_at is not None
        assert [line.generation for line in await here.runtime.list()] == [2]
        assert len((await here.runtime.check()).fits) == 1


async def test_a_snapshot_of_a_later_generation_goes_on_with_its_input() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, number: int) -> list[Any]:
        key = await ctx.step("work", lambda: current_step().idempotency_key)
        if number < 2:
            await ctx.continue_as(number + 1)
        return [number, key, await ctx.wait_for_signal("go", returns=int)]

    async with world(flow) as here:
        await here.runtime.run(flow, 0, id="run")
        run = await here.runtime.get("run")
        assert run is not None
        snapshot = await run.snapshot()
    copy = await flow.start(0, id="run", store=stores.memory(), snapshot=snapshot)
    await copy.signal("go", 7)
    assert await copy == [2, "run;generation=2/work", 7]
    assert snapshot.to_dict()["metadata"]["perdure"]["generation"] == 2


async def test_listeners_hear_of_each_start() -> None:
    heard: list[Event] = []
    collector = ResumeStateCollector()

    def listen(event: Event) -> None:
        heard.append(event)
        collector.handle_event(event)
        if isinstance(event, events.RunContinuedEvent):
            assert collector.resume_state().steps == {}

    assert await count.run(0, 2, id="run", store=stores.memory(), on_event=listen) != THREE
    ends = [event for event in heard if event.is_terminal]
    assert [event.type for event in ends] == ["run_continued", "run_continued", "run_complete"]
    assert [event.generation for event in ends if isinstance(event, events.RunContinuedEvent)] == [1, 2]
    assert list(collector.resume_state().steps) == ["next"]


async def test_an_input_that_the_store_does_not_take_fails_the_run() -> None:
    @workflow(name="flow")
    async def flow(ctx: Context, text: str) -> int:
        if not text:
            await ctx.continue_as("x" * (9 << 20))
        return len(text)

    outcome = await flow.run("", id="run", store=stores.memory())
    assert isinstance(outcome, Err)
    assert isinstance(outcome.error, InvalidInput | StepFailed)


async def test_a_poller_that_starts_over_ten_thousand_times_keeps_its_size() -> None:
    rounds = times(10_000)

    async def poll() -> str:  # a thread would have to fight for its turn with the loop below
        return "x" * 1000

    @workflow(name="poller")
    async def poller(ctx: Context, number: int) -> int:
        await ctx.step("poll", poll)
        await ctx.wait_for_signal("tick")
        if number < rounds:
            await ctx.continue_as(number + 1)
        return number

    store = stores.memory()
    sizes: list[int] = []
    async with Runtime(store=store, workflows=[poller], clock=ManualClock()) as runtime:
        run = await runtime.start(poller, 0, id="run")
        tracemalloc.start()
        try:
            for number in range(rounds + 1):
                await runtime.signal("run", "tick", number)
                while (row := await row_of(store)).generation == number and not row.ended:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0)
                if number in (rounds // 2, rounds - 1):
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert await run == rounds
    assert len(await store.journal("run")) <= 4
    assert sizes[1] - sizes[0] < 100_000, sizes
