"""A worker in the foreground: python sigterm_worker.py DATABASE. Its step says that it runs, and ends when told to on stdin."""

from __future__ import annotations

import asyncio
import sys

from perdure import Context, Runtime, workflow


def listen() -> str:
    print("running", flush=True)
    return sys.stdin.readline().strip()


def never() -> None:
    print("this step must not start", flush=True)


@workflow
async def listener(ctx: Context) -> str:
    heard = await ctx.step(listen)
    await ctx.step(never)
    return heard


if __name__ == "__main__":
    asyncio.run(Runtime(f"sqlite:///{sys.argv[1]}", [listener]).work())
    print("stopped", flush=True)
