"""Workflows and helpers that several tests of the runtime share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from perdure import Context, Runtime, Workflow, workflow
from perdure.model.records import Claim
from perdure.store import Store
from tests.patience import PATIENCE


@workflow
async def greet(ctx: Context, name: str, mark: str = "!") -> str:
    return await ctx.step("greet", lambda: f"hello {name}{mark}")


@workflow
async def nap(ctx: Context) -> str:
    await ctx.sleep("nap", "1h")
    return "awake"


@workflow
async def ask(ctx: Context) -> Any:
    return await ctx.wait_for_signal("answer")


class Gate:
    """A workflow whose one step waits until the test lets it go on."""

    def __init__(self, name: str = "gated") -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.calls = 0
        self.cancelled = 0

        async def flow(ctx: Context) -> str:
            return await ctx.step("wait", self._wait)

        self.flow: Workflow[[], str] = Workflow(name, flow)

    async def _wait(self) -> str:
        self.calls += 1
        self.reached.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "through"


class Flaky:
    """A workflow whose second step fails as long as the test says so; `calls` names the steps that ran."""

    def __init__(self) -> None:
        self.is_broken = True
        self.calls: list[str] = []

        async def flow(ctx: Context) -> str:
            first = await ctx.step("first", self._call, "first")
            second = await ctx.step("second", self._call, "second")
            return f"{first} {second}"

        self.flow: Workflow[[], str] = Workflow("flaky", flow)

    async def _call(self, label: str) -> str:
        self.calls.append(label)
        if label == "second" and self.is_broken:
            raise ValueError("not today")
        return label


@asynccontextmanager
async def client(store: Store, *workflows: Workflow[Any, Any], **options: Any) -> AsyncIterator[Runtime]:
    """A runtime that does not work in the background."""
    runtime = Runtime(store, workflows, concurrency=0, **options)
    try:
        yield runtime
    finally:
        await runtime.close()


async def taken(store: Store, runtime: Runtime, flow: Workflow[Any, Any], *args: Any, run_id: str, ttl: float = 30) -> Claim:
    """The run, created and then leased by a worker that this process knows nothing of."""
    await runtime.start(flow, *args, id=run_id)
    claim = await store.acquire(run_id, ttl)
    assert claim is not None
    return claim


async def soon(true: Callable[[], Awaitable[bool]]) -> None:
    """Return when it has become true."""
    async with asyncio.timeout(PATIENCE):
        while not await true():  # noqa: ASYNC110 - what is in a store is no event
            await asyncio.sleep(0.001)


async def reaches(store: Store, run_id: str, *statuses: str) -> None:
    """Return when the run stands like this."""

    async def has() -> bool:
        row = await store.get(run_id)
        return row is not None and row.status in statuses

    await soon(has)
