"""The workflows that perdure is measured with."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.program import result
from perdure import Context, workflow


async def work(n: int, size: int) -> str:
    """A step that does next to nothing."""
    return result(n, size)


@workflow
async def steps(ctx: Context[Any], count: int, size: int) -> int:
    """`count` steps, one after the other."""
    for n in range(count):
        await ctx.step("work", work, n, size, key=f"work{n:06}")
    return count


@workflow
async def fans_out(ctx: Context[Any], count: int, size: int) -> int:
    """`count` steps, all at once."""
    await asyncio.gather(*(ctx.step("work", work, n, size, key=f"work{n:06}") for n in range(count)))
    return count


@workflow
async def waits_at_the_end(ctx: Context[Any], count: int, size: int) -> int:
    """As `steps`, and then waits for a signal, for which the run leaves memory: whoever drives it next replays the steps."""
    for n in range(count):
        await ctx.step("work", work, n, size, key=f"work{n:06}")
    await ctx.wait_for_signal("go")
    return count
