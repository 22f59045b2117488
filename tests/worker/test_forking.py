"""`runtime.fork`: a new run that repeats another up to a step."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, current_step, stores, workflow
from perdure.errors import RunConflict, RunNotFound, StepNotFound
from perdure.operations.fork_run import fork
from perdure.snapshots.consistent_view import View
from perdure.store import Store
from perdure.testing import ManualClock
from tests.campaign import times
from tests.engine.random_programs import BRANCHING, LEAVES, Program, World, flow_of, random_program
from tests.simulation import LoopClock, simulate
from tests.worker.flows import Flaky, ask, client, greet


class Ledger:
    """A workflow of three steps whose calls, with their idempotency keys, are noted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

        async def flow(ctx: Context, order: str) -> list[Any]:
            number = ctx.random()
            return [await ctx.step(name, self._call, name, order, number) for name in ("fetch", "charge", "ship")]

        self.flow: Workflow[[str], list[Any]] = Workflow("ledger", flow)

    def _call(self, name: str, order: str, number: float) -> str:
        self.calls.append((name, current_step().idempotency_key))
        return f"{name} {order} {number}"

    def names(self) -> list[str]:
        """The steps that were called since this was asked last."""
        names, self.calls = [name for name, _ in self.calls], []
        return names


async def test_a_fork_calls_the_step_and_what_follows_with_new_idempotency_keys(store: Store) -> None:
    ledger = Ledger()
    async with client(store, ledger.flow) as runtime:
        first = await runtime.run(ledger.flow, "o-1", id="old")
        old_keys, _ = dict(ledger.calls), ledger.names()
        run = await runtime.fork("old", from_step="charge", id="new")
        assert run.id == "new"
        assert await runtime.sweep() == {"new": first}
        new_keys = dict(ledger.calls)
        assert ledger.names() == ["charge", "ship"]
        assert all(new_keys[name] != old_keys[name] for name in new_keys)
        assert [entry.key for entry in await store.journal("new")] == ["fetch", "charge", "ship"]
        row = await store.get("new")
        assert row is not None
        assert row.metadata == b'{"forked_from":"old"}'


async def test_the_old_run_stays_and_can_be_forked_again(store: Store) -> None:
    ledger = Ledger()
    async with client(store, ledger.flow) as runtime:
        await runtime.run(ledger.flow, "o-1", id="old", priority=3, metadata={"by": "ada"})
        before = await store.get("old"), await store.journal("old")
        forks = [await runtime.fork("old", from_step="fetch"), await runtime.fork("old", from_step="ship")]
        await runtime.sweep()
        assert (await store.get("old"), await store.journal("old")) == before
        rows = [await store.get(run.id) for run in forks]
        assert [(row.status, row.priority, row.metadata) for row in rows if row is not None] == [
            ("completed", 3, b'{"by":"ada","forked_from":"old"}')
        ] * 2


async def test_a_fork_of_a_failed_run_goes_on_with_the_code_that_was_mended(store: Store) -> None:
    flaky = Flaky()
    async with client(store, flaky.flow) as runtime:
        assert isinstance(await runtime.run(flaky.flow, id="old"), Err)
        flaky.is_broken = False
        await runtime.fork("old", from_step="second", id="new")
        assert await runtime.sweep() == {"new": Ok("first second")}
        assert flaky.calls == ["first", "second", "second"]
        old = await runtime.get("old")
        assert old is not None
        assert await old.status() == "failed"


async def test_what_cannot_be_forked_says_why(store: Store) -> None:
    ledger = Ledger()
    async with client(store, ledger.flow, greet) as runtime:
        with pytest.raises(RunNotFound):
            await runtime.fork("old", from_step="charge")
        await runtime.run(ledger.flow, "o-1", id="old")
        await runtime.start(greet, "Ada", id="new")
        with pytest.raises(StepNotFound, match="run 'old' has recorded no step 'chrge'; did you mean 'charge'") as caught:
            await runtime.fork("old", from_step="chrge")
        assert caught.value.similar == ["charge"]
        with pytest.raises(StepNotFound, match="did you mean 'fetch' or 'charge' or 'ship'"):
            await runtime.fork("old", from_step="xyz")
        with pytest.raises(StepNotFound, match="it has recorded nothing so far"):
            await runtime.fork("new", from_step="greet")
        for taken in ("new", "old"):
            with pytest.raises(RunConflict, match=f"'{taken}' exists already"):
                await runtime.fork("old", from_step="ship", id=taken)
        with pytest.raises(ValueError, match="a step's key"):
            await runtime.fork("old", from_step="")
        assert {info.id for info in await runtime.list()} == {"old", "new"}


