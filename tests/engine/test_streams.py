"""Streams: what a run emits is read once and in order, by any number of readers, whatever happens to the run meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, current_step, register, stores, workflow
from perdure.engine import streams as engine_streams
from perdure.errors import (
    LeaseLost,
    PersistenceError,
    RunCancelled,
    RunFinished,
    RunNotFound,
    SnapshotCorrupt,
    StoreCapabilityError,
    StreamEnded,
    StreamFull,
    ValueNotStorable,
)
from perdure.model.records import Item, Lease, Pulse
from perdure.model.stream_items import ATTEMPT_ENDS, StreamItem
from tests.engine.replays import raised, stored, twice
from tests.engine.worlds import world
from tests.patience import PATIENCE, turns
from tests.simulation import LoopClock, MortalStore, SlowStore, simulate


class Records:
    """A memory store that counts what is written, and answers only while it is open."""

    def __init__(self) -> None:
        self.memory = stores.memory()
        self.open = asyncio.Event()
        self.open.set()
        self.writes: list[int] = []
        self.order: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    async def record(self, lease: Lease, entries: Sequence[Any] = (), *, items: Sequence[Item] = (), **options: Any) -> Pulse:
        await self.open.wait()
        of_user = [item for item in items if item.stream != ATTEMPT_ENDS]
        self.writes.append(len(of_user))
        self.order += [*(item.payload.decode() for item in of_user), *(entry.key for entry in entries)]
        return await self.memory.record(lease, entries, items=items, **options)


async def read(runtime: Runtime, stream: str = "out", run_id: str = "run", **options: Any) -> list[Any]:
    """Everything in the stream of a run that has ended."""
    run = await runtime.get(run_id)
    assert run is not None
    return [item async for item in run.stream(stream, **options)]


async def emit_all(stream: str, values: Sequence[Any]) -> None:
    """A step that emits these."""
    for value in values:
        await current_step().emit(stream, value)


async def test_a_reader_gets_each_item_in_order_while_the_run_goes_on() -> None:
    seen = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.emit("out", 1)
        await ctx.step(seen.wait)  # so the first item came before the end
        await ctx.emit("out", 2)
        return "done"

    async with Runtime(stores.memory(), [flow]) as runtime:
        run = await runtime.start(flow, id="run")
        got = []
        async with asyncio.timeout(PATIENCE):
            async for item in run.stream("out"):
                got.append(item)
                seen.set()
        assert (got, await run) == ([1, 2], "done")


async def test_readers_begin_where_they_want_and_tell_where_they_are() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        for n in range(1200):  # more than a page
            await ctx.emit("out", n)
        await ctx.emit("other", "x")

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        run = await here.runtime.get("run")
        assert run is not None
        assert await read(here.runtime) == list(range(1200))
        assert await read(here.runtime, start=1198) == [1198, 1199]
        assert await read(here.runtime, start=1200) == []
        assert await read(here.runtime, "other") == ["x"]
        assert await read(here.runtime, "none") == []
        first = run.stream("out")
        assert [await anext(first) for _ in range(700)] == list(range(700))
        assert first.position == 700
        assert [item async for item in run.stream("out", start=first.position)] == list(range(700, 1200))
        for wrong in (-1, 1.5, True):
            with pytest.raises(ValueError, match="start must be"):
                run.stream("out", start=wrong)  # type: ignore[arg-type]


@register
@dataclasses.dataclass
class Token:
    text: str


async def test_values_come_back_as_they_were() -> None:
    values = [None, 1, "text", b"\0\xff", (1, 2), {"a": {1, 2}}, Token("x")]

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        for value in values:
            await ctx.emit("out", value)

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        assert await read(here.runtime) == values
        assert await read(here.runtime, start=6, returns=Token) == [Token("x")]


async def test_a_read_that_times_out_is_not_an_end() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.emit("out", 1)
        await ctx.wait_for_signal("go")
        await ctx.emit("out", 2)

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Suspended)
        run = await here.runtime.get("run")
        assert run is not None
        reader = run.stream("out", timeout=0)
        assert await anext(reader) == 1
        for _ in range(2):
            with pytest.raises(TimeoutError, match="no item 1 of stream 'out' of run 'run'"):
                await anext(reader)
        await run.signal("go")
        await here.runtime.sweep()
        assert await anext(reader) == 2
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
        assert reader.position == 2


async def test_an_end_lets_readers_stop_while_the_run_goes_on() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.emit("out", 1)
        await ctx.end_stream("out")
        assert isinstance(await raised(ctx.emit("out", 2)), StreamEnded)
        assert isinstance(await raised(ctx.end_stream("out")), StreamEnded)
        await ctx.emit("other", "goes on")
        await ctx.wait_for_signal("go")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        run = await here.runtime.get("run")
        assert run is not None
        reader = run.stream("out")
        assert [item async for item in reader] == [1]
        assert await read(here.runtime, start=reader.position) == [], "a reader that comes later finds the end as well"
        reader = run.stream("other", timeout=0)
        assert await anext(reader) == "goes on"
        with pytest.raises(TimeoutError):
            await anext(reader)
        await run.signal("go")
        assert await here.runtime.sweep() == {"run": Ok(None)}
        assert await read(here.runtime) == [1]


async def test_a_full_stream_says_its_number_and_takes_no_more() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        for n in range(3):
            await ctx.emit("out", n, max_items=3)
        with pytest.raises(StreamFull, match="stream 'out' of run 'run' holds 3 items"):
            await ctx.emit("out", 3, max_items=3)
        await ctx.end_stream("out")  # it can be ended all the same
        with pytest.raises(StreamFull):
            await ctx.step(fill)

    async def fill() -> None:
        for n in range(3):
            await current_step().emit("steps", n, max_items=2)

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        assert (await read(here.runtime), await read(here.runtime, "steps")) == ([0, 1, 2], [0, 1])


async def test_what_cannot_be_emitted_is_refused_at_the_call() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        for value, name, options, error in (
            (object(), "out", {}, ValueNotStorable),
            ("x" * (1 << 20), "out", {}, ValueNotStorable),
            (1, "", {}, ValueError),
            (1, 7, {}, TypeError),
            (1, "out", {"max_items": 0}, ValueError),
        ):
            found = await raised(ctx.emit(name, value, **options))  # type: ignore[arg-type]
            assert isinstance(found, error)
        await ctx.emit("out", "fits")

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        assert await read(here.runtime) == ["fits"]


async def test_ten_thousand_tokens_are_not_ten_thousand_commits() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("tokens", emit_all, "out", range(10_000))
        for n in range(10_000, 20_000):
            await ctx.emit("out", n)

    records = Records()
    async with world(flow, store=records) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        assert await read(here.runtime) == list(range(20_000))
    assert sum(records.writes) == 20_000
    assert len(records.writes) <= 30


async def test_an_item_waits_no_longer_than_fifty_milliseconds_for_a_record() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("talks", talks)

    async def talks() -> None:
        loop = asyncio.get_running_loop()
        await current_step().emit("out", "first")
        before = loop.time()
        while not records.writes:  # noqa: ASYNC110 - nothing says when the engine writes
            await asyncio.sleep(0.005)
        waited.append(loop.time() - before)

    waited: list[float] = []
    records = Records()

    async def main() -> None:
        runtime = Runtime(records, [flow], clock=LoopClock(), concurrency=0)
        assert await runtime.run(flow, id="run") == Ok(None)
        await runtime.close()

    await asyncio.to_thread(lambda: simulate(main()))
    assert 0.04 <= waited[0] <= 0.06


async def test_a_fast_producer_waits_for_the_store() -> None:
    emitted: dict[str, int] = {}
    records = Records()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("begin", asyncio.sleep, 0)
        records.open.clear()
        for n in range(5000):
            await ctx.emit("body", n)
            emitted["body"] = n + 1
        records.open.clear()
        await ctx.step("async", in_a_step)
        records.open.clear()
        await ctx.step("thread", in_a_thread)

    async def in_a_step() -> None:
        for n in range(5000):
            await current_step().emit("async", n)
            emitted["async"] = n + 1

    def in_a_thread() -> None:
        for n in range(5000):
            current_step().emit("thread", n)
            emitted["thread"] = n + 1

    async with Runtime(records, [flow]) as runtime:
        run = await runtime.start(flow, id="run")
        for name in ("body", "async", "thread"):
            counts = [-1, 0]
            async with asyncio.timeout(PATIENCE):
                while counts[-1] != counts[-2] or not counts[-1]:  # until it stands still
                    await asyncio.sleep(0.05)
                    counts.append(emitted.get(name, 0))
            assert counts[-1] <= 2 * engine_streams.MOST_ITEMS
            records.open.set()
            reader = run.stream(name)
            async with asyncio.timeout(PATIENCE):
                assert [await anext(reader) for _ in range(5000)] == list(range(5000))
        await run


async def test_items_are_stored_not_later_than_records_that_follow_them() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.emit("out", "before")
        await ctx.step("one", emit_all, "out", ["inside"])
        await ctx.emit("out", "after")

    records = Records()
    async with world(flow, store=records) as here:
        await here.runtime.run(flow, id="run")
    order = [next((word for word in ("before", "inside", "after") if word in line), line) for line in records.order]
    assert order == ["before", "inside", "one", "after"]


class Crew:
    """A workflow whose body, branches and steps emit, with a step that fails first. Small turns make its branches wait often."""

    def __init__(self) -> None:
        self.failures = 1

    async def flow(self, ctx: Context[Any]) -> str:
        await ctx.emit("out", "begin")
        await ctx.step("first", emit_all, "tokens", ["a", "b", "c"])
        async with asyncio.TaskGroup() as group:
            for name in "xyz":
                group.create_task(self.branch(ctx, name))
        await ctx.step("flaky", self.flaky, retry=Retry(3, wait_initial="10ms", wait_jitter=0))
        await ctx.sleep("nap", "1h")
        await ctx.step("more", emit_all, "tokens", [0, 1, 2, 3, 4])
        for n in range(7):
            await ctx.emit("out", f"late {n}")
        await ctx.end_stream("out")
        return "done"

    async def branch(self, ctx: Context[Any], name: str) -> None:
        first = 1 if name == "z" else 4  # so one calls its step while others wait for their turn to emit
        for n in range(first):
            await ctx.emit("out", f"{name}{n}")
        await ctx.step(f"of {name}", emit_all, "tokens", [name])
        for n in range(first, 8):
            await ctx.emit("out", f"{name}{n}")
            await asyncio.sleep(0)

    async def flaky(self) -> None:
        await current_step().emit("tokens", "wrong" if self.failures else "right")
        if self.failures:
            self.failures -= 1
            raise OSError("not yet")


TOKENS: dict[str, list[Any]] = {"first": ["a", "b", "c"], "of x": ["x"], "of y": ["y"], "of z": ["z"], "flaky": ["right"]}
TOKENS["more"] = [0, 1, 2, 3, 4]


@pytest.fixture
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_streams, "MOST_ITEMS", 3)


async def drive(store: Any, definition: Workflow[Any, Any], *, through: bool) -> bool:
    """Drive the run as one process does, until it has ended or the store fails. Whether it has ended."""
    runtime = Runtime(store, [definition], clock=LoopClock(), concurrency=0, lease_ttl=30, unload_grace=0)
    try:
        outcome = await runtime.run(definition, id="run")
        while isinstance(outcome, Suspended) and through:
            await asyncio.sleep(3601)
            outcome = await runtime.resume("run")
    except PersistenceError:
        return False
    finally:
        await runtime.close()
    return outcome == Ok("done")


async def crash(dies_at: int, *, after_commit: bool, rng: random.Random) -> tuple[bool, list[Any], dict[str, list[Any]]]:
    """Run through with a process that dies at this write: whether it did, the body's items, and the steps' that did not fail."""
    crew, store = Crew(), stores.memory()
    definition = Workflow("flow", crew.flow)
    mortal = MortalStore(SlowStore(store, rng), dies_at, after_commit=after_commit)
    is_done = await drive(mortal, definition, through=True)
    if not is_done:
        await asyncio.sleep(3700)  # its lease expires, and the nap is over
        assert await drive(store, definition, through=True)
    runtime = Runtime(store, concurrency=0)
    tokens: dict[str, list[Any]] = defaultdict(list)
    for item in await read(runtime, "tokens", details=True, drop_failed=True):
        tokens[item.key].append(item.value)
    out = await read(runtime)
    await runtime.close()
    return not is_done, out, tokens


@pytest.mark.parametrize("after_commit", [False, True])
@pytest.mark.usefixtures("small_turns")
def test_no_crash_loses_or_repeats_an_item(after_commit: bool) -> None:
    _, expected, _ = simulate(crash(10_000, after_commit=after_commit, rng=random.Random(0)))
    assert sorted(expected) == sorted(
        ["begin", *(f"{name}{n}" for name in "xyz" for n in range(8)), *(f"late {n}" for n in range(7))]
    )
    died = 0
    for dies_at in range(1, 100):
        is_dead, out, tokens = simulate(crash(dies_at, after_commit=after_commit, rng=random.Random(dies_at)))
        assert sorted(out) == sorted(expected), f"died at {dies_at}"
        for name in "xyz":
            assert [item for item in out if item.startswith(name)] == [f"{name}{n}" for n in range(8)]
        assert (out[0], out[-7:]) == ("begin", [f"late {n}" for n in range(7)])
        assert tokens == TOKENS, f"died at {dies_at}"
        died += is_dead
        if not is_dead:
            break
    assert died > 20


async def test_items_of_a_step_tell_its_attempt_and_those_of_failed_ones_can_be_dropped() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.emit("out", "body")
        await ctx.step("flaky", flaky, retry=Retry(3, wait_initial=0, wait_jitter=0))
        with pytest.raises(OSError, match="always"):
            await ctx.step("broken", broken)

    async def flaky() -> None:
        await emit_all("out", [current_step().attempt, "x"])
        if current_step().attempt < 3:
            raise OSError("not yet")

    async def broken() -> None:
        await current_step().emit("out", "in vain")
        raise OSError("always")

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        items: list[StreamItem] = await read(here.runtime, details=True)
        assert [(item.position, item.value, item.key, item.attempt, item.index) for item in items] == [
            (0, "body", None, 0, 0),
            (1, 1, "flaky", 1, 0),
            (2, "x", "flaky", 1, 1),
            (3, 2, "flaky", 2, 0),
            (4, "x", "flaky", 2, 1),
            (5, 3, "flaky", 3, 0),
            (6, "x", "flaky", 3, 1),
            (7, "in vain", "broken", 1, 0),
        ]
        assert await read(here.runtime, drop_failed=True) == ["body", 3, "x"]
        run = await here.runtime.get("run")
        assert run is not None
        reader = run.stream("out", start=3, drop_failed=True)
        assert ([item async for item in reader], reader.position) == ([3, "x"], 8)


async def test_an_attempt_whose_worker_was_lost_is_told_from_the_one_that_followed() -> None:
    hangs = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.step("talk", talk)
        return "done"

    async def talk() -> None:
        await emit_all("out", ["lost"] if not hangs.is_set() else ["kept"])
        if not hangs.is_set():
            hangs.set()
            await asyncio.get_running_loop().create_future()

    store = stores.memory()
    async with world(flow, store=store) as here:
        driving = asyncio.create_task(here.runtime.run(flow, id="run"))
        await hangs.wait()
        run = await here.runtime.get("run")
        assert run is not None
        reader = run.stream("out", details=True)
        first = await anext(reader)
        here.clock.advance("1h")
        claim = await store.acquire("run", 10, now=here.clock.now())  # another worker, which is lost too
        assert claim is not None
        assert isinstance(await raised(driving), LeaseLost)
        late = run.stream("out", drop_failed=True, timeout=0)
        with pytest.raises(TimeoutError):  # known to be lost before anything has followed
            await anext(late)
        here.clock.advance("1h")
        assert await here.runtime.sweep() == {"run": Ok("done")}
        second = await anext(reader)
        assert [(item.value, item.key, item.attempt, item.index) for item in (first, second)] == [
            ("lost", "talk", 1, 0),
            ("kept", "talk", 1, 0),
        ]
        assert first.epoch < second.epoch
        assert await anext(late) == "kept"


async def test_a_retried_run_keeps_its_items_and_emits_what_is_new() -> None:
    broken = [True, True]

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.emit("out", "begin")
        await ctx.step("early", asyncio.sleep, 0)
        await ctx.emit("out", "middle")
        try:
            await ctx.step("charge", charge)
        except OSError:
            await ctx.emit("out", "sorry")
            await ctx.emit("out", "really")
            raise
        await ctx.emit("out", "charged")
        await ctx.end_stream("out")
        return "done"

    async def charge() -> None:
        if broken:
            broken.pop()
            raise OSError("no money")

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        once = ["begin", "middle", "sorry", "really"]
        assert await read(here.runtime) == once
        for _ in range(2):
            await here.runtime.retry("run")
            outcome = (await here.runtime.sweep())["run"]
        assert outcome == Ok("done")
        assert await read(here.runtime) == [*once, "sorry", "really", "charged"]


async def pour(ctx: Context[Any], round_: int) -> str:
    await ctx.emit("out", f"begin {round_}")
    await ctx.step("talk", emit_all, "tokens", [round_, "x"])
    await ctx.emit("out", f"end {round_}")
    if round_ < 3:
        await ctx.continue_as(round_ + 1)
    return "done"


async def test_a_run_that_starts_over_goes_on_with_its_streams() -> None:
    flow = Workflow("flow", pour)
    async with world(flow) as here:
        assert await here.runtime.run(flow, 1, id="run") == Ok("done")
        assert await read(here.runtime) == [f"{word} {n}" for n in (1, 2, 3) for word in ("begin", "end")]


class Rounds:
    """A workflow that starts over, with steps whose attempts emit and fail in every way."""

    async def flow(self, ctx: Context[Any], round_: int) -> str:
        await ctx.emit("out", f"begin {round_}")
        retry = Retry(3, wait_initial=0, wait_jitter=0)
        await ctx.step("flaky", self.fail_at_first, round_, retry=retry)
        await ctx.step("silent", self.emit_at_first, round_, retry=retry)
        with pytest.raises(OSError, match="always"):
            await ctx.step("broken", self.fail_for_good, round_)
        with pytest.raises(TimeoutError):
            await ctx.step("slow", self.hang, round_, timeout="1ms")
        if round_ < 3:
            await ctx.continue_as(round_ + 1)
        return "done"

    async def fail_at_first(self, round_: int) -> None:
        attempt = current_step().attempt
        await emit_all("out", [f"attempt {attempt} of {round_}", "x"])
        if attempt < 3:
            raise OSError("not yet")

    async def emit_at_first(self, round_: int) -> None:
        if current_step().attempt == 1:
            await current_step().emit("out", f"in vain {round_}")
            raise OSError("not yet")

    async def fail_for_good(self, round_: int) -> None:
        await current_step().emit("out", f"broken {round_}")
        raise OSError("always")

    async def hang(self, round_: int) -> None:
        await current_step().emit("out", f"too late {round_}")
        await asyncio.get_running_loop().create_future()


async def test_failed_attempts_are_dropped_in_rounds_that_are_over_too() -> None:
    flow = Workflow("flow", Rounds().flow)
    kept = [[f"begin {n}", f"attempt 3 of {n}", "x"] for n in (1, 2, 3)]
    async with world(flow) as here:
        assert await here.runtime.run(flow, 1, id="run") == Ok("done")
        everything: list[StreamItem] = await read(here.runtime, details=True)
        assert len(everything) == 3 * 10
        assert [item.position for item in everything] == list(range(30))
        assert await read(here.runtime, drop_failed=True) == [item for of_round in kept for item in of_round]
        second = next(item.position for item in everything if item.value == "begin 2")
        assert await read(here.runtime, drop_failed=True, start=second + 3) == [*kept[1][1:], *kept[2]]


@pytest.mark.parametrize("after_commit", [False, True])
def test_no_crash_brings_back_what_a_failed_attempt_emitted(after_commit: bool) -> None:
    flow = Workflow("flow", Rounds().flow)
    kept = [item for n in (1, 2, 3) for item in (f"begin {n}", f"attempt 3 of {n}", "x")]

    async def main(dies_at: int) -> bool:
        store = stores.memory()
        is_done = await go(flow, MortalStore(store, dies_at, after_commit=after_commit))
        if not is_done:
            await asyncio.sleep(100)  # its lease expires
            assert await go(flow, store)
        runtime = Runtime(store, concurrency=0)
        assert await read(runtime, drop_failed=True) == kept, f"died at {dies_at}"
        await runtime.close()
        return is_done

    done = [simulate(main(dies_at)) for dies_at in range(1, 50)]
    assert (done[0], done[-1]) == (False, True)
    assert done.count(False) >= 20


async def go(flow: Workflow[Any, Any], store: Any) -> bool:
    """Drive the run through all its rounds as one process does, until the store fails. Return whether it has ended."""
    runtime = Runtime(store, [flow], clock=LoopClock(), concurrency=0, lease_ttl=30)
    try:
        return await runtime.run(flow, 1, id="run") == Ok("done")
    except PersistenceError:
        return False
    finally:
        await runtime.close()


async def test_items_from_before_the_ends_of_attempts_were_written_are_not_taken_for_failed_ones() -> None:
    flow = Workflow("flow", Rounds().flow)
    async with world(flow) as here:
        assert await here.runtime.run(flow, 1, id="run") == Ok("done")
        written = stored(here).items
        for place, item in list(written.items()):
            written[place] = Item(stream=item.stream, n=item.n, payload=re.sub(rb",\d+\]$", b"]", item.payload))
        everything = await read(here.runtime)
        shown = await read(here.runtime, drop_failed=True)
        assert shown == [*everything[:20], "begin 3", "attempt 3 of 3", "x"], "of the last round the journal says it"


async def test_of_a_page_of_many_rounds_each_attempt_is_judged_by_its_own() -> None:
    """The same key is used in each, more often than a page of the reader has items."""
    rounds = 700

    async def say(n: int) -> None:
        await current_step().emit("out", n)
        if n % 7 == 0 and current_step().attempt == 1:
            raise OSError("not yet")

    @workflow
    async def flow(ctx: Context[Any], n: int) -> None:
        await ctx.step(say, n, retry=Retry(2, wait_initial=0, wait_jitter=0))
        if n < rounds:
            await ctx.continue_as(n + 1)

    async with world(flow) as here:
        assert await here.runtime.run(flow, 0, id="run") == Ok(None)
        assert len(await read(here.runtime)) > rounds + 1
        assert await read(here.runtime, drop_failed=True) == list(range(rounds + 1))
        assert await read(here.runtime, drop_failed=True, start=600) == list(range(525, rounds + 1))


async def test_a_stream_of_perdures_own_is_for_nobody_else() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        assert isinstance(await raised(ctx.emit("perdure:attempts", 1)), ValueError)
        assert isinstance(await raised(ctx.end_stream("perdure:attempts")), ValueError)
        with pytest.raises(ValueError, match="perdure's own"):
            await ctx.step("inside", emit_all, "perdure:attempts", [1])

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        run = await here.runtime.get("run")
        assert run is not None
        with pytest.raises(ValueError, match="perdure's own"):
            run.stream("perdure:attempts")


async def test_of_a_run_that_has_ended_only_what_succeeded_is_left() -> None:
    """A step that was under way when the run was cancelled has not failed, and never will."""
    begun = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("talks", emit_all, "out", ["said"])
        await ctx.step("hangs", hang)

    async def hang() -> None:
        await current_step().emit("out", "half of it")
        begun.set()
        await asyncio.get_running_loop().create_future()

    async with Runtime(stores.memory(), [flow]) as runtime:
        run = await runtime.start(flow, id="run")
        await begun.wait()
        reader = run.stream("out", drop_failed=True)
        assert [await anext(reader), await anext(reader)] == ["said", "half of it"], "a live reader gets what may still succeed"
        await run.cancel()
        assert isinstance(await raised(_value(run)), RunCancelled)
        assert await read(runtime, drop_failed=True) == ["said"]


async def test_a_step_whose_result_the_store_cannot_hold_has_failed_for_readers_too() -> None:
    class Small(Records):
        async def record(self, lease: Lease, entries: Sequence[Any] = (), **options: Any) -> Pulse:
            if any(len(entry.payload) > 10_000 for entry in entries):
                raise ValueNotStorable("value", "it is too long")
            return await super().record(lease, entries, **options)

    async def talk() -> str:
        await current_step().emit("out", "said")
        return "x" * 20_000

    @workflow
    async def flow(ctx: Context[Any], *, is_over: bool = False) -> None:
        if not is_over:
            assert isinstance(await raised(ctx.step(talk)), ValueNotStorable)
            await ctx.continue_as(is_over=True)

    async with world(flow, store=Small()) as here:
        assert await here.runtime.run(flow, id="run") == Ok(None)
        assert await read(here.runtime) == ["said"]
        assert await read(here.runtime, drop_failed=True) == []


@pytest.mark.parametrize("is_silent", [False, True], ids=["emits again", "emits nothing then"])
async def test_what_a_retry_has_undone_is_dropped_when_the_run_has_started_over(is_silent: bool) -> None:
    attempts: list[int] = []

    async def charge() -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1 or not is_silent:
            await current_step().emit("out", f"charged {len(attempts)}")

    async def ship() -> None:
        if len(attempts) == 1:
            raise OSError("no ship")

    @workflow
    async def flow(ctx: Context[Any], *, is_over: bool = False) -> None:
        if not is_over:
            await ctx.step(charge, compensate=lambda _: None)
            await ctx.step(ship)
            await ctx.continue_as(is_over=True)

    async with world(flow) as here:
        assert isinstance(await here.runtime.run(flow, id="run"), Err)
        await here.runtime.retry("run")
        await here.runtime.sweep()
        await here.runtime.sweep()
        assert (await here.runtime.describe("run")).status == "completed"
        assert await read(here.runtime) == ["charged 1"] if is_silent else ["charged 1", "charged 2"]
        assert await read(here.runtime, drop_failed=True) == ([] if is_silent else ["charged 2"])


@pytest.mark.parametrize("after_commit", [False, True])
def test_no_crash_of_a_run_that_starts_over_loses_or_repeats_an_item(after_commit: bool) -> None:
    flow = Workflow("flow", pour)

    async def main(dies_at: int) -> bool:
        store = stores.memory()
        is_done = await go(flow, MortalStore(store, dies_at, after_commit=after_commit))
        if not is_done:
            await asyncio.sleep(100)  # its lease expires
            assert await go(flow, store)
        runtime = Runtime(store, concurrency=0)
        assert await read(runtime) == [f"{word} {n}" for n in (1, 2, 3) for word in ("begin", "end")], f"died at {dies_at}"
        tokens = await read(runtime, "tokens", drop_failed=True)
        await runtime.close()
        assert tokens == [1, "x", 2, "x", 3, "x"], f"died at {dies_at}"
        return is_done

    done = [simulate(main(dies_at)) for dies_at in range(1, 20)]
    assert (done[0], done[-1]) == (False, True)
    assert done.count(False) >= 9


async def test_changed_code_that_emits_much_stops_as_any_other() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        if is_changed:
            for n in range(3 * engine_streams.MOST_ITEMS):
                await ctx.emit("out", n)
            await ctx.step("new", asyncio.sleep, 0)
        else:
            await ctx.step("old", asyncio.sleep, 0)
        await ctx.wait_for_signal("go")

    is_changed = False
    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        is_changed = True
        await here.runtime.signal("run", "go")
        async with asyncio.timeout(PATIENCE):
            (outcome,) = (await here.runtime.sweep()).values()
        assert "RunDiverged" in repr(outcome)
        assert stored(here).items == {}, "nothing that diverged code emits is stored"


async def test_changed_code_that_goes_its_own_way_before_it_stops_stores_no_item() -> None:
    """A task of its own is busy, so the run goes on; but a result is missing, and what is emitted may be of another body."""
    is_changed, moves = False, asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        if is_changed:
            await moves.wait()
            for n in range(engine_streams.MOST_ITEMS):
                await ctx.emit("out", n)
            await ctx.step("new", asyncio.sleep, 0)
        else:
            await ctx.step("old", asyncio.sleep, 0)
        await ctx.wait_for_signal("go")

    async with world(flow) as here, asyncio.timeout(PATIENCE):
        await here.runtime.run(flow, id="run")
        is_changed = True
        await here.runtime.signal("run", "go")
        sweeping = asyncio.ensure_future(here.runtime.sweep())
        await turns(100)
        moves.set()
        (outcome,) = (await sweeping).values()
        assert "RunDiverged" in repr(outcome)
        assert stored(here).items == {}


async def test_a_branch_that_emits_much_and_one_with_a_result_go_on_in_the_same_order_on_a_replay() -> None:
    async def body(ctx: Context[Any]) -> list[str]:
        said: list[str] = []

        async def emit() -> None:
            for n in range(engine_streams.MOST_ITEMS):  # after which it waits until the body rests
                await ctx.emit("out", n)
            said.append("emitted")

        emitting = asyncio.create_task(emit())
        await asyncio.sleep(0)
        await ctx.step("work", asyncio.sleep, 0)
        said.append("worked")
        await emitting
        return said

    assert await twice(body) == (["emitted", "worked"],) * 2


async def test_a_fork_begins_with_empty_streams_and_its_body_emits_again() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.emit("out", "body")
        await ctx.step("one", emit_all, "out", ["step one"])
        await ctx.step("two", emit_all, "out", ["step two"])

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.runtime.fork("run", from_step="two", id="fork")
        await here.runtime.sweep()
        assert await read(here.runtime, run_id="fork") == ["body", "step two"]
        assert await read(here.runtime) == ["body", "step one", "step two"]


@pytest.mark.parametrize("how", ["cancel", "fail", "drain"])
async def test_what_is_queued_when_the_body_ends_is_stored(how: str) -> None:
    begun = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("early", asyncio.sleep, 0)
        await ctx.emit("out", "queued")
        if how == "fail":
            raise OSError("it fails")
        begun.set()
        await asyncio.get_running_loop().create_future()

    store = stores.memory()
    async with Runtime(store, [flow], drain_after=0) as runtime:
        run = await runtime.start(flow, id="run")
        if how == "fail":
            assert isinstance(await raised(_value(run)), OSError)
        else:
            await begun.wait()
        if how == "cancel":
            await run.cancel()
            assert isinstance(await raised(_value(run)), RunCancelled)
    reader = Runtime(store, concurrency=0)
    run = await reader.get("run")  # type: ignore[assignment]
    assert await anext(run.stream("out", timeout=0)) == "queued"
    await reader.close()


async def _value(run: Any) -> Any:
    return await run


async def test_a_store_without_streams_says_so_at_the_call(tmp_path: Any) -> None:
    class Keeper:
        """A user's own store of snapshots."""

        def __init__(self) -> None:
            self.kept: dict[str, Any] = {}

        async def save(self, run_id: str, snapshot: Any) -> None:
            self.kept[run_id] = snapshot

        async def load(self, run_id: str) -> Any:
            return self.kept.get(run_id)

        async def delete(self, run_id: str) -> None:
            self.kept.pop(run_id, None)

        async def list(self, prefix: str = "", limit: int = 100) -> list[Any]:
            return []

        async def close(self) -> None: ...

    @workflow
    async def flow(ctx: Context[Any]) -> list[str]:
        errors = [await raised(ctx.emit("out", 1)), await raised(ctx.end_stream("out"))]
        errors.append(await raised(ctx.step("inside", emit_all, "out", [1])))
        return [type(error).__name__ for error in errors]

    keeper = Keeper()
    assert await flow.run(id="run", store=keeper) == Ok([StoreCapabilityError.__name__] * 3)
    run = await flow.start(id="run", store=keeper)
    with pytest.raises(StoreCapabilityError, match="streams"):
        run.stream("out")


