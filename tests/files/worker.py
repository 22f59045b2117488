"""A worker process for the kill campaign: drives runs whose steps write a line to a ledger each time they run.

    python worker.py DIRECTORY LEDGER GENERATION RUNS

A line is `generation run step`, appended in one write. Each run has three chains of four steps side by side, a retried step and a
short sleep. The process prints `ready` when it works and `done` when all runs have ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from perdure import Context, Retry, Runtime, current_step, workflow
from perdure.stores.files_store import FilesStore

DIRECTORY, LEDGER, GENERATION, RUNS = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(label: str) -> None:
    os.write(ledger, f"{GENERATION} {current_step().run_id} {label}\n".encode())


async def effect(label: str) -> str:
    note(label)
    await asyncio.sleep(0.002)
    return label


def plain_effect(label: str) -> str:
    note(label)
    return label


async def flaky(label: str) -> str:
    note(f"{label}#{current_step().attempt}")
    if current_step().attempt < 3:
        raise OSError("not yet")
    return label


@workflow
async def order(ctx: Context[Any], number: int) -> list[str]:
    async def chain(name: str) -> str:
        value = ""
        for n in range(4):
            fn = plain_effect if n == 3 else effect
            value = await ctx.step("effect", fn, f"{name}{n}", key=f"{name}{n}")
        return value

    ends = await asyncio.gather(*(chain(name) for name in "abc"))
    retry = Retry(attempts=3, wait_initial="5ms", wait_jitter=0)
    ends.append(await ctx.step("flaky", flaky, "flaky", retry=retry))
    await ctx.sleep("pause", "20ms")
    ends.append(await ctx.step("last", effect, f"last{number}"))
    return ends


async def main() -> None:
    async with Runtime(FilesStore(DIRECTORY), [order], lease_ttl="5s", unload_grace="10ms") as runtime:
        print("ready", flush=True)
        runs = [await runtime.start(order, number, id=f"run{number}") for number in range(RUNS)]
        for number, run in enumerate(runs):
            assert await run == ["a3", "b3", "c3", "flaky", f"last{number}"]
    print("done", flush=True)


asyncio.run(main())
