"""What tests of the engine share: a runtime in memory under a manual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from perdure import Runtime, Workflow, stores
from perdure.store import Store
from perdure.testing import ManualClock


class World:
    """A client runtime over a memory store, and the clock both go by."""

    def __init__(self, runtime: Runtime, clock: ManualClock) -> None:
        self.runtime = runtime
        self.clock = clock

    async def later(self, duration: str) -> dict[str, Any]:
        """The outcomes of what is due when this much time has passed."""
        self.clock.advance(duration)
        return await self.runtime.sweep()

    async def keys(self, run_id: str) -> list[str]:
        """The keys of what is recorded as done, in order."""
        return [entry.key for entry in await self.runtime.store.journal(run_id) if entry.phase == "close"]


@asynccontextmanager
async def world(*workflows: Workflow[Any, Any], store: Store | None = None, **options: Any) -> AsyncIterator[World]:
    """A world that knows these workflows."""
    clock = ManualClock()
    options.setdefault("unload_grace", 0)
    runtime = Runtime(store or stores.memory(), workflows, clock=clock, concurrency=0, **options)
    try:
        yield World(runtime, clock)
    finally:
        await runtime.close()
