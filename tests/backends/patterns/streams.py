"""A run whose body, branches and steps emit items, read in another process while the worker is killed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from perdure import Context, Retry, Run, Runtime, current_step, workflow
from perdure.engine.streams import MOST_ITEMS
from tests.backends.patterns import EffectLedger, effect, wait_for_run

RUN: Final = "streams"
# More than wait in memory, so that the body takes turns with its branches.
MANY: Final = MOST_ITEMS + 50
# What the reader in the other process has got.
seen: Final[list[Any]] = []


async def say(words: Sequence[str]) -> int:
    effect()
    for word in words:
        await current_step().emit("tokens", word)
    return len(words)


def say_in_thread() -> None:
    effect()
    for word in ("p", "q"):
        current_step().emit("tokens", word)


async def flaky() -> None:
    attempt = current_step().attempt
    effect(f"flaky {attempt}")
    await current_step().emit("tokens", f"attempt {attempt}")
    if attempt < 2:
        raise OSError("not yet")


async def branch(ctx: Context, name: str) -> None:
    for n in range(MANY if name == "x" else 3):
        await ctx.emit("out", f"{name}{n}")
    await ctx.step(f"of {name}", say, [name])
    await ctx.emit("out", f"{name} is done")


@workflow
async def streams(ctx: Context) -> str:
    await ctx.emit("out", "begin")
    await ctx.step("first", say, ["a", "b", "c"])
    async with asyncio.TaskGroup() as group:
        for name in "xyz":
            group.create_task(branch(ctx, name))
    await ctx.step(flaky, retry=Retry(attempts=2, wait_initial="1ms", wait_jitter=0))
    await ctx.sleep("nap", "30ms")
    await ctx.emit("out", "awake")
    await ctx.step(say_in_thread)
    await ctx.emit("out", "end")
    await ctx.end_stream("out")
    await ctx.step("last", say, ["z"], key="last")
    return "done"


WORKFLOWS: Final = [streams]


async def start(runtime: Runtime, ledger: EffectLedger) -> list[Run[Any]]:
    return [await runtime.start(streams, id=RUN)]


async def meanwhile(runtime: Runtime) -> None:
    seen.clear()
    run = await wait_for_run(runtime, RUN)
    seen.extend([item async for item in run.stream("out")])


async def check(runtime: Runtime, ledger: EffectLedger) -> None:
    run = await wait_for_run(runtime, RUN)
    assert await run == "done"
    out = [item async for item in run.stream("out")]
    assert out == seen
    assert (out[0], out[-2:]) == ("begin", ["awake", "end"])
    for name, count in (("x", MANY), ("y", 3), ("z", 3)):
        assert [item for item in out if item.startswith(name)] == [*(f"{name}{n}" for n in range(count)), f"{name} is done"]
    assert len(out) == MANY + 3 + 3 + 3 + 3
    tokens: dict[str | None, list[Any]] = defaultdict(list)
    async for item in run.stream("tokens", details=True, drop_failed=True):
        tokens[item.key].append(item.value)
    said = {f"of {name}": [name] for name in "xyz"} | {"first": ["a", "b", "c"], "flaky": ["attempt 2"]}
    assert tokens == said | {"say_in_thread": ["p", "q"], "last": ["z"]}
