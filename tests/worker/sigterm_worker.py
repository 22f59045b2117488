"""A worker in the foreground: python sigterm_worker.py DATABASE. Its step says that it runs, and ends when told to on stdin.

That of the workflow `stuck` takes ten minutes, and a drain waits half a second for it.
"""

from __future__ import annotations

import asyncio
import sys
import time

from perdure import Context, Runtime, workflow


def listen() -> str:
    print("running", flush=True)
    return sys.stdin.readline().strip()


def never() -> None:
    print("this step must not start", flush=True)


def block() -> str:
    print("running", flush=True)
    time.sleep(600)
    return "late"


@workflow
async def stuck(ctx: Context) -> str:
    return await ctx.step(block)


@workflow
async def listener(ctx: Context) -> str:
    heard = await ctx.step(listen)
    await ctx.step(never)
    return heard


if __name__ == "__main__":
    drain_after = 0.5 if sys.argv[2:] == ["stuck"] else 10
    asyncio.run(Runtime(f"sqlite:///{sys.argv[1]}", [listener, stuck], drain_after=drain_after).work())
    print("stopped", flush=True)
