"""One runtime on two event loops: its worker on one, `runtime.sync` on another. Nothing of a loop is touched from the other.

asyncio's debug mode is on, in which a loop refuses a call from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from perdure import Context, Ok, Runtime, Suspended, Workflow, workflow
from perdure.aio.loop_thread import block_on
from perdure.errors import RunCancelled
from tests.backends.opening import store_at
from tests.backends.registry import BACKENDS, SQLITE, Backend, by_default, on

MEMORY = Backend("memory", "test_memory.py::test_contract", lambda: contextlib.nullcontext("memory://"))
# What a worker and its store may take to stop, beyond what `drain_after` says.
STOPPING = 8.0
PATIENCE = 60.0


@workflow
async def count(ctx: Context, n: int) -> int:
    first = await ctx.step("first", lambda: n)
    await ctx.sleep("nap", "5ms")
    return await ctx.step("second", lambda: first + 1)


class Long:
    """A workflow whose step takes for ever, and an event that says that it runs."""

    def __init__(self) -> None:
        self.is_running = threading.Event()

        async def long(ctx: Context) -> None:
            await ctx.step(self._hang)

        self.flow: Workflow[[], None] = Workflow("long", long)

    async def _hang(self) -> None:
        self.is_running.set()
        await asyncio.sleep(3600)


@pytest.fixture
def _asyncio_debug() -> Iterator[None]:
    async def set_debug(is_on: bool) -> None:
        asyncio.get_running_loop().set_debug(is_on)
        asyncio.get_running_loop().slow_callback_duration = 3600.0  # only the refusals are wanted

    block_on(set_debug(True))
    yield
    block_on(set_debug(False))


@on(MEMORY, *by_default(BACKENDS.values(), ["same_everywhere"]))
@pytest.mark.usefixtures("_asyncio_debug")
async def test_a_worker_and_blocking_calls_of_one_runtime_share_runs_and_end_in_time(backend: Backend, dsn: str) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 3600.0
    refused: list[object] = []
    loop.set_exception_handler(lambda _, context: refused.append(context))
    outcomes: list[object] = []
    long = Long()

    def run_on_other_loop(runtime: Runtime) -> None:
        blocking = runtime.sync
        outcomes.extend(blocking.start(count, n).result() for n in range(3))
        outcomes.extend(blocking.run(count, n) for n in range(3))
        # Driven by the worker, on its loop, and cancelled from here.
        started = blocking.start(long.flow, id="cancelled")
        assert long.is_running.wait(PATIENCE)
        started.cancel()
        with pytest.raises(RunCancelled):
            started.result()
        long.is_running.clear()
        outcomes.append(blocking.run(long.flow, id="long"))  # until the runtime drains

    async with store_at(dsn) as store:
        async with Runtime(store, [count, long.flow], drain_after=0.2, lease_ttl="1h") as runtime:
            calls = asyncio.create_task(asyncio.to_thread(run_on_other_loop, runtime))
            mine = [await runtime.start(count, 10 + n) for n in range(3)]
            assert [await run for run in mine] == [11, 12, 13]
            while len(outcomes) < 6 or not long.is_running.is_set() or await runtime.get("long") is None:
                assert not calls.done(), calls.exception()
                await asyncio.sleep(0.01)
            before = time.monotonic()
        assert time.monotonic() - before < STOPPING * backend.pace
        await calls
        assert outcomes[:6] == [1, 2, 3, Ok(1), Ok(2), Ok(3)]
        assert isinstance(outcomes[6], Suspended)
        row = await store.get("long")
        assert row is not None
        assert row.status == "pending"  # given back
    assert refused == []


@on(SQLITE)
async def test_a_runtime_is_entered_once(dsn: str) -> None:
    async with store_at(dsn) as store, Runtime(store, [count]) as runtime:
        with pytest.raises(RuntimeError, match="works already"):
            await asyncio.to_thread(runtime.sync.__enter__)
        assert await asyncio.to_thread(runtime.sync.run, count, 1) == Ok(2)
