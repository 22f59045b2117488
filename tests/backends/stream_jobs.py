"""The processes of `test_streams.py`: a writer that kills itself in the middle of a stream, and readers of that stream."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from perdure import Context, Run, Runtime, workflow
from perdure.model.records import Item, Lease
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe

RUN: Final = "talk"
# How many steps a writer takes on its way.
STEPS: Final = 10


def same(n: int) -> int:
    return n


@workflow
async def talk(ctx: Context, total: int) -> int:
    for n in range(total):
        if n % (total // STEPS) == 0:
            await ctx.step(same, n, key=f"at {n}")
        await ctx.emit("items", n)
    await ctx.end_stream("items")
    return await ctx.step("last", same, total)


class MortalWriter:
    """A store that notes each write of items in a file. After so many of them the process is killed."""

    def __init__(self, store: Any, ledger: Path, dies_after: int | None) -> None:
        self._store = store
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._left = dies_after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def record(self, lease: Lease, entries: Sequence[Any] = (), *, items: Sequence[Item] = (), **options: Any) -> Any:
        reply = await self._store.record(lease, entries, items=items, **options)
        if items:
            os.write(self._ledger, b".")
            self._left = None if self._left is None else self._left - 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply


async def writer(parent: ParentPipe, dsn: str, ledger: Path, lease_ttl: float, total: int, dies_after: int | None) -> None:
    """Drive the run to its end, or be killed on the way."""
    async with store_at(dsn) as store:
        await store.setup()
        async with Runtime(MortalWriter(store, ledger, dies_after), [talk], lease_ttl=lease_ttl) as runtime:
            assert await (await runtime.start(talk, total, id=RUN)) == total
    parent.send("done")


async def reader(parent: ParentPipe, dsn: str, total: int, pause: float) -> None:
    """Read the stream to its end, with another reader from time to time, each of which goes on where the last one stopped."""
    async with store_at(dsn) as store:
        await store.setup()
        client = Runtime(store, concurrency=0)
        parent.send("ready")
        run, position = await _find(client), 0
        while position < total:
            items = run.stream("items", start=position, details=True)
            async for item in items:
                assert (item.position, item.value) == (position, position)
                position += 1
                if position % (total // STEPS) == 0:
                    break
            await asyncio.sleep(pause)
        assert [item async for item in run.stream("items", start=position)] == []
        await client.close()
    parent.send(position)


async def _find(client: Runtime) -> Run[Any]:
    while (run := await client.get(RUN)) is None:
        await client.store.watch(0.05)
    return run
