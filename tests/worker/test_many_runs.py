"""`cancel_many`, `retry_many`, `hold_many`, `unhold_many` and `delete_many`: one verb for the runs that a filter selects."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from perdure import Context, Runtime, stores, workflow
from perdure.backends.memory.database import MemoryDatabase
from perdure.backends.memory.store import MemoryStore
from perdure.errors import PersistenceError
from perdure.model.records import NewRun, RunInfo
from perdure.model.run_filter import EVERY_RUN, RunFilter
from perdure.store import Store
from tests.contract.partial_store import PartialStore
from tests.worker.flows import Flaky, ask, client, greet

VERBS = ("cancel", "retry", "hold", "unhold", "delete")


async def statuses(runtime: Runtime) -> dict[str, str]:
    """How each run stands."""
    return {info.id: info.status for info in await runtime.list()}


async def start(runtime: Runtime, *ids: str, **options: Any) -> None:
    """Runs that wait for an answer."""
    for run_id in ids:
        await runtime.start(ask, id=run_id, **options)


async def test_cancel_many_asks_the_selected_runs_to_stop(store: Store) -> None:
    async with client(store, ask, greet, unload_grace=0) as runtime:
        await start(runtime, "a1", "a2", "b1")
        await runtime.run(greet, "Ada", id="a3")
        report = await runtime.cancel_many(prefix="a")
        assert (report.done, report.refused) == (2, 0)
        await runtime.sweep()
        assert await statuses(runtime) == {"a1": "cancelled", "a2": "cancelled", "a3": "completed", "b1": "suspended"}


async def test_refusals_are_counted_and_reported(store: Store) -> None:
    async with client(store, ask, greet) as runtime:
        await start(runtime, "waiting")
        await runtime.run(greet, "Ada", id="over")
        report = await runtime.cancel_many(status=["completed", "pending"])
        assert (report.done, report.refused) == (1, 1)
        (refusal,) = report.refusals
        assert (refusal.run_id, refusal.error) == ("over", "RunFinished")
        assert "run 'over' has ended (completed)" in refusal.reason


async def test_retry_many_takes_failed_and_dead_runs_and_no_cancelled_ones(store: Store) -> None:
    flaky = Flaky()
    async with client(store, flaky.flow, ask) as runtime:
        for n in range(3):
            await runtime.run(flaky.flow, id=f"f{n}")
        await start(runtime, "c")
        await runtime.cancel("c")
        await runtime.sweep()
        flaky.is_broken = False
        assert (await runtime.retry_many(updated_after="1h")).done == 3
        await runtime.sweep()
        assert await statuses(runtime) == {"f0": "completed", "f1": "completed", "f2": "completed", "c": "cancelled"}
        assert (await runtime.retry_many(status="cancelled")).done == 1


async def test_hold_many_and_unhold_many(store: Store) -> None:
    async with client(store, ask, unload_grace=0) as runtime:
        await start(runtime, "a", "b", queue="slow")
        await start(runtime, "c")
        assert (await runtime.hold_many(queue="slow")).done == 2
        assert set(await runtime.sweep()) == {"c"}
        assert (await runtime.unhold_many(workflow=ask)).done == 3
        assert set(await runtime.sweep()) == {"a", "b"}


async def test_delete_many_leaves_runs_that_have_not_ended_unless_it_is_told(store: Store) -> None:
    async with client(store, ask, greet) as runtime:
        await start(runtime, "waiting", metadata={"by": "ada"})
        await runtime.run(greet, "Ada", id="over", metadata={"by": "ada"})
        assert (await runtime.delete_many(metadata={"by": "ada"})).done == 1
        assert await statuses(runtime) == {"waiting": "pending"}
        assert (await runtime.delete_many(status="pending")).done == 1
        assert await statuses(runtime) == {}


@pytest.mark.parametrize("verb", VERBS)
async def test_every_run_has_to_be_asked_for_in_words(store: Store, verb: str) -> None:
    async with client(store, ask) as runtime:
        await start(runtime, "a")
        many: Callable[..., Awaitable[Any]] = getattr(runtime, f"{verb}_many")
        for empty in ({}, {"prefix": ""}, {"workflow": None, "status": None}):
            with pytest.raises(ValueError, match=f"{verb}_many without a filter .* every run .* pass all=True"):
                await many(**empty)
        with pytest.raises(ValueError, match="leave it out, or the filter"):
            await many(all=True, prefix="a")
        with pytest.raises(TypeError, match="runs cannot be selected by statsu"):
            await many(statsu="failed")
        with pytest.raises(ValueError, match="batch must be a whole number of at least 1"):
            await many(prefix="a", batch=0)
        row = await store.get("a")
        assert row is not None
        assert (row.status, row.held, row.cancel_requested) == ("pending", False, False)
        report = await many(all=True)
        assert report.done == (1 if verb in ("cancel", "hold", "unhold") else 0)


async def test_progress_is_told_after_each_batch(store: Store) -> None:
    told: list[tuple[int, int | None]] = []
    async with client(store, ask) as runtime:
        await start(runtime, *(f"r{n}" for n in range(7)))
        report = await runtime.hold_many(prefix="r", batch=3, on_progress=lambda *progress: told.append(progress))
        assert report.done == 7
        assert told == [(3, 7), (6, 7), (7, 7)]


async def test_a_store_that_cannot_count_has_no_total() -> None:
    told: list[tuple[int, int | None]] = []
    core = cast("Store", PartialStore(MemoryDatabase()))
    async with client(core, ask) as runtime:
        await start(runtime, "a")
        await runtime.cancel_many(prefix="a", on_progress=lambda *progress: told.append(progress))
    assert told == [(1, None)]


class BusyStore(MemoryStore):
    """A store in which other processes work: at each list, runs that were not listed yet move to the front, and new ones come."""

    def __init__(self) -> None:
        super().__init__(MemoryDatabase())
        self.lists = 0
        self.cancelled: list[str] = []

    async def list(
        self, wanted: RunFilter = EVERY_RUN, *, prefix: str = "", before: tuple[int, str] | None = None, limit: int = 100
    ) -> list[RunInfo]:
        page = await super().list(wanted, prefix=prefix, before=before, limit=limit)
        self.lists += 1
        await self.create(_run(f"new{self.lists}"), now=2**52 + self.lists)
        if (claim := await self.acquire(f"r{self.lists % 10}", 0.0, due_only=False)) is not None:
            await self.release(claim.lease)
        return page

    async def cancel(self, run_id: str, *, now: int | None = None) -> None:
        self.cancelled.append(run_id)
        await super().cancel(run_id, now=now)


def _run(run_id: str) -> NewRun:
    return NewRun(id=run_id, workflow="ask", input=b"[[],{}]", input_hash=b"h", seed=b"s")


async def test_runs_that_change_meanwhile_are_found_once_and_the_work_ends() -> None:
    store = BusyStore()
    for n in range(10):
        await store.create(_run(f"r{n}"))
    async with client(store, ask) as runtime, asyncio.timeout(30):
        report = await runtime.cancel_many(workflow="ask", batch=2)
    assert report.done == 10
    assert sorted(store.cancelled) == [f"r{n}" for n in range(10)]


class FailingStore(MemoryStore):
    async def hold(self, run_id: str) -> None:
        raise PersistenceError(f"hold of run {run_id!r}", "the disk is full")


async def test_a_store_that_fails_raises() -> None:
    async with client(FailingStore(MemoryDatabase()), ask) as runtime:
        await start(runtime, "a")
        with pytest.raises(PersistenceError, match="the disk is full"):
            await runtime.hold_many(prefix="a")


async def test_runs_that_end_or_disappear_between_list_and_verb_are_refusals(store: Store) -> None:
    async with client(store, ask) as runtime:
        await start(runtime, "a", "b")

        def delete_last(done: int, _: int | None) -> None:
            if done == 1:
                deleting.append(asyncio.ensure_future(runtime.delete("a")))

        deleting: list[asyncio.Future[None]] = []
        report = await runtime.cancel_many(workflow="ask", batch=1, on_progress=delete_last)
        await asyncio.gather(*deleting)
        assert report.done + report.refused in (1, 2)
        assert all(refusal.error == "RunNotFound" for refusal in report.refusals)


@workflow
async def quick(ctx: Context, n: int) -> int:
    return await ctx.step("n", lambda: n)


async def test_a_worker_may_drive_the_runs_meanwhile(store: Store) -> None:
    async with Runtime(store, [ask, quick]) as runtime:
        await start(runtime, *(f"w{n}" for n in range(30)))
        runs = [await runtime.start(quick, n, id=f"q{n}") for n in range(30)]
        report = await runtime.cancel_many(prefix="w", batch=7)
        assert (report.done, report.refused) == (30, 0)
        assert [await run for run in runs] == list(range(30))
        for n in range(30):
            run = await runtime.get(f"w{n}")
            assert run is not None
            await run.outcome()
        assert await runtime.count(status="cancelled", prefix="w") == 30


def test_runtime_sync_has_them_too() -> None:
    with Runtime(stores.memory(), [ask]).sync as runtime:
        runtime.start(ask, id="a")
        assert runtime.hold_many(prefix="a").done == 1
        assert runtime.unhold_many(prefix="a").done == 1
        assert runtime.cancel_many(prefix="a").done == 1
        assert runtime.retry_many(status="completed").done == 0
        assert runtime.delete_many(status="completed").done == 0


def test_the_example_says_what_it_does() -> None:
    example = Path(__file__).parent.parent.parent / "examples" / "operate_runs.py"
    done = subprocess.run([sys.executable, "-W", "error", example], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [
            "12 failed",
            "retried 5 of 12",
            "retried 10 of 12",
            "retried 12 of 12",
            "12 retried, 0 refused; 12 charged, 12 shipped",
            "receipt 7, parcel 7",
            "12 charged, 13 shipped under keys of their own",
            "13 deleted, 0 left",
        ],
    )


async def test_a_dry_run_counts_and_changes_nothing(store: Store) -> None:
    async with client(store, ask) as runtime:
        await start(runtime, "a", "b")
        for verb, count in (("cancel", 2), ("hold", 2), ("delete", 0)):
            assert (await getattr(runtime, f"{verb}_many")(prefix="", workflow="ask", dry_run=True)).done == count
        row = await store.get("a")
        assert row is not None
        assert (row.held, row.cancel_requested) == (False, False)
