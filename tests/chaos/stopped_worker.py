"""A worker whose step stops the whole process in the middle, as a laptop lid or a debugger does.

python stopped_worker.py DATABASE
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from perdure import Context, Runtime, workflow


async def first() -> str:
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return "from the stopped worker"


async def second(value: str) -> str:
    print("second step ran", flush=True)
    return value


@workflow
async def flow(ctx: Context[Any]) -> str:
    return await ctx.step(second, await ctx.step(first))


async def main() -> None:
    runtime = Runtime(f"sqlite:///{sys.argv[1]}", [flow], lease_ttl="300ms", concurrency=0)
    try:
        print(await runtime.run(flow, id="run"), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
    await runtime.close()


asyncio.run(main())
