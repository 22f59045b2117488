"""A parent with many children, and the worker processes that drive them.

A line of the ledger is `generation drive run step`: which process ran the step of which child, or drove the parent.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from perdure import Context, Runtime, Workflow, current_step
from perdure.worker.active_runs import active_runs
from tests.backends.ledger import Ledger
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe


def family_in(ledger: Ledger) -> list[Workflow[Any, Any]]:
    """A parent that gathers what its children give, one whose children wait for ever, and these children."""

    async def note() -> None:
        ledger.note(secrets.token_hex(4), current_step().run_id, "note")

    async def piece(ctx: Context, number: int) -> int:
        await ctx.step(note)
        return number

    async def stuck(ctx: Context, number: int) -> None:
        await ctx.step(note)
        await ctx.wait_for_signal("never")

    pieces, ever = Workflow("piece", piece), Workflow("stuck", stuck)

    async def gather(ctx: Context, count: int) -> int:
        ledger.note("-", ctx.run_id, "parent")  # whenever it is driven
        return sum(await ctx.map(pieces, range(count), queue="pieces"))

    async def hold(ctx: Context, count: int) -> None:
        await ctx.map(ever, range(count), queue="pieces")

    return [Workflow("gather", gather), Workflow("hold", hold), pieces, ever]


async def drive_family(parent: ParentPipe, dsn: str, path: Path, generation: int, queues: list[str], lease_ttl: float) -> None:
    """Drive the runs of these queues until killed or told to stop. Asked, it says how many runs are in its memory."""
    async with store_at(dsn) as store:
        workflows = family_in(Ledger(path, generation))
        async with Runtime(store, workflows, concurrency=50, only_queues=queues, max_attempts=1000, lease_ttl=lease_ttl):
            parent.send("ready")
            while await parent.receive() == "how many":
                parent.send(len(active_runs._by_key))
    parent.send("done")
