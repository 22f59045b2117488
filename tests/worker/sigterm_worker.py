"""A worker in the foreground: python sigterm_worker.py DATABASE. Its step says that it runs, and ends when told to on stdin.

Those of the workflows `stuck` and `stubborn` take ten minutes and forever. With a word after DATABASE a drain waits half a
second for them; with `inside` it is `async with` that works. The log goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
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


async def hold() -> None:
    print("running", flush=True)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)  # here it stays


@workflow
async def stubborn(ctx: Context) -> None:
    await ctx.step(hold)


@workflow
async def stuck(ctx: Context) -> str:
    return await ctx.step(block)


@workflow
async def listener(ctx: Context) -> str:
    heard = await ctx.step(listen)
    await ctx.step(never)
    return heard


async def work_inside(runtime: Runtime) -> None:
    """Leaves the Runtime when SIGTERM comes."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with runtime:
        await told.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    workflows, how = [listener, stuck, stubborn], sys.argv[2:]
    made = Runtime(f"sqlite:///{sys.argv[1]}", workflows, drain_after=0.5 if how else 10)
    asyncio.run(work_inside(made) if how == ["inside"] else made.work())
    print("stopped", flush=True)
