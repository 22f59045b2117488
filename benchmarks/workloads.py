"""What is measured. Each function gives operations per second."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.floor import Floor
from perdure import Context, stores, workflow
from perdure.store import Store


async def work(n: int) -> str:
    """A step that does next to nothing."""
    return f"result number {n:06}"


@workflow
async def steps(ctx: Context[Any], count: int) -> int:
    """`count` steps, one after the other."""
    for n in range(count):
        await ctx.step("work", work, n, key=f"work{n:06}")
    return count


@workflow
async def dies_at_the_end(ctx: Context[Any], count: int) -> int:
    """As `steps`, and then raises: its journal is whole, and the run can be replayed."""
    for n in range(count):
        await ctx.step("work", work, n, key=f"work{n:06}")
    raise RuntimeError("at the end")


async def _per_second(count: int, measured: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await measured()
    return count / (time.perf_counter() - started)


async def bare_awaits(count: int = 200_000) -> float:
    """`await coroutine()`."""

    async def loop() -> None:
        for n in range(count):
            await work(n)

    return await _per_second(count, loop)


async def steps_in_memory(count: int = 5_000) -> float:
    """Steps of a workflow that is just called."""
    return await _per_second(count, lambda: steps(count))


async def steps_on_sqlite(runs: int, count: int) -> float:
    """`runs` concurrent runs of `count` steps each."""

    async def measured(store: Store) -> float:
        await steps.run(1, id="warm-up", store=store)

        async def all_runs() -> None:
            await asyncio.gather(*(steps.run(count, id=f"run{n}", store=store) for n in range(runs)))

        return await _per_second(runs * count, all_runs)

    return await _with_sqlite(measured)


async def replays_on_sqlite(count: int) -> float:
    """Replayed steps of a run that had failed at its end."""

    async def measured(store: Store) -> float:
        await dies_at_the_end.run(count, id="run", store=store)
        return await _per_second(count, lambda: dies_at_the_end.run(count, id="run", store=store, retry_failed=True))

    return await _with_sqlite(measured)


async def _with_sqlite(measured: Callable[[Store], Awaitable[float]]) -> float:
    with tempfile.TemporaryDirectory() as directory:
        store = stores.sqlite(Path(directory) / f"{uuid.uuid4()}.db")
        try:
            return await measured(store)
        finally:
            await store.close()


async def floor(runs: int, count: int) -> float:
    """The same rows without perdure: `runs` tasks that write `count` rows each."""
    with tempfile.TemporaryDirectory() as directory:
        bottom = Floor(Path(directory) / "floor.db")

        async def one_run(name: str) -> None:
            for n in range(count):
                await work(n)
                await bottom.write(name, n)

        async def all_runs() -> None:
            await asyncio.gather(*(one_run(f"run{n}") for n in range(runs)))

        await bottom.write("warm-up", 0)
        try:
            return await _per_second(runs * count, all_runs)
        finally:
            bottom.close()


async def imports(statement: str) -> float:
    """How often a fresh interpreter can run an import statement in a second, its own start included."""

    async def five_times() -> None:
        for _ in range(5):
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", statement)
            await process.wait()

    return await _per_second(5, five_times)