async def test_without_a_store_nothing_is_kept_and_a_run_in_memory_can_be_read() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.emit("out", 1)
        await ctx.step("inside", emit_all, "out", [2])
        assert isinstance(await raised(ctx.emit("out", object())), ValueNotStorable)
        await ctx.end_stream("out")
        return "done"

    assert await flow() == "done"
    run = await flow.start()
    assert [item async for item in run.stream("out")] == [1, 2]


async def test_ctx_emit_belongs_in_the_body_and_emit_of_a_step_in_the_step() -> None:
    kept: list[Any] = []

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        async def inside() -> None:
            await ctx.emit("out", 1)

        async def leaves_its_info() -> None:
            kept.append(current_step())

        with pytest.raises(RuntimeError, match=r"in a step's function: current_step\(\).emit\('out'"):
            await ctx.step(inside)
        await ctx.step(leaves_its_info)
        with pytest.raises(RuntimeError, match="is over"):
            await kept[0].emit("out", 1)
        return "done"

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok("done")
        with pytest.raises((RuntimeError, RunFinished)):
            await kept[0].emit("out", 1)
        assert await read(here.runtime) == []


async def test_a_thread_that_timed_out_emits_nothing_more() -> None:
    errors: list[Exception] = []
    goes_on, is_over = threading.Event(), threading.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        with pytest.raises(TimeoutError):
            await ctx.step("slow", slow, timeout="20ms")
        goes_on.set()
        await asyncio.to_thread(is_over.wait)

    def slow() -> None:
        current_step().emit("out", "in time")
        goes_on.wait()
        try:
            current_step().emit("out", "late")
        except RuntimeError as error:
            errors.append(error)
        is_over.set()

    async with Runtime(stores.memory(), [flow]) as runtime:
        await (await runtime.start(flow, id="run"))
        assert await read(runtime) == ["in time"]
    assert "step 'slow' of run 'run' was cancelled or timed out" in str(errors[0])


