"""The snapshot of an event: the run at that moment, nothing that is not recorded, and for a collector all that is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Retry, Suspended, Workflow, events, stores, workflow
from perdure.errors import PersistenceError
from perdure.state import ResumeState, ResumeStateCollector
from perdure.store import FullStore
from perdure.testing.clock import EPOCH
from tests.engine.worlds import world
from tests.events.listening import BEGUN, Flaky, Heard, fails, reports, said, work
from tests.patience import turns
from tests.simulation import HeldBack, MortalStore


@pytest.fixture(autouse=True)
def no_listener_raises(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not reports(caplog)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FullStore]:
    """A fresh store of each kind."""
    opened: FullStore
    if request.param == "memory":
        opened = stores.memory()
    else:
        opened = await asyncio.to_thread(stores.sqlite, tmp_path / "app.db")
    yield opened
    await opened.close()


def keys_when(heard: Heard) -> list[tuple[str, list[str]]]:
    """What was said, and which steps the snapshot had."""
    return [(said(event), list(event.snapshot.steps)) for event in heard.events]


async def test_a_snapshot_that_is_looked_at_later_shows_the_run_as_it_stood(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> str:
        await ctx.step("a", work, 1)
        await ctx.step("b", work, 2)
        await ctx.sleep("nap", "1h")
        return "done"

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.run(flow, id="run")
        suspended = await store.load("run")
        await here.later("1h")
    assert keys_when(heard) == [
        ("lease acquired", []),
        ("run_start", []),
        ("step_start a", []),
        ("persist", ["a"]),
        ("step_success a", ["a"]),
        ("step_complete a", ["a"]),
        ("step_start b", ["a"]),
        ("persist", ["a", "b"]),
        ("step_success b", ["a", "b"]),
        ("step_complete b", ["a", "b"]),
        ("persist", ["a", "b"]),
        ("run_suspended", ["a", "b"]),
        ("lease acquired", ["a", "b"]),
        ("run_start", ["a", "b"]),
        ("step_skipped a", ["a", "b"]),
        ("step_complete a again", ["a", "b"]),
        ("step_skipped b", ["a", "b"]),
        ("step_complete b again", ["a", "b"]),
        ("persist", ["a", "b", "nap"]),
        ("run_complete", ["a", "b", "nap"]),
    ]
    statuses = [event.snapshot.execution.status for event in heard.events]
    assert statuses == ["running"] * 19 + ["completed"]
    # Exactly what the store has, also what is open.
    assert [event.snapshot for event in heard.events if event.is_terminal] == [suspended, await store.load("run")]
    at = {event.at for event in heard.events}
    assert at == {EPOCH, EPOCH + timedelta(hours=1)}


async def test_snapshots_of_branches_grow_by_what_is_recorded_and_never_shrink(store: FullStore) -> None:
    heard = Heard()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        async def branch(name: str) -> None:
            for number in range(3):
                await ctx.step("work", work, key=f"{name}{number}")

        await asyncio.gather(*map(branch, "abcd"))

    async with world(flow, store=store, on_event=heard) as here:
        await here.runtime.run(flow, id="run")
    recorded = [entry.key for entry in await store.journal("run")]
    seen: list[str] = []
    for event in heard.events:
        now = list(event.snapshot.steps)
        assert now[: len(seen)] == seen
        assert now == recorded[: len(now)]
        seen = now
        if isinstance(event, events.StepEndedEvent):
            assert event.key in now
        if isinstance(event, events.PersistedEvent):
            assert len(now) == event.seq
        if isinstance(event, events.StepStartEvent) and event.key[1] != "0":
            assert f"{event.key[0]}{int(event.key[1]) - 1}" in now
    assert len(seen) == 12


async def test_nobody_is_told_of_a_record_before_the_store_has_acknowledged_it() -> None:
    store = stores.memory()
    heard, held = Heard(), HeldBack(store)
    slow: Any = held
    together = asyncio.Barrier(2)

    @workflow
    async def flow(ctx: Context[Any]) -> list[int]:
        return list(await asyncio.gather(ctx.step("a", together.wait), ctx.step("b", together.wait)))

    async with world(flow, store=slow, on_event=heard) as here:
        run = await here.runtime.start(flow, id="run")
        running = asyncio.ensure_future(here.runtime.resume("run"))
        await held.reached.wait()
        await turns(20)
        recorded = len(await store.journal("run"))
        told, steps = heard.take(), (await run.snapshot()).steps
        held.may_answer.set()
        await running
    assert recorded  # it is in the store, but the write is not acknowledged
    assert told == [*BEGUN, "step_start a", "step_start b"]
    assert not steps
    assert heard.said[0] == "persist"
    assert len(heard.events[0].snapshot.steps) == recorded


@pytest.mark.parametrize("verb", ["record", "suspend"])
async def test_a_signal_is_told_and_a_retry_is_told_when_they_are_recorded(verb: str) -> None:
    """A signal consumed, and the next try of a step."""
    store = stores.memory()
    heard, held = Heard(), HeldBack(store)
    slow: Any = held

    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        if verb == "suspend":
            return await ctx.step("a", Flaky(1), retry=Retry(attempts=2, wait_initial="5s", wait_jitter=0))
        return await ctx.wait_for_signal("go")

    async with world(flow, store=slow, on_event=heard) as here:
        await here.runtime.start(flow, id="run")
        await here.runtime.signal("run", "go", 1)
        running = asyncio.ensure_future(here.runtime.resume("run"))
        await held.reached.wait()
        await turns(20)
        told = heard.take()
        held.may_answer.set()
        await running
    assert told == [*BEGUN, *(["step_start a"] if verb == "suspend" else [])]
    ends = ["step_retry a", "run_suspended"] if verb == "suspend" else ["signal go", "run_complete"]
    assert [text for text in heard.said if text != "persist"] == ends


async def test_a_signal_whose_consumption_is_not_acknowledged_is_still_in_the_inbox_of_a_snapshot() -> None:
    """Or a copy of the run that is made in this moment would have lost it."""
    store, elsewhere = stores.memory(), stores.memory()
    held = HeldBack(store)
    slow: Any = held

    @workflow
    async def flow(ctx: Context[Any]) -> list[Any]:
        return [await ctx.wait_for_signal("go", key=f"{number}") for number in range(3)]

    async with world(flow, store=slow) as here:
        run = await here.runtime.start(flow, id="run")
        for number in range(3):
            await run.signal("go", number)
        running = asyncio.ensure_future(here.runtime.resume("run"))
        await held.reached.wait()
        await turns(20)
        snapshot = await run.snapshot()
        held.may_answer.set()
        assert await running == Ok([0, 1, 2])
        assert await run.snapshot() == await store.load("run")
    assert not snapshot.steps
    await elsewhere.save("run", snapshot)
    assert await flow.run(id="run", store=elsewhere) == Ok([0, 1, 2])


async def test_a_snapshot_at_any_event_can_be_gone_on_from() -> None:
    heard = Heard()
    ran: list[str] = []

    async def note(key: str) -> str:
        ran.append(key)
        return key

    @workflow
    async def flow(ctx: Context[Any]) -> list[Any]:
        first = await asyncio.gather(*(ctx.step("note", note, key, key=key) for key in "ab"))
        return [*first, await ctx.step("note", note, "c", key="c"), str(ctx.uuid4())]

    whole = await flow.run(on_event=heard)
    assert isinstance(whole, Ok)
    for event in heard.events:
        ran.clear()
        assert await flow.run(snapshot=event.snapshot.to_dict()) == whole
        assert sorted(ran) == [key for key in "abc" if key not in event.snapshot.steps]


async def test_an_event_costs_the_same_however_many_steps_there_are() -> None:
    """Nothing is copied for an event: its view shares the journal, and holds its length."""
    heard = Heard()

    @workflow(on_event=heard)
    async def flow(ctx: Context[Any]) -> None:
        for number in range(50):
            await ctx.step("work", work, key=f"{number}")

    await flow()
    assert len({id(event.view.journal) for event in heard.events}) == 1
    assert [event.view.length for event in heard.events if isinstance(event, events.StepCompleteEvent)] == list(range(1, 51))


class Watched:
    """A collector of which it is checked, after every event, that it has everything that was recorded by then."""

    def __init__(self, before: ResumeState) -> None:
        self.collector = ResumeStateCollector()
        self._known = dict(before.steps)
        assert self.collector.resume_state() == ResumeState()

    def __call__(self, event: events.Event) -> None:
        self.collector.handle_event(event)
        now = dict(self.collector.resume_state().steps)
        assert {key: now.get(key) for key in self._known} == self._known
        if isinstance(event, events.StepEndedEvent):
            assert event.key in now
        self._known = now

    @property
    def keys(self) -> set[str]:
        return set(self.collector.resume_state().steps)


def branching(until: int) -> Workflow[[], None]:
    """BodyTasks, a failure that is handled, and more steps."""

    async def flow(ctx: Context[Any]) -> None:
        await asyncio.gather(*(ctx.step("work", work, key=f"{number}") for number in range(4)))
        with contextlib.suppress(ValueError):
            await ctx.step("bad", fails)
        for number in range(4, until):
            await ctx.step("work", work, key=f"{number}")

    return Workflow("branching", flow)


async def test_a_collector_has_all_that_is_recorded_after_each_event_of_a_run_and_of_one_that_goes_on_from_its_state() -> None:
    watched = Watched(ResumeState())
    await branching(5).run(on_event=watched)
    assert watched.keys == {"0", "1", "2", "3", "bad", "4"}
    state = watched.collector.resume_state()
    watched = Watched(state)
    await branching(7).run(on_event=watched, resume_state=state)
    assert watched.keys == {"0", "1", "2", "3", "bad", "4", "5", "6"}


@pytest.mark.parametrize("dies_at", range(2, 7))
@pytest.mark.parametrize("is_subscribed", [False, True])
async def test_a_collector_has_all_that_is_recorded_after_each_event_of_a_run_that_crashed(
    store: FullStore, dies_at: int, is_subscribed: bool
) -> None:
    flow = branching(7)
    before, after = Watched(ResumeState()), Watched(ResumeState())
    mortal: Any = MortalStore(store, dies_at, after_commit=False)
    async with world(flow, store=mortal, on_event=before) as here:
        with contextlib.suppress(PersistenceError):
            await here.runtime.run(flow, id="run")
    recorded = {entry.key for entry in await store.journal("run")}
    assert before.keys == recorded
    on_event = None if is_subscribed else after
    async with world(flow, store=store, on_event=on_event) as here:
        here.clock.advance("31s")
        run = await here.runtime.start(flow, id="run")
        if is_subscribed:
            run.subscribe(after)
        first = Heard()
        run.subscribe(first)
        await here.runtime.resume("run")
        assert recorded <= set(first.events[0].snapshot.steps)
        assert after.collector.resume_state() == await run.resume_state()


async def test_a_collector_has_what_was_recorded_together_with_giving_the_run_back() -> None:
    collector, store = ResumeStateCollector(), stores.memory()
    held = HeldBack(store)
    slow: Any = held
    go = asyncio.Event()

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        await asyncio.gather(ctx.step("waits", go.wait), ctx.step("is quick", work))

    async with world(flow, store=slow, on_event=collector.handle_event) as here:
        running = asyncio.ensure_future(here.runtime.run(flow, id="run"))
        await held.reached.wait()  # one record is under way
        closing = asyncio.ensure_future(here.runtime.close())
        await turns(3)
        go.set()  # and now there is another, which goes with the end
        await turns(20)
        held.may_answer.set()
        await closing
        assert isinstance(await running, Suspended)
    assert list(collector.resume_state().steps) == ["is quick", "waits"]
    assert [entry.key for entry in await store.journal("run")] == ["is quick", "waits"]


async def test_a_collector_keeps_the_runs_that_it_hears_apart() -> None:
    collector, both_are_under_way = ResumeStateCollector(), asyncio.Barrier(2)

    @workflow(on_event=collector.handle_event)
    async def flow(ctx: Context[Any], key: str) -> None:
        await ctx.step("work", work, key=key)
        await ctx.step("both", both_are_under_way.wait)

    runs = [await flow.start(key, id=f"run-{key}", store=stores.memory()) for key in "ab"]
    await asyncio.gather(*runs)
    for key in "ab":
        assert list(collector.resume_state(f"run-{key}").steps) == [key, "both"]
    with pytest.raises(ValueError, match=r"events of 2 runs: 'run-a', 'run-b'.*resume_state\(run_id\)"):
        collector.resume_state()
    assert collector.resume_state("run-c") == ResumeState()


async def test_inside_a_run_its_own_state_is_meant() -> None:
    collector, both_are_under_way = ResumeStateCollector(), asyncio.Barrier(2)
    seen: dict[str, list[list[str]]] = {"a": [], "b": []}

    @workflow(on_event=collector.handle_event)
    async def flow(ctx: Context[Any], key: str) -> None:
        def look() -> None:
            seen[key].append(list(collector.resume_state().steps))

        async def look_in_a_task() -> None:
            look()

        await ctx.step("work", work, key=key)
        await ctx.step("both", both_are_under_way.wait)
        look()
        await asyncio.create_task(look_in_a_task())
        await ctx.step("in a thread", look)
        await ctx.step("on the loop", look_in_a_task)

    runs = [await flow.start(key, id=f"run-{key}", store=stores.memory()) for key in "ab"]
    await asyncio.gather(*runs)
    for key in "ab":
        here = [key, "both"]
        assert seen[key] == [here, here, here, [*here, "in a thread"]]


async def test_a_run_that_the_collector_has_not_heard_asks_for_the_one_that_it_has() -> None:
    collector = ResumeStateCollector()

    @workflow
    async def inner(ctx: Context[Any]) -> None:
        await ctx.step("work", work)

    async def drive_inner() -> list[str]:
        await inner.run(on_event=collector.handle_event)
        return list(collector.resume_state().steps)

    @workflow
    async def outer(ctx: Context[Any]) -> list[str]:
        return await ctx.step(drive_inner)

    assert await outer() == ["work"]


async def test_a_collector_of_one_run_needs_no_id() -> None:
    collector = ResumeStateCollector()

    @workflow(on_event=collector.handle_event)
    async def flow(ctx: Context[Any]) -> None:
        await ctx.step("work", work)

    assert collector.resume_state() == ResumeState()
    run = await flow.start(id="run", store=stores.memory())
    await run
    assert collector.resume_state() == collector.resume_state("run") == await run.resume_state()
