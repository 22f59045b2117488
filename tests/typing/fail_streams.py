"""Calls of streams that no checker lets pass. Each line marked `error` is one."""

from __future__ import annotations

from perdure import Context, Run, current_step


async def emits(ctx: Context) -> None:
    await ctx.emit("tokens")  # error
    await ctx.emit(1, "token")  # error
    await ctx.emit("tokens", "token", 10)  # error
    await ctx.emit("tokens", "token", max_items="many")  # error
    await ctx.end_stream()  # error
    current_step().emit("tokens")  # error


async def reads(run: Run[str]) -> None:
    run.stream()  # error
    run.stream("tokens", 5)  # error
    run.stream("tokens", start="5")  # error
    run.stream("tokens", timeout=[])  # error
    for _ in run.stream("tokens"):  # error
        pass