async def test_a_reader_of_an_unknown_run_and_of_damaged_items_is_told() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await ctx.emit("out", 1)
        await ctx.wait_for_signal("go")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        run = await here.runtime.get("run")
        assert run is not None
        stored(here).items["out", 0] = Item(stream="out", n=0, payload=b"?")
        with pytest.raises(SnapshotCorrupt, match="item 0 of stream 'out'"):
            await anext(run.stream("out"))
        await run.signal("go")
        (outcome,) = (await here.runtime.sweep()).values()  # its replay cannot know what was emitted
        assert "item 0 of stream 'out'" in str(outcome)
        await here.runtime.delete("run")
        with pytest.raises(RunNotFound):
            await anext(run.stream("out"))


async def test_a_run_that_emitted_leaves_nothing_behind_in_memory() -> None:
    drives: list[weakref.ref[Any]] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        drives.append(weakref.ref(ctx._drive))
        await ctx.emit("out", 1)
        await ctx.step("inside", emit_all, "out", [2])

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        gc.disable()
        try:
            await here.runtime.run(flow, id="again")
            assert drives[-1]() is None
        finally:
            gc.enable()


def test_a_blocking_program_reads_streams_too() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        for n in range(3):
            await ctx.emit("out", n)
        await ctx.wait_for_signal("go")

    with Runtime(stores.memory(), [flow]).sync as runtime:
        run = runtime.start(flow, id="run")
        reader = run.stream("out", timeout="100ms")
        assert [next(reader) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(TimeoutError):
            next(reader)
        assert reader.position == 3
        run.signal("go")
        assert list(reader) == []
        assert [item.position for item in run.stream("out", start=1, details=True)] == [1, 2]
