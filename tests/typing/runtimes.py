"""What `Runtime` and `runtime.sync` infer."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from perdure import (
    BulkReport,
    CheckReport,
    Context,
    Err,
    Ok,
    Outcome,
    Queue,
    RestartingExecutor,
    Run,
    Runtime,
    Suspended,
    stores,
    workflow,
)
from perdure.model.records import RunInfo, Status
from perdure.store import Store
from perdure.sync import SyncRun, SyncRuntime


@workflow
async def greet(ctx: Context, name: str, mark: str = "!", times: int = 1) -> str:
    return ctx.run_id + (name + mark) * times


@workflow
async def review(ctx: Context, number: int) -> Ok[int] | Err[str]:
    return Ok(number) if ctx.run_id else Err("no")


@workflow
async def tick(ctx: Context) -> None:
    assert ctx.run_id


async def made_with() -> None:
    Runtime()
    Runtime("sqlite:///app.db", [greet, review])
    Runtime(store=stores.memory(), workflows=(greet,), deps={"url": ""}, concurrency=0, lease_ttl=timedelta(seconds=30))
    Runtime(
        stores.sqlite("app.db"),
        queues=[Queue("slow", concurrency=3)],
        only_queues={"slow"},
        strict=True,
        on_changed_arguments="error",
    )
    Runtime(unload_grace="5s", max_attempts=3, drain_after=1.5)
    Runtime(executors={"cpu": ProcessPoolExecutor(), "io": RestartingExecutor(ThreadPoolExecutor)})
    async with Runtime(workflows=[greet]) as runtime:
        assert_type(runtime, Runtime)
        assert_type(runtime.store, Store)
        assert_type(runtime.sync, SyncRuntime)
        assert_type(await runtime.work(), None)
        assert_type(runtime.configure(store="sqlite:///b.db", concurrency=4, only_queues=("mail",)), None)


async def started(runtime: Runtime) -> None:
    assert_type(await runtime.start(greet, "Ada", "?", 2, id="g1"), Run[str])
    assert_type(await runtime.start(greet, "Ada"), Run[str])
    assert_type(await runtime.start(greet, "Ada", "?", id="g1"), Run[str])
    assert_type(await (await runtime.start(greet, "Ada")), str)
    assert_type(await runtime.start(review, 1), Run[int])
    assert_type(await runtime.start(tick), Run[None])
    assert_type(await runtime.start(tick, queue="slow", priority=3, metadata={"by": "ada"}), Run[None])
    assert_type(await runtime.start(tick, start_at=datetime(2026, 1, 1, tzinfo=UTC)), Run[None])
    assert_type(await runtime.start("greet", "Ada", id="g1"), Run[Any])
    assert_type(await runtime.start(tick, delay="3s", deadline=timedelta(hours=1)), Run[None])
    assert_type(await runtime.start(tick, deadline=datetime(2026, 1, 1, tzinfo=UTC)), Run[None])


async def started_together(runtime: Runtime) -> None:
    numbers = [(number,) for number in range(3)]
    assert_type(await runtime.start_many(review, numbers), list[Run[int]])
    assert_type(await runtime.start_many(review, numbers, ids=lambda number: f"r{number + 1}"), list[Run[int]])
    assert_type(await runtime.start_many(greet, [("Ada",), ("Eve",)], ids=["g1", "g2"], queue="slow"), list[Run[str]])
    assert_type(
        await runtime.start_many(greet, [("Ada", "?", 2)], ids=lambda name, mark, times: f"{name}{mark}{times}"), list[Run[str]]
    )
    assert_type(await runtime.start_many(tick, [(), ()], delay=1, deadline="1h"), list[Run[None]])
    assert_type(await runtime.start_many("greet", [("Ada",)], ids=["g1"]), list[Run[Any]])
    assert_type(runtime.sync.start_many(review, numbers, ids=lambda number: f"r{number + 1}"), list[SyncRun[int]])


async def signalled_or_started(runtime: Runtime) -> None:
    assert_type(await runtime.signal_with_start(greet, "Ada", id="g1", signal="more"), Run[str])
    assert_type(await runtime.signal_with_start(review, 1, id="r1", signal="more", payload=[1], dedupe="a"), Run[int])
    assert_type(await runtime.signal_with_start("greet", "Ada", id="g1", signal="more", queue="slow"), Run[Any])
    assert_type(runtime.sync.signal_with_start(greet, "Ada", id="g1", signal="more", payload=1), SyncRun[str])


async def run_to_its_end_or_first_wait(runtime: Runtime) -> None:
    assert_type(await runtime.run(greet, "Ada", "?", 2, id="g1"), Outcome[str])
    assert_type(await runtime.run(greet, "Ada"), Outcome[str])
    assert_type(await runtime.run(review, 1), Outcome[int])
    assert_type(await runtime.run(tick), Outcome[None])
    assert_type(await runtime.run("greet", "Ada", id="g1"), Outcome[Any])
    match await runtime.run(greet, "Ada"):
        case Ok(text):
            assert_type(text, str)
        case Err() | Suspended():
            pass


async def the_other_verbs(runtime: Runtime) -> None:
    assert_type(await runtime.resume("g1"), Outcome[Any])
    assert_type(await runtime.signal("g1", "approved", {"by": "ada"}, dedupe="1"), None)
    assert_type(await runtime.get("g1"), Run[Any] | None)
    assert_type(await runtime.list(workflow=greet, status="failed", prefix="g", limit=10), list[RunInfo])
    assert_type(await runtime.list(workflow="greet", cursor=(await runtime.list())[-1]), list[RunInfo])
    assert_type(await runtime.list(status=("failed", "dead"), queue="mail", updated_after="1h"), list[RunInfo])
    assert_type(await runtime.count(status=["failed"], metadata={"customer": "c-7", "vip": True}), int)
    assert_type(await runtime.stuck_runs(updated_before=datetime.now(UTC), limit=3), list[RunInfo])
    assert_type(await runtime.sweep(datetime(2026, 1, 1, tzinfo=UTC), limit=10), dict[str, Outcome[Any]])
    assert_type(await runtime.retry("g1"), Run[Any])
    assert_type(await runtime.purge("30d"), int)
    assert_type(await runtime.purge("30d", status="failed", workflow="checkout"), int)
    assert_type(await runtime.fork("run", from_step="charge"), Run[Any])
    assert_type(await runtime.cancel_many(status=["failed", "dead"], on_progress=print, batch=5), BulkReport)
    assert_type(await runtime.cancel("g1"), None)
    assert_type(await runtime.hold("g1"), None)
    assert_type(await runtime.unhold("g1"), None)
    assert_type(await runtime.delete("g1"), None)


async def of_a_run(run: Run[str]) -> None:
    assert_type(await run.status(), Status)
    assert_type(await run.problem(), str | None)
    assert_type(await run.outcome(), Outcome[str])
    assert_type(await run, str)


def blocking() -> None:
    with Runtime("sqlite:///app.db", [greet]).sync as runtime:
        assert_type(runtime, SyncRuntime)
        run = runtime.start(greet, "Ada", id="g1")
        assert_type(run, SyncRun[str])
        assert_type(run.result(), str)
        assert_type(run.status(), Status)
        assert_type(run.problem(), str | None)
        assert_type(run.outcome(), Outcome[str])
        assert_type(runtime.start(review, 1), SyncRun[int])
        assert_type(runtime.start("greet", "Ada"), SyncRun[Any])
        assert_type(runtime.run(greet, "Ada", "?"), Outcome[str])
        assert_type(runtime.run(review, 1), Outcome[int])
        assert_type(runtime.run("greet", "Ada"), Outcome[Any])
        assert_type(runtime.sweep(), dict[str, Outcome[Any]])
        assert_type(runtime.resume("g1"), Outcome[Any])
        assert_type(runtime.get("g1"), SyncRun[Any] | None)
        assert_type(runtime.list(status="failed"), list[RunInfo])
        assert_type(runtime.count(workflow=greet), int)
        assert_type(runtime.stuck_runs(), list[RunInfo])
        assert_type(runtime.check(workflow=greet), CheckReport)
        assert_type(runtime.retry("g1"), SyncRun[Any])
        assert_type(runtime.purge(timedelta(days=30)), int)
