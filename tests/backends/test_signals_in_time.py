"""A signal of another process to a run that stays in memory: it is not missed, whichever way the run is driven."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Workflow
from perdure.store import FullStore
from tests.backends.conftest import Start
from tests.backends.jobs import send_signals
from tests.backends.opening import store_at
from tests.backends.processes import Child
from tests.backends.registry import Backend

# How a run is driven, and its id.
WAYS = ("wf.run", "wf.start", "runtime.run", "runtime.start")


class InMemory:
    """A run that waits for a signal, and that another branch, which is busy until the test is over, keeps in memory."""

    def __init__(self, timeout: float) -> None:
        self.is_waiting = asyncio.Event()
        self.release = asyncio.Event()
        self.resumed_at = 0.0

        async def busy() -> None:
            self.is_waiting.set()
            await self.release.wait()

        async def wait(ctx: Context) -> Any:
            try:
                return await ctx.wait_for_signal("go", timeout=timeout, default="nothing")
            finally:
                self.resumed_at = time.monotonic()
                self.release.set()

        async def flow(ctx: Context) -> Any:
            received, _ = await asyncio.gather(wait(ctx), ctx.step(busy))
            return received

        self.flow: Workflow[[], Any] = Workflow("in_memory", flow)

    async def outcome(self, way: str, store: FullStore) -> Any:
        """How the run comes out when it is driven in this way."""
        if way == "wf.run":
            return await self.flow.run(id=way, store=store)
        if way == "wf.start":
            return await (await self.flow.start(id=way, store=store)).outcome()
        async with Runtime(store, [self.flow], concurrency=0 if way == "runtime.run" else 100) as runtime:
            if way == "runtime.run":
                return await runtime.run(self.flow, id=way)
            return await (await runtime.start(self.flow, id=way)).outcome()


@asynccontextmanager
async def driven(dsn: str, start: Start, timeout: float) -> AsyncIterator[tuple[list[InMemory], list[Any], Child]]:
    """A run for each way, on a store of its own; their tasks; and a process that sends its signals when it gets a message."""
    sender = await asyncio.to_thread(start, send_signals, dsn, "go", *WAYS)
    assert await asyncio.to_thread(sender.receive) == "ready"
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(store_at(dsn)) for _ in WAYS]
        runs = [InMemory(timeout) for _ in WAYS]
        driving = [asyncio.create_task(run.outcome(way, store)) for run, way, store in zip(runs, WAYS, stores, strict=True)]
        for run in runs:
            await run.is_waiting.wait()
        yield runs, driving, sender


async def test_it_arrives_soon_however_the_run_is_driven(backend: Backend, shared_dsn: str, start: Start) -> None:
    async with driven(shared_dsn, start, timeout=60) as (runs, driving, sender):
        sender.send("now")
        assert await asyncio.to_thread(sender.receive) == "accepted"
        accepted_at = time.monotonic()
        assert await asyncio.wait_for(asyncio.gather(*driving), 30) == [Ok("sent")] * len(WAYS)
    for run in runs:
        assert run.resumed_at - accepted_at < 3 * backend.pace


@pytest.mark.same_everywhere
async def test_it_wins_over_the_deadline_although_the_store_notified_nothing(
    backend: Backend, shared_dsn: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(self: object, timeout: float) -> asyncio.Future[None]:
        del self, timeout
        return asyncio.get_running_loop().create_future()

    monkeypatch.setattr("perdure.engine.timers_and_signals.POLL_SECONDS", 3600.0)  # no drive begins to watch and reads its inbox
    async with store_at(shared_dsn) as store:
        await store.setup()
        monkeypatch.setattr(type(store), "watch", watch)
    async with driven(shared_dsn, start, timeout=max(2.0, 0.7 * backend.pace)) as (runs, driving, sender):
        sender.send("now")
        assert await asyncio.to_thread(sender.receive) == "accepted"
        assert not any(run.release.is_set() for run in runs), "the machine is too slow for this test"
        assert await asyncio.wait_for(asyncio.gather(*driving), 30) == [Ok("sent")] * len(WAYS)
