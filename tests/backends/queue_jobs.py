"""A worker process that serves queues with limits, and the ledger of what it leased and ran.

A line is `generation what run key at`, with the limit key. `start` and `again` are leases, the first one of a run and later ones,
with the store's time of the lease: its epoch. `begin` and `end` of a step have this machine's monotonic time, which its processes
share. Both are in microseconds.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from perdure import Context, Queue, Runtime, Workflow, current_step
from perdure.model.records import Claims
from tests.backends.ledger import Ledger
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe

FEW: Final = Queue("few", concurrency=3, per_key=1)
SLOW: Final = Queue("slow", rate="20/s")


class LedgerLine(NamedTuple):
    """What one process did to a run."""

    generation: int
    what: str
    run: str
    key: str
    at: int


def read_ledger(path: Path) -> list[LedgerLine]:
    words = [text.split() for text in path.read_text().splitlines()] if path.exists() else []
    return [LedgerLine(int(generation), what, run, key, int(at)) for generation, what, run, key, at in words]


def now() -> int:
    return time.monotonic_ns() // 1000


def job_of(ledger: Ledger) -> Workflow[Any, Any]:
    """Two steps, each of which notes its begin and its end."""

    async def work(key: str) -> None:
        run = current_step().run_id
        ledger.note("begin", run, key, str(now()))
        await asyncio.sleep(0.03)
        ledger.note("end", run, key, str(now()))

    async def job(ctx: Context[Any], key: str) -> None:
        await ctx.step("first", work, key)
        await ctx.step("second", work, key)

    return Workflow("job", job)


async def queue_worker(parent: ParentPipe, dsn: str, path: Path, generation: int, lease_ttl: float) -> None:
    """Work on both queues until the test says that it is enough."""
    ledger = Ledger(path, generation)
    async with store_at(dsn) as store:
        claim = store.claim

        async def note_leases(*args: Any, **options: Any) -> Claims:
            claims = await claim(*args, **options)
            for one in claims.claims:
                # The count restarts at one when the journal grew since the last lease: then the run had started before.
                is_start = one.run.attempts == 1 and not one.journal
                ledger.note("start" if is_start else "again", one.run.id, one.run.limit_key or "-", str(one.run.epoch))
            return claims

        store.claim = note_leases  # type: ignore[method-assign]
        async with Runtime(store, [job_of(ledger)], queues=[FEW, SLOW], lease_ttl=lease_ttl, concurrency=10):
            parent.send("ready")
            await parent.receive()
    parent.send("left")
