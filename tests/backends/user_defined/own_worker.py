"""A process that works on runs in a user's own SQLite table.

    python own_worker.py DATABASE LEDGER RUNS

Each run has steps that append a line `run step` to the ledger whenever they really run, a short sleep, and a signal that is sent
to it here. Prints `ready` when it works and `done` when all runs have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from perdure import Context, Runtime, current_step, workflow
from perdure.errors import LeaseHeld, RunFinished
from tests.backends.user_defined.own_stores import SqliteOwnStore

DATABASE, LEDGER, RUNS = sys.argv[1], sys.argv[2], int(sys.argv[3])
STEPS = 5
ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


async def effect(number: int) -> int:
    os.write(ledger, f"{current_step().run_id} {number}\n".encode())
    await asyncio.sleep(0.002)
    return number


@workflow
async def order(ctx: Context[Any], runs: int) -> list[Any]:
    done: list[Any] = [await ctx.step(effect, number, key=f"effect:{number}") for number in range(STEPS)]
    await ctx.sleep("pause", "10ms")
    done.append(await ctx.wait_for_signal("go"))
    done.append(await ctx.step(effect, STEPS, key="last"))
    return done


async def send_signal(runtime: Runtime, run_id: str) -> None:
    """Signal the run, repeated while another process holds it."""
    while True:
        try:
            await runtime.signal(run_id, "go", run_id, dedupe="once")
        except LeaseHeld:
            await asyncio.sleep(0.02)
        else:
            return


async def drive_to_end(runtime: Runtime, number: int) -> None:
    run_id = f"run{number}"
    while True:
        try:
            run = await runtime.start(order, RUNS, id=run_id)
            break
        except LeaseHeld:
            await asyncio.sleep(0.02)
    with contextlib.suppress(RunFinished):
        await send_signal(runtime, run_id)
    assert await run == [*range(STEPS), run_id, STEPS]


async def main() -> None:
    store: Any = SqliteOwnStore(Path(DATABASE))
    # Nothing fences such a store: a worker that stands still for longer than its lease would write over the next one's runs.
    async with Runtime(store, [order], lease_ttl="3s", unload_grace="10ms") as runtime:
        print("ready", flush=True)
        await asyncio.gather(*(drive_to_end(runtime, number) for number in range(RUNS)))
    print("done", flush=True)


asyncio.run(main())