async def test_a_fork_gets_the_signals_that_the_old_run_consumed_later_or_not_at_all(store: Store) -> None:
    @workflow
    async def review(ctx: Context) -> list[Any]:
        first = await ctx.wait_for_signal("note", key="first")
        await ctx.step("read", lambda: None)
        return [first, await ctx.wait_for_signal("note", key="second"), await ctx.wait_for_signal("note", key="third")]

    async with client(store, review, unload_grace=0) as runtime:
        await runtime.run(review, id="old")
        for number in (1, 2):
            await runtime.signal("old", "note", number)
        assert isinstance(await runtime.resume("old"), Suspended)
        await runtime.signal("old", "other", 0, dedupe="once")
        await runtime.fork("old", from_step="read", id="new")
        assert [(each.name, each.payload, each.dedupe) for each in await store.inbox("new")] == [
            ("note", b"2", None),
            ("other", b"0", "once"),
        ]
        assert isinstance(await runtime.resume("new"), Suspended)
        await runtime.signal("new", "note", 3)
        assert await runtime.resume("new") == Ok([1, 2, 3])
        assert isinstance(await runtime.resume("old"), Suspended)


async def test_a_time_limit_around_the_step_has_the_time_that_was_left() -> None:
    clock = ManualClock()

    @workflow
    async def limited(ctx: Context) -> str:
        async with ctx.timeout("limit", "1h"):
            await ctx.step("first", lambda: clock.advance("10m"))
            return await ctx.step("second", lambda: "in time")

    @workflow
    async def late(ctx: Context) -> str:
        async with ctx.timeout("limit", "1h"):
            await ctx.step("first", lambda: None)
            await ctx.step("second", lambda: None)
            await ctx.wait_for_signal("never")
        return "not reached"

    async with client(stores.memory(), limited, late, clock=clock, unload_grace=0) as runtime:
        await runtime.run(limited, id="a")
        await runtime.run(late, id="b")
        clock.advance("2d")
        await runtime.fork("a", from_step="second", id="a2")
        await runtime.fork("b", from_step="second", id="b2")
        outcomes = await runtime.sweep()
        assert outcomes["a2"] == Ok("in time")
        assert isinstance(outcomes["b2"], Suspended)
        clock.advance("59m")
        assert await runtime.sweep() == {}
        clock.advance("1m")
        assert isinstance((await runtime.sweep())["b2"], Err)


async def test_steps_that_were_under_way_in_other_branches_begin_anew(store: Store) -> None:
    """Also one that runs at most once: in this run it was not called."""
    calls: list[tuple[str, int]] = []
    first_is_recorded = asyncio.Event()
    is_failing = True

    async def once() -> str:
        calls.append(("once", current_step().attempt))
        await first_is_recorded.wait()
        return "once"

    async def again() -> str:
        calls.append(("again", current_step().attempt))
        if is_failing and current_step().attempt == 1:
            raise ValueError("not yet")
        await first_is_recorded.wait()
        return "again"

    @workflow
    async def branches(ctx: Context) -> list[str]:
        async def chain() -> str:
            await ctx.step("first", asyncio.sleep, 0.01)
            first_is_recorded.set()
            return await ctx.step("second", lambda: "second")

        retry = Retry(attempts=2, wait_initial="1ms", wait_jitter=0)
        steps = ctx.step(once, at_most_once=True), ctx.step(again, retry=retry), chain()
        return list(await asyncio.gather(*steps))

    async with client(store, branches) as runtime:
        assert await runtime.run(branches, id="old") == Ok(["once", "again", "second"])
        phases = {(entry.key, entry.phase) for entry in await store.journal("old")}
        assert {("once", "open"), ("again", "open")} <= phases
        is_failing = False
        calls.clear()
        await runtime.fork("old", from_step="first", id="new")
        assert [entry.key for entry in await store.journal("new")] == []
        assert await runtime.sweep() == {"new": Ok(["once", "again", "second"])}
        assert calls == [("once", 1), ("again", 1)]


