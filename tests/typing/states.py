"""State, caches and events as a checker sees them."""

from __future__ import annotations

from typing import Any, assert_type

from perdure import Context, Snapshot, open_store, workflow
from perdure.errors import FormatProblem
from perdure.events import Event, StepCompleteEvent
from perdure.state import (
    FileCache,
    MemoryCache,
    MemoryKeyValueStore,
    ResumeState,
    ResumeStateCollector,
    StatePersistence,
    StepResult,
    dump_state,
    is_step_complete,
    merge_snapshots,
    parse_state,
    validate_snapshot,
)


def fetch(number: int) -> str:
    return str(number)


@workflow(cache=MemoryCache(max_size=10, ttl="1h"), on_event=print)
async def feed(ctx: Context, number: int) -> str:
    assert_type(await ctx.step(fetch, number, ttl="5m"), str)
    return await ctx.step(fetch, number, key="again", cache=False)


def listener(event: Event) -> None:
    assert_type(event.snapshot, Snapshot)
    if is_step_complete(event):
        assert_type(event, StepCompleteEvent)
        assert_type(event.result, StepResult)
        assert_type(event.key, str)


async def asynchronous(event: Event) -> None: ...


async def runs_take_state_in_every_form(state: ResumeState, snapshot: Snapshot) -> None:
    async def loaded() -> Snapshot | None:
        return snapshot

    collector = ResumeStateCollector()
    await feed.run(1, snapshot=snapshot, cache={}, on_event=collector.handle_event)
    await feed.run(1, resume_state=state, cache=FileCache("cache", ttl="1d"))
    await feed.run(1, snapshot=snapshot.to_dict())
    await feed.run(1, snapshot=None, cache=None)
    await feed.run(1, snapshot=lambda: snapshot)
    await feed.run(1, snapshot=loaded, on_event=asynchronous)
    await feed.run(1, id="a", store=StatePersistence(MemoryKeyValueStore()), cache=MemoryKeyValueStore())


async def runs_give_state() -> None:
    run = await feed.start(1)
    assert_type(await run.snapshot(include="completed", limit=3, since="a", metadata={"note": 1}), Snapshot)
    assert_type(await run.resume_state(), ResumeState)
    stop = run.subscribe(listener, mode="async", coalesce="latest")
    assert_type(stop(), None)
    with run.subscribe(asynchronous):
        assert_type(await run, str)


async def states_are_values(persistence: StatePersistence, snapshot: Snapshot) -> None:
    assert_type(parse_state(dump_state(snapshot, note="x")).metadata, dict[str, Any])
    assert_type(await persistence.load("a"), ResumeState | None)
    assert_type(merge_snapshots(snapshot, snapshot), Snapshot)
    assert_type(validate_snapshot({}).errors, tuple[FormatProblem, ...])
    assert_type(is_step_complete(snapshot, "a"), bool)
    store = open_store("memory:")
    await store.save("a", snapshot)
    assert_type(await store.load("a"), Snapshot | None)
