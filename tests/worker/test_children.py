"""Children and workers: no place is taken by a parent that waits, and what operators see of a family."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Err, Ok, Runtime, Suspended, WaitingFor, Workflow, open_store, stores, workflow
from perdure.errors import RunCancelled
from perdure.snapshots.snapshot import Snapshot
from perdure.worker.active_runs import active_runs
from tests.engine.own_waits import own_wait
from tests.engine.worlds import World, world
from tests.patience import PATIENCE

drives: Counter[str] = Counter()


@workflow
async def leaf(ctx: Context, n: int) -> int:
    await ctx.sleep("nap", "1ms")
    return n


@workflow
async def told(ctx: Context) -> str:
    answer: str = await ctx.wait_for_signal("go")
    return answer


@workflow
async def middle(ctx: Context, n: int) -> int:
    return sum(await ctx.map(leaf, range(n)))


@workflow
async def top(ctx: Context) -> list[int]:
    drives[ctx.run_id] += 1
    return [await ctx.child(middle, 3, key="first"), *await asyncio.gather(middle(2), ctx.child(leaf, 7))]


@workflow
async def refusing(ctx: Context) -> None:
    raise PermissionError("no")


@workflow
async def parent(ctx: Context) -> list[Any]:
    done = await ctx.child(leaf, 1)
    with contextlib.suppress(PermissionError):
        await ctx.child(refusing)
    return [done, await ctx.child(told)]


@workflow
async def waits(ctx: Context) -> str:
    ctx.start_child(told, key="later")
    answer, _ = await asyncio.gather(ctx.child(told), own_wait(60))  # which keeps the run in memory for a second
    return answer


FLOWS: list[Workflow[Any, Any]] = [leaf, told, middle, top, refusing, parent]


@pytest.mark.parametrize("concurrency", [1, 2, 100])
async def test_a_family_needs_no_more_than_one_place_in_the_worker(concurrency: int) -> None:
    async with Runtime(stores.memory(), FLOWS, concurrency=concurrency, unload_grace="1ms") as runtime:
        async with asyncio.timeout(30):
            assert await (await runtime.start(top)) == [3, 1, 7]


async def test_a_cancelled_family_needs_no_more_than_one_place_in_the_worker() -> None:
    async with Runtime(stores.memory(), FLOWS, concurrency=1, unload_grace="1ms") as runtime, asyncio.timeout(30):
        run = await runtime.start(parent, id="run")
        while (child := await runtime.get("run/told")) is None or await child.status() != "suspended":
            await runtime.store.watch(0.1)
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run
        assert await child.status() == "cancelled"


async def test_a_worker_with_room_drives_a_child_at_once() -> None:
    claimed: list[int] = []

    async def look(ctx: Context) -> int:
        claimed.append(active_runs.count(worker))
        return 1

    looking = Workflow("look", look)

    async def start(ctx: Context) -> int:
        return await ctx.child(looking)

    starting = Workflow("start", start)
    async with Runtime(stores.memory(), [looking, starting], concurrency=5) as runtime:
        assert runtime._worker is not None
        worker = runtime._worker
        assert await (await runtime.start(starting)) == 1
    assert claimed in ([1], [2])


async def test_a_worker_without_room_leaves_a_child_to_others() -> None:
    store, seen = stores.memory(), list[str]()

    async def look() -> None:
        while (row := await store.get("run/leaf")) is None:
            await store.watch(0.1)
        seen.append(row.status)

    async def start(ctx: Context) -> int:
        child = ctx.start_child(leaf, 1)
        await ctx.step(look)  # meanwhile the parent has the only place
        return await child

    flow = Workflow("start", start)
    async with Runtime(store, [leaf, flow], concurrency=1) as runtime, asyncio.timeout(PATIENCE):
        assert await (await runtime.start(flow, id="run")) == 1
    assert seen == ["pending"]


async def test_a_runtime_that_does_not_know_the_childs_workflow_leaves_it_to_others() -> None:
    store = stores.memory()
    async with Runtime(store, [top, parent], unload_grace="1ms") as ours, asyncio.timeout(30):
        run = await ours.start(parent, id="run")
        while await ours.get("run/leaf") is None:
            await store.watch(0.1)
        assert await (await ours.start(parent, id="other")).outcome() == Suspended("other", None, (WaitingFor("child", "leaf"),))
        async with Runtime(store, [leaf, told, refusing]):
            await ours.signal("run/told", "go", "yes") if await ours.get("run/told") else None
            while await ours.get("run/told") is None:
                await store.watch(0.1)
            await ours.signal("run/told", "go", "yes")
            assert await run == [1, "yes"]


async def test_a_parent_stays_a_moment_for_the_children_that_follow() -> None:
    drives.clear()

    async def one_by_one(ctx: Context, n: int) -> int:
        await ctx.sleep("nap", 0.02 * n)
        return n

    each = Workflow("one_by_one", one_by_one)

    async def body(ctx: Context) -> int:
        drives[ctx.run_id] += 1
        return sum(await ctx.map(each, range(30)))

    flow = Workflow("many", body)
    async with Runtime(stores.memory(), [each, flow], unload_grace="500ms") as runtime, asyncio.timeout(30):
        assert await (await runtime.start(flow, id="run")) == sum(range(30))
    assert drives["run"] <= 5


def test_a_process_that_shuts_down_cancels_no_child(tmp_path: Path) -> None:
    """The event loop then cancels every task, also those that wait for children."""
    store = f"sqlite:///{tmp_path}/runs.db"

    async def begin() -> None:
        async with asyncio.timeout(30):
            run = await waits.start(id="run", store=store)
            while not await is_suspended("run/told") or not await is_suspended("run/later"):  # noqa: ASYNC110 - of a store
                await asyncio.sleep(0.01)
            assert await run.status() == "running"

    async def row_of(run_id: str) -> Any:
        opened = open_store(store)
        try:
            return await opened.get(run_id)
        finally:
            await opened.close()

    async def is_suspended(run_id: str) -> bool:
        row = await row_of(run_id)
        return row is not None and row.status == "suspended"

    async def look() -> list[Any]:
        rows = [await row_of(run_id) for run_id in ("run", "run/told", "run/later")]
        return [(row.status in ("pending", "suspended", "running"), row.cancel_requested) for row in rows]

    asyncio.run(begin())
    assert asyncio.run(look()) == [(True, False)] * 3


async def test_an_error_that_is_not_awaited_yet_is_no_complaint_of_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    async def body(ctx: Context) -> str:
        failing = ctx.start_child(refusing)
        await ctx.sleep("nap", "1h")
        with contextlib.suppress(PermissionError):
            await failing
        return "done"

    flow = Workflow("patient", body)
    async with world(*FLOWS, flow) as here:
        await here.runtime.start(flow, id="run")
        for _ in range(4):
            await here.later("1s")
        gc.collect()
        assert "never retrieved" not in caplog.text
        assert (await here.later("1h"))["run"] == Ok("done")


async def test_a_description_shows_the_children() -> None:
    async with world(*FLOWS) as here:
        await here.runtime.start(parent, id="run")
        for _ in range(8):
            await here.later("1s")
        described = await here.runtime.describe("run")
        steps = {step.key: (step.kind, step.status, step.child_id, step.value) for step in described.steps}
        assert steps == {
            "leaf": ("child", "completed", "run/leaf", 1),
            "refusing": ("child", "failed", "run/refusing", None),
            "told": ("child", "waiting", "run/told", None),
        }
        assert [(each.kind, each.name) for each in described.waiting_for] == [("child", "told")]
        child = await here.runtime.describe("run/told")
        assert (child.parent_id, child.parent_key) == ("run", "told")


async def test_a_snapshot_of_a_parent_goes_on_with_children_of_its_own() -> None:
    async with world(*FLOWS) as here:
        await here.runtime.start(parent, id="run")
        for _ in range(8):
            await here.later("1s")
        run = await here.runtime.get("run")
        assert run is not None
        snapshot = await run.snapshot()
        assert {key: step.ok for key, step in snapshot.steps.items()} == {"leaf": True, "refusing": False}
        again = Snapshot.from_dict(snapshot.to_dict())
        run = await parent.start(id="copy", store=here.runtime.store, snapshot=again)
        while await here.runtime.get("copy/told") is None:
            await here.runtime.store.watch(0.1)
        await here.runtime.signal("copy/told", "go", "copied")
        assert await run == [1, "copied"]
        assert await here.runtime.get("copy/leaf") is None


async def test_a_fork_starts_children_of_its_own() -> None:
    async with world(*FLOWS) as here:
        await here.runtime.start(parent, id="run")
        for _ in range(8):
            await here.later("1s")
        await here.runtime.fork("run", from_step="refusing", id="fork")
        for _ in range(4):
            await here.later("1s")
        await here.runtime.signal("fork/told", "go", "forked")
        for _ in range(2):
            await here.later("1s")
        assert await here.runtime.resume("fork") == Ok([1, "forked"])
        assert {info.id for info in await here.runtime.list(prefix="fork/")} == {"fork/refusing", "fork/told"}


async def test_a_check_replays_a_parent_and_starts_nothing() -> None:
    async with world(*FLOWS) as here:
        await here.runtime.start(parent, id="run")
        await here.runtime.start(top, id="top")
        for _ in range(8):
            await here.later("1s")
        before = {info.id for info in await here.runtime.list()}
        report = await here.runtime.check()
        assert [check for check in report.results if check.verdict != "fits"] == []
        assert {info.id for info in await here.runtime.list()} == before


async def die(here: World) -> None:
    """Let two processes die with the run, which may have one attempt, and drive what is due then."""
    await here.runtime.store.signal("run", "x", b"1", now=here.clock.now())
    for _ in range(2):
        assert await here.runtime.store.acquire("run", 1.0, due_only=False, now=here.clock.now()) is not None
        here.clock.advance("2s")
    for _ in range(3):
        await here.later("1s")


async def test_the_children_of_a_dead_run_are_stopped() -> None:
    async with world(*FLOWS, max_attempts=1) as here:
        await here.runtime.start(parent, id="run")
        for _ in range(8):
            await here.later("1s")
        await die(here)
        ends = {info.id: info.status for info in await here.runtime.list()}
        assert (ends["run"], ends["run/told"]) == ("dead", "cancelled")
        outcome = await here.runtime.resume("run")
        assert isinstance(outcome, Err)


async def test_a_detached_child_outlives_the_death_of_its_parent() -> None:
    async def start(ctx: Context) -> str:
        ctx.start_child(told, key="kept", detached=True)
        return await ctx.child(told)

    flow = Workflow("start", start)
    async with world(told, flow, max_attempts=1) as here:
        await here.runtime.start(flow, id="run")
        while await here.runtime.sweep():
            pass
        await die(here)
        assert {info.id: info.status for info in await here.runtime.list()} == {
            "run": "dead", "run/told": "cancelled", "run/kept": "suspended",
        }  # fmt: skip
        await here.runtime.signal("run/kept", "go", "well")
        assert await here.runtime.resume("run/kept") == Ok("well")
