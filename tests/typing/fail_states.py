"""What a checker must refuse about state, caches and events."""

from __future__ import annotations

from perdure import Context, Run, workflow
from perdure.state import ResumeState


@workflow
async def feed(ctx: Context, number: int) -> int:
    await ctx.step(str, number, cache=True)  # error
    return number


async def wrong_state(run: Run[int], state: ResumeState) -> None:
    await feed.run(1, snapshot=5)  # error
    await feed.run(1, cache=5)  # error
    await feed.run(1, on_event="print")  # error
    await run.snapshot(include="some")  # error
    run.subscribe(print, mode="later")  # error
    await run.snapshot("all")  # error
