"""A worker process of a test: python fleet_worker.py DSN [inside]. It logs to stderr, every line of its log begins with LOG.

`inside` awaits `work()` inside `async with`. Its steps say on stdout what they do. At its end it says which tasks were left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from perdure import Context, Runtime, workflow


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # whole lines, from any thread


async def linger() -> None:
    say("running")
    try:
        await asyncio.sleep(20)
    finally:
        say("stopped")


@workflow
async def slow(ctx: Context) -> None:
    await ctx.step(linger)


async def note(number: int) -> int:
    await asyncio.sleep(0.001 * (number % 3))
    return number


def note_in_thread(number: int) -> int:
    say("noted")
    return number


@workflow
async def answer(ctx: Context) -> None:
    """Says what it is sent."""
    for number in range(3):
        await ctx.step(say, await ctx.wait_for_signal("word", key=f"word-{number}"), key=f"say-{number}")


@workflow
async def busy(ctx: Context) -> int:
    first = await ctx.step("note", note, 1)
    second = await asyncio.gather(*(ctx.step(note, number, key=f"note-{number}") for number in range(3)))
    await ctx.sleep("rest", 0.01)
    return first + sum(second) + await ctx.step(note_in_thread, 4)


async def work(dsn: str, *, inside: bool) -> None:
    runtime = Runtime(dsn, [slow, busy, answer], concurrency=20, drain_after=5)
    if inside:
        async with runtime:
            await runtime.work()
    else:
        await runtime.work()
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    say(f"left {sorted(task.get_name() for task in left)}")


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("LOG %(levelname)s %(message)s"))
    logging.getLogger("perdure").addHandler(handler)
    logging.getLogger("perdure").setLevel(logging.INFO)
    logging.getLogger("asyncio").addFilter(lambda record: not record.getMessage().startswith("Executing "))  # slowly
    asyncio.run(work(sys.argv[1], inside=sys.argv[2:] == ["inside"]))
