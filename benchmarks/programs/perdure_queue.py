"""perdure as a queue, on SQLite or PostgreSQL: a client starts runs, and `Runtime.work()` in other processes drives them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from benchmarks.program import result
from benchmarks.queues import QueueProgram, stopwatch
from benchmarks.work import RESULT_BYTES
from perdure import Context, Runtime, stores, workflow
from perdure.store import Store

_AT_ONCE: Final = 100


async def format_result() -> str:
    """The step."""
    stopwatch.begin_step()
    return result(1, RESULT_BYTES)


@workflow
async def one_step(ctx: Context[Any]) -> str:
    """A run of one step."""
    done = await ctx.step(format_result)
    stopwatch.end_run()
    return done


class PerdureQueue(QueueProgram):
    """A client, or a worker with the settings that it has by default."""

    _runtime: Runtime
    _store: Store

    async def open(self, place: str) -> None:
        """Make the tables, and a client."""
        self._place = place
        self._open_runtime(concurrency=0)
        await self._store.setup()

    async def close(self) -> None:
        """Close the store."""
        await self._runtime.close()
        await self._store.close()

    async def enqueue(self, runs: int) -> None:
        """Start runs, 100 at a time."""
        for before in range(0, runs, _AT_ONCE):
            await asyncio.gather(*(self._runtime.start(one_step) for _ in range(min(_AT_ONCE, runs - before))))

    async def open_worker(self, place: str) -> None:
        """Connect."""
        self._place = place
        self._open_runtime(concurrency=_AT_ONCE)
        await self._store.setup()

    async def work(self) -> None:
        """In the foreground."""
        await self._runtime.work()

    def _open_runtime(self, concurrency: int) -> None:
        self._store = stores.postgres(self._place) if self._place.startswith("postgresql:") else stores.sqlite(self._place)
        self._runtime = Runtime(self._store, [one_step], concurrency=concurrency)


PROGRAM = PerdureQueue()
