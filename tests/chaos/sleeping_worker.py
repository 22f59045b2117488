"""A worker with many sleeping runs: python sleeping_worker.py DSN WAKES.

It drives runs until WAKES of them have slept. It prints two lines of JSON: its memory at the beginning; its memory at the end,
with how late each run went on, in seconds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from perdure import Context, Runtime, workflow

WARM_UP: Final = 50
LONG: Final = 86_400.0

late: list[float] = []
all_awake = asyncio.Event()


@workflow
async def sleeper(ctx: Context, wake_at: float, wakes: int) -> None:
    """Sleep until `wake_at`, in seconds since 1970. The last of `wakes` runs ends the process."""
    await ctx.sleep_until("nap", datetime.fromtimestamp(wake_at, UTC))
    late.append(time.time() - wake_at)
    if len(late) == wakes:
        all_awake.set()


def resident_bytes() -> int:
    """How much memory this process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def main(dsn: str, wakes: int) -> None:
    """Warm up with runs that fall asleep, then drive what is there."""
    async with Runtime(dsn, [sleeper]) as runtime:
        runs = [await runtime.start(sleeper, time.time() + LONG, 0, id=f"warm-up-{n}") for n in range(WARM_UP)]
        for run in runs:
            while await run.status() != "suspended":  # noqa: ASYNC110 - its state is in the store
                await asyncio.sleep(0.02)
        print(json.dumps({"resident": resident_bytes()}), flush=True)
        await all_awake.wait()
        print(json.dumps({"resident": resident_bytes(), "late": late}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