async def test_the_first_record_counts_also_if_retry_has_set_it_aside(store: Store) -> None:
    flaky = Flaky()
    async with client(store, flaky.flow) as runtime:
        await runtime.run(flaky.flow, id="old")
        flaky.is_broken = False
        await runtime.retry("old")
        assert await runtime.sweep() == {"old": Ok("first second")}
        await runtime.fork("old", from_step="second", id="new")
        assert [entry.key for entry in await store.journal("new")] == ["first"]
        assert await runtime.sweep() == {"new": Ok("first second")}


async def test_a_fork_has_the_deadline_that_was_left_and_no_parent(store: Store) -> None:
    ledger = Ledger()
    async with client(store, ledger.flow) as runtime:
        await runtime.run(ledger.flow, "o-1", id="old")
        row = await store.get("old")
        assert row is not None
        journal = await store.journal("old")
        child = replace(row, deadline=journal[1].started_at + 5, parent_id="p", parent_key="k")
        made = fork(View(child, journal, len(journal)), "charge", "new", journal[1].started_at + 1000)
        assert (made.new.deadline, made.new.parent_id, made.new.parent_key) == (journal[1].started_at + 1005, None, None)
        assert made.created_at == row.created_at


async def test_a_run_that_is_being_driven_can_be_forked(store: Store) -> None:
    async with client(store, ask, unload_grace=0) as runtime:
        run = await runtime.start(ask, id="old")
        await runtime.sweep()
        await run.signal("answer", "yes")
        async with Runtime(store, [ask]) as working:
            assert await (await working.fork("old", from_step="answer", id="new")) == "yes"
            assert await run == "yes"


def test_runtime_sync_forks() -> None:
    ledger = Ledger()
    with Runtime(stores.memory(), [ledger.flow]).sync as runtime:
        old = runtime.start(ledger.flow, "o-1").result()
        first = ledger.names()
        (info,) = runtime.list()
        assert runtime.fork(info.id, from_step="ship").result() == old
        assert (first, ledger.names()) == (["fetch", "charge", "ship"], ["ship"])


async def _wrong_forks(seed: int, program: Program) -> list[str]:
    """What goes wrong when this program has run and is forked at some of its records."""
    store, clock, rng = stores.memory(), LoopClock(), random.Random(seed)

    async def run_to_end(world: World, run_id: str) -> Any:
        flow = flow_of(program, world)
        runtime = Runtime(store, [flow], clock=clock, concurrency=0)
        outcome: Any = await (runtime.run(flow, id=run_id) if run_id == "old" else runtime.resume(run_id))
        while isinstance(outcome, Suspended):
            await asyncio.sleep(0.5)
            outcome = await runtime.resume(run_id)
        await runtime.close()
        return outcome

    old = World(seed)
    wrong = [] if await run_to_end(old, "old") == Ok(None) else ["the old run failed"]
    keys = sorted({entry.key for entry in await store.journal("old") if entry.key})
    for key in rng.sample(keys, min(len(keys), 4)):
        await asyncio.sleep(3600)
        new, new_id = World(seed + 1), f"from {key}"
        await Runtime(store, clock=clock, concurrency=0).fork("old", from_step=key, id=new_id)
        kept = await store.journal(new_id)
        new.recorded = {entry.key for entry in kept if entry.phase == "close"}
        is_kept = [seen in new.recorded for seen, _ in old.seen]
        new.expected = old.seen[: is_kept.index(False)]  # the seal, at least, is not kept
        outcome = await run_to_end(new, new_id)
        wrong += [f"{new_id}: {each}" for each in new.wrong]
        wrong += [] if outcome == Ok(None) else [f"{new_id} ended with {outcome!r}"]
    return wrong


def test_forks_of_random_programs_see_the_same_up_to_the_step_repeat_no_kept_step_and_end() -> None:
    wrong = {}
    for seed in range(times(300)):
        program = random_program(random.Random(seed), (*LEAVES, *BRANCHING))
        if found := simulate(_wrong_forks(seed, program)):
            wrong[f"{seed}: {' '.join(map(str, program))}"] = found
    assert not wrong
