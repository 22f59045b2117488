"""The worker: in the background of `async with`, or in the foreground by `work()`; and how it lets go."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Context, Ok, PerdureWarning, Runtime, Suspended, Workflow, workflow
from perdure.errors import PersistenceError, RunCancelled
from perdure.model.records import Claims
from perdure.store import Store
from perdure.testing import ManualClock
from perdure.worker.worker_registry import is_worker_known
from tests.patience import PATIENCE
from tests.worker.flows import Gate, ask, client, greet, nap, reaches, soon


async def test_a_run_started_inside_is_driven_at_once_and_awaited(store: Store) -> None:
    async with Runtime(store, [greet]) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(greet, "Ada", id="g1")
        assert await run == "hello Ada!"
        assert await run.outcome() == Ok("hello Ada!")


async def test_a_run_started_by_a_client_is_picked_up(store: Store) -> None:
    async with Runtime(store, [greet]), client(store) as other, asyncio.timeout(PATIENCE):
        run = await other.start(greet, "Ada", id="g1")
        assert await run == "hello Ada!"


async def test_awaiting_a_run_that_nobody_drives_is_warned_of_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("perdure.worker.outcomes.WARN_AFTER_SECONDS", 0.0)
    async with client(store, greet) as runtime, asyncio.timeout(PATIENCE):
        for number in range(2):
            run = await runtime.start(greet, "Ada", id=f"g{number}")
            waiting = asyncio.ensure_future(run.outcome())
            if not number:
                with pytest.warns(
                    PerdureWarning,
                    match=r"run 'g0' is awaited and nothing drives it: .* `async with runtime:`, or .*`perdure worker`",
                ):
                    await soon(lambda: asyncio.sleep(0, "there is no worker" in caplog.text))
            await runtime.sweep()
            assert await waiting == Ok("hello Ada!")
    assert caplog.text.count("there is no worker") == 1


async def test_awaiting_a_run_that_a_worker_has_or_may_take_is_not_warned_of(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = asyncio.Event()

    async def look(host: Any) -> bool:
        looked.set()
        return await is_worker_known(host)

    monkeypatch.setattr("perdure.worker.outcomes.WARN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("perdure.worker.outcomes.is_worker_known", look)
    gate = Gate()
    async with (
        asyncio.timeout(PATIENCE),
        Runtime(store, [gate.flow], only_queues=["other"]) as runtime,
        client(store, gate.flow) as other,
    ):
        await runtime.workers()  # it shows itself
        run = await other.start(gate.flow, id="late")
        waiting = asyncio.ensure_future(run.outcome())
        await looked.wait()
        async with Runtime(store, [gate.flow]):
            await gate.reached.wait()
            gate.opened.set()
            assert await waiting == Ok("through")
    assert "there is no worker" not in caplog.text


async def test_runs_that_were_there_before_the_worker_are_picked_up(store: Store) -> None:
    async with client(store) as other:
        runs = [await other.start(greet, "Ada", id=f"g{number}") for number in range(10)]
    async with Runtime(store, [greet], concurrency=2), asyncio.timeout(PATIENCE):
        assert [await run for run in runs] == ["hello Ada!"] * 10


async def test_as_many_runs_as_concurrency_are_driven_at_once_and_no_more(store: Store) -> None:
    now, most, are_three = 0, 0, asyncio.Event()

    async def work() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            are_three.set()
        await are_three.wait()
        await asyncio.sleep(0.001)
        now -= 1

    @workflow
    async def busy(ctx: Context) -> None:
        await ctx.step(work)

    async with client(store) as other:
        runs = [await other.start(busy) for _ in range(9)]
    async with Runtime(store, [busy], concurrency=3), asyncio.timeout(PATIENCE):
        for run in runs:
            await run
    assert most == 3


@pytest.mark.usefixtures("_no_polling")
async def test_a_sleeping_run_is_woken_in_time(store: Store) -> None:
    @workflow
    async def short(ctx: Context) -> str:
        await ctx.sleep("nap", "50ms")
        return "awake"

    async with Runtime(store, [short], unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        before = time.monotonic()
        run = await runtime.start(short, id="s1")
        assert isinstance(await run.outcome(), Suspended)
        assert await run == "awake"
        assert time.monotonic() - before >= 0.05


@pytest.mark.usefixtures("_no_polling")
async def test_a_run_with_start_at_is_started_then(store: Store) -> None:
    at = datetime.now(UTC) + timedelta(milliseconds=30)
    async with Runtime(store, [greet]) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(greet, "Ada", id="g1", start_at=at)
        assert await run == "hello Ada!"
        assert datetime.now(UTC) >= at


async def test_the_worker_goes_by_the_runtimes_clock(store: Store) -> None:
    clock = ManualClock()
    async with Runtime(store, [nap], clock=clock, unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(nap, id="n1")
        assert isinstance(await run.outcome(), Suspended)
        clock.advance("1h")
        assert await run == "awake"


async def test_a_signal_moves_a_suspended_run(store: Store) -> None:
    async with Runtime(store, [ask], unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(ask, id="a1")
        assert isinstance(await run.outcome(), Suspended)
        await runtime.signal("a1", "answer", 42)
        assert await run == 42


async def test_a_signal_from_another_handle_moves_a_suspended_run(store: Store) -> None:
    other = store.sibling()
    async with Runtime(store, [ask], unload_grace=0) as runtime, client(other) as sender, asyncio.timeout(PATIENCE):
        run = await runtime.start(ask, id="a1")
        assert isinstance(await run.outcome(), Suspended)
        await sender.signal("a1", "answer", 42)
        assert await run == 42
    if other is not store:
        await other.close()


async def test_a_retried_run_is_picked_up(store: Store) -> None:
    is_broken = True

    @workflow
    async def flaky(ctx: Context) -> str:
        if is_broken:
            raise ValueError("not today")
        return "fine"

    async with Runtime(store, [flaky]) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(flaky, id="f1")
        with pytest.raises(ValueError, match="not today"):
            await run
        is_broken = False
        assert await (await runtime.retry("f1")) == "fine"


async def test_a_cancelled_run_raises_for_whoever_awaits_it(store: Store) -> None:
    async with Runtime(store, [ask], unload_grace=0) as runtime, asyncio.timeout(PATIENCE):
        run = await runtime.start(ask, id="a1")
        await run.outcome()
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run


async def test_workflows_that_are_not_registered_are_left_alone(store: Store) -> None:
    async with client(store) as other:
        await other.start(nap, id="n1")
        await other.start(greet, "Ada", id="g1")
    async with Runtime(store, [greet]), asyncio.timeout(PATIENCE):
        await reaches(store, "g1", "completed")
    row = await store.get("n1")
    assert row is not None
    assert (row.status, row.attempts) == ("pending", 0)


async def test_only_the_queues_of_the_runtime_are_served(store: Store) -> None:
    async with Runtime(store, [greet], only_queues=["fast"]) as runtime, asyncio.timeout(PATIENCE):
        slow = await runtime.start(greet, "Ada", id="g1", queue="slow")
        fast = await runtime.start(greet, "Ada", id="g2", queue="fast")
        assert await fast == "hello Ada!"
        assert await slow.status() == "pending"


async def test_higher_priority_goes_first(store: Store) -> None:
    order: list[str] = []

    @workflow
    async def note(ctx: Context, label: str) -> None:
        await ctx.step("note", lambda: order.append(label))

    async with client(store) as other:
        for label, priority in (("low", -1), ("plain", 0), ("high", 7)):
            await other.start(note, label, id=label, priority=priority)
    async with Runtime(store, [note], concurrency=1), asyncio.timeout(PATIENCE):
        for label in ("low", "plain", "high"):
            await reaches(store, label, "completed")
    assert order == ["high", "plain", "low"]


async def test_leaving_lets_the_running_step_end_and_records_it(store: Store) -> None:
    gate = Gate()
    calls: list[str] = []

    async def after() -> str:
        calls.append("after")
        return "after"

    @workflow
    async def two(ctx: Context) -> str:
        return await ctx.step("gate", gate._wait) + await ctx.step(after)

    async with Runtime(store, [two]) as runtime:
        await runtime.start(two, id="t1")
        await gate.reached.wait()
        asyncio.get_running_loop().call_later(0.01, gate.opened.set)
    assert (gate.calls, gate.cancelled, calls) == (1, 0, [])
    assert [entry.key for entry in await store.journal("t1")] == ["gate"]
    async with client(store, two) as other:  # at once: nobody waits for a lease to expire
        assert await other.resume("t1") == Ok("throughafter")
    assert (gate.calls, calls) == (1, ["after"])


async def test_a_step_longer_than_drain_after_is_cancelled_and_its_run_resumable(store: Store) -> None:
    gate = Gate()
    async with Runtime(store, [gate.flow], drain_after="10ms") as runtime:
        await runtime.start(gate.flow, id="r1")
        await gate.reached.wait()
    assert (gate.calls, gate.cancelled) == (1, 1)
    gate.opened.set()
    async with client(store, gate.flow) as other:
        assert await other.resume("r1") == Ok("through")
    assert gate.calls == 2


async def test_leaving_leaves_a_suspended_run_as_it_is(store: Store) -> None:
    async with Runtime(store, [ask]) as runtime:
        await runtime.start(ask, id="a1")
        await reaches(store, "a1", "suspended")
    async with client(store, ask) as other:
        await other.signal("a1", "answer", 1)
        assert await other.resume("a1") == Ok(1)


async def test_leaving_gives_back_a_run_that_was_not_started_by_the_worker(store: Store) -> None:
    gate = Gate()
    async with Runtime(store, [gate.flow], drain_after="10ms") as runtime:
        running = asyncio.ensure_future(runtime.run(gate.flow, id="r1"))
        await gate.reached.wait()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait([running])
    gate.opened.set()
    async with client(store, gate.flow) as other:
        assert await other.resume("r1") == Ok("through")


async def test_the_store_failing_for_a_while_does_not_stop_the_worker(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    claim, failures = store.claim, 2

    async def flaky(*args: Any, **kwargs: Any) -> Claims:
        nonlocal failures
        if failures and args[0]:  # not one that only asks for the store's time
            failures -= 1
            raise PersistenceError("the disk", "is full")
        return await claim(*args, **kwargs)

    store.claim = flaky  # type: ignore[method-assign]
    async with client(store) as other:
        run = await other.start(greet, "Ada", id="g1")
    with caplog.at_level(logging.INFO, "perdure"):
        async with Runtime(store, [greet]), asyncio.timeout(PATIENCE):
            assert await run == "hello Ada!"
    said = [record for record in caplog.records if record.message.startswith("the store")]
    levels = [(record.levelname, re.sub(r"\d\.\d s", "…", record.message)) for record in said]
    assert levels == [
        ("ERROR", "the store did not answer, trying again in …: the disk: is full"),
        ("WARNING", "the store did not answer, trying again in …: the disk: is full"),
        ("INFO", "the store answers again, after …"),
    ]


async def test_a_worker_goes_on_whatever_its_store_raises(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    claim, raised = store.claim, 0

    async def broken_at_first(*args: Any, **options: Any) -> Claims:
        nonlocal raised
        raised += 1
        if raised < 3:
            raise ZeroDivisionError
        return await claim(*args, **options)

    async with client(store) as other:
        run = await other.start(greet, "Ada", id="g1")
    store.claim = broken_at_first  # type: ignore[method-assign]
    async with Runtime(store, [greet]), asyncio.timeout(PATIENCE):
        assert await run == "hello Ada!"
    assert "the store did not answer" in caplog.text


async def test_an_error_that_ends_the_worker_is_logged_at_once(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("a mistake in perdure")

    async with client(store) as other:
        await other.start(greet, "Ada", id="g1")
    monkeypatch.setattr("perdure.worker.host.Host.drive", fail)
    runtime = Runtime(store, [greet])
    await runtime.__aenter__()
    async with asyncio.timeout(PATIENCE):
        while "the worker has ended" not in caplog.text:  # noqa: ASYNC110 - a line in a log is no event
            await asyncio.sleep(0.005)
        with pytest.raises(KeyError):
            await runtime.__aexit__(None, None, None)


async def test_work_is_the_worker_in_the_foreground_and_drains_when_cancelled(store: Store) -> None:
    gate = Gate()
    runtime = Runtime(store, [greet, gate.flow])
    working = asyncio.ensure_future(runtime.work())
    async with asyncio.timeout(PATIENCE):
        assert await (await runtime.start(greet, "Ada")) == "hello Ada!"
        run = await runtime.start(gate.flow, id="r1")
        await gate.reached.wait()
        working.cancel()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert gate.cancelled == 0
        assert [entry.key for entry in await store.journal(run.id)] == ["wait"]
    await runtime.close()


async def test_work_inside_async_with_is_the_same_worker(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    async with client(store) as other:
        runs = [await other.start(gate.flow) for _ in range(6)]
    async with asyncio.timeout(PATIENCE), Runtime(store, [gate.flow], concurrency=2) as runtime:
        working = asyncio.ensure_future(runtime.work())
        await gate.reached.wait()
        await asyncio.sleep(0.05)  # a second worker would claim two more
        assert [await run.status() for run in runs].count("running") == 2
        working.cancel()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert gate.cancelled == 0
        assert {await run.status() for run in runs} <= {"pending", "completed"}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_two_calls_of_work_are_one_worker_and_a_later_one_is_another(store: Store) -> None:
    runtime = Runtime(store, [greet])
    first, second = asyncio.ensure_future(runtime.work()), asyncio.ensure_future(runtime.work())
    async with asyncio.timeout(PATIENCE):
        assert await (await runtime.start(greet, "Ada")) == "hello Ada!"
        workers = [task for task in asyncio.all_tasks() if task.get_name() == "perdure-worker"]
        assert len(workers) == 1
        with pytest.raises(RuntimeError, match="works already"):
            await runtime.__aenter__()
        first.cancel()
        await asyncio.wait([first, second])
        assert first.cancelled()
        assert second.result() is None
        third = asyncio.ensure_future(runtime.work())
        assert await (await runtime.start(greet, "Bob")) == "hello Bob!"
        third.cancel()
        await asyncio.wait([third])
    await runtime.close()
    with pytest.raises(RuntimeError, match="was closed"):
        await runtime.work()


async def test_work_on_another_event_loop_than_the_worker_is_refused(store: Store) -> None:
    runtime = Runtime(store, [greet])
    await asyncio.to_thread(runtime.sync.__enter__)
    try:
        with pytest.raises(RuntimeError, match="another event loop"):
            await runtime.work()
    finally:
        await asyncio.to_thread(runtime.sync.__exit__, None, None, None)


async def test_a_client_has_nothing_to_work_with(store: Store) -> None:
    async with client(store, greet) as runtime:
        with pytest.raises(ValueError, match="concurrency=0 is a client"):
            await runtime.work()


@pytest.mark.parametrize("concurrency", [-1, 1.5, "many", None, True])
async def test_concurrency_is_a_whole_number(store: Store, concurrency: Any) -> None:
    with pytest.raises(ValueError, match="concurrency must be a whole number"):
        Runtime(store, concurrency=concurrency)


async def test_a_run_that_is_set_aside_is_one_line_in_the_log_and_a_cancelled_one_is_no_failure(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of a dead run was raised nowhere, so a traceback would only say it twice."""

    async def leave(ctx: Context) -> None:
        await ctx.step("leave", sys.exit)

    leaving = Workflow("leaving", leave)
    caplog.set_level(logging.INFO, "perdure")
    async with Runtime(store, [nap, leaving], max_attempts=1) as runtime, asyncio.timeout(PATIENCE):
        await runtime.start(nap, id="cancelled")
        await runtime.cancel("cancelled")
        await runtime.start(leaving, id="dead")
        await reaches(store, "cancelled", "cancelled")
        await reaches(store, "dead", "dead")
    ended = [record for record in caplog.records if " failed: " in record.getMessage() or " is cancelled" in record.getMessage()]
    of_runs = {str(record.args[0]): record for record in ended if isinstance(record.args, tuple)}
    assert {run_id: record.levelname for run_id, record in of_runs.items()} == {"cancelled": "INFO", "dead": "WARNING"}
    assert [record.exc_info for record in ended] == [None, None]
