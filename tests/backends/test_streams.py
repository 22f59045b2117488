"""A stream whose writer is killed in the middle, with a slow and a late reader in other processes: each item once, in order."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from perdure import Context, Ok, Runtime, workflow
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
