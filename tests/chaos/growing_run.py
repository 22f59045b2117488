"""A run of N steps on SQLite; prints the bytes written and the processor time used for each step.

python growing_run.py DATABASE STEPS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from perdure import Context, Ok, stores, workflow

DATABASE, STEPS = sys.argv[1], int(sys.argv[2])


async def work(n: int) -> str:
    return f"result number {n:06}"


@workflow
async def growing(ctx: Context[Any], steps: int) -> int:
    for n in range(steps):
        await ctx.step("work", work, n, key=f"work{n:06}")
    return steps


def bytes_written() -> int:
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


async def main() -> None:
    store = stores.sqlite(DATABASE)
    await growing.run(10, id="warm-up", store=store)
    written, used = await asyncio.to_thread(bytes_written), time.process_time()
    assert await growing.run(STEPS, id="run", store=store) == Ok(STEPS)
    used = time.process_time() - used
    written = await asyncio.to_thread(bytes_written) - written
    await store.close()
    print(json.dumps({"bytes": written / STEPS, "seconds": used / STEPS}))


asyncio.run(main())
