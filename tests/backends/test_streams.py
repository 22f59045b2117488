"""A stream whose writer is killed in the middle, with a slow and a late reader in other processes: each item once, in order."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from perdure import Context, Ok, Retry, Runtime, current_step, workflow
from perdure.testing import ManualClock
from tests.backends import stream_jobs
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.registry import POSTGRES, SQLITE, Backend
from tests.campaign import IS_FULL, times

# Items of a stream, in full. A write takes a thousand at most.
MANY: Final = 100_000
FEW: Final = 5_000
# How long the slow reader pauses, ten times on its way.
PAUSE: Final = 0.1


@pytest.mark.same_everywhere
@pytest.mark.timeout(900 if IS_FULL else 300)
def test_readers_see_each_item_once_in_order_whatever_becomes_of_the_writer(
    backend: Backend, dsn: str, start: Start, tmp_path: Path, record_property: Any
) -> None:
    total, ledger = times(MANY if backend in (SQLITE, POSTGRES) else FEW), tmp_path / "writes"
    slow = start(stream_jobs.reader, dsn, total, PAUSE)
    assert slow.receive() == "ready"
    writes = total // 1000 // 3 + 2
    for _ in range(2):
        mortal = start(stream_jobs.writer, dsn, ledger, backend.lease_ttl, total, writes)
        assert mortal.exit_code() == -signal.SIGKILL
    late = start(stream_jobs.reader, dsn, total, 0.0)
    assert late.receive() == "ready"
    last = start(stream_jobs.writer, dsn, ledger, backend.lease_ttl, total, None)
    assert last.receive() == "done"
    assert (slow.receive(), late.receive()) == (total, total)
    commits = ledger.stat().st_size
    figure = f"{total:,} items in {commits} commits: {commits / total:.4f} commits per item"
    print(f"\n{backend}: {figure}")
    record_property("commits_per_item", figure)
    assert commits <= total / 500 + 30


@workflow
async def tells(ctx: Context) -> str:
    for n in range(3):
        await ctx.emit("out", n)
    await ctx.wait_for_signal("go")
    await ctx.emit("out", 3)
    return "done"


async def test_a_reader_with_another_handle_sees_items_soon_and_goes_on_after_a_suspension(
    backend: Backend, shared_dsn: str
) -> None:
    async with store_at(shared_dsn) as store, store_at(shared_dsn) as other, Runtime(store, [tells]) as runtime:
        client = Runtime(other, concurrency=0)
        run = await runtime.start(tells, id="tells")
        found = await client.get(run.id)
        assert found is not None
        reader = found.stream("out")
        async with asyncio.timeout(20 * backend.pace):
            assert [await anext(reader) for _ in range(3)] == [0, 1, 2]
            await client.signal(run.id, "go")
            assert [item async for item in reader] == [3]
        assert await run.outcome() == Ok("done")
        await client.close()


@workflow
async def speak(ctx: Context, round_: int = 1) -> str:
    await ctx.step("words", say, round_, retry=Retry(attempts=2, wait_initial=0, wait_jitter=0))
    if round_ < 2:
        await ctx.continue_as(round_ + 1)
    return "done"


async def say(round_: int) -> None:
    attempt = current_step().attempt
    await current_step().emit("out", f"attempt {attempt} of {round_}")
    if attempt == 1:
        raise OSError("not yet")
    if not lost.is_set():  # in the worker that will be lost
        await current_step().emit("out", "lost")
        await asyncio.get_running_loop().create_future()


# Set when a worker is lost in the middle of the second attempt.
lost: Final = asyncio.Event()


async def test_a_late_reader_gets_what_succeeded_in_each_round_also_after_a_lost_worker(
    backend: Backend, shared_dsn: str
) -> None:
    lost.clear()
    clock = ManualClock()
    async with store_at(shared_dsn) as store, store_at(shared_dsn) as other, asyncio.timeout(60 * backend.pace):
        worker, successor = (Runtime(each, [speak], clock=clock, concurrency=0) for each in (store, other))
        driving = asyncio.create_task(worker.run(speak, id="speaks"))
        run = None
        while run is None:
            run = await successor.get("speaks")
        reader = run.stream("out")
        assert [await anext(reader) for _ in range(3)] == ["attempt 1 of 1", "attempt 2 of 1", "lost"]
        lost.set()
        while await run.status() != "completed":  # one sweep may drive both rounds
            clock.advance("1h")  # again, since the lost worker may have renewed its lease by this clock
            await successor.sweep()
        driving.cancel()
        await asyncio.wait([driving])
        assert [item async for item in reader] == ["attempt 2 of 1", "attempt 1 of 2", "attempt 2 of 2"]
        assert [item async for item in run.stream("out", drop_failed=True)] == ["attempt 2 of 1", "attempt 2 of 2"]
        await worker.close()
        await successor.close()
