"""A bit of everything that a run could always do: steps, a plain function, a retry, a sleep, a signal, a map and a race."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from perdure import Context, Retry, Run, Runtime, current_step, workflow
from tests.backends.patterns import EffectLedger, effect, wait_for_run

RUN: Final = "plain"
OPTIONAL: Final = frozenset({"slow"})


async def reserve(item: str) -> str:
    effect()
    return f"{item} is reserved"


def print_label(item: str) -> str:
    effect()
    return f"label of {item}"


async def flaky() -> str:
    effect(f"flaky {current_step().attempt}")
    if current_step().attempt < 2:
        raise OSError("not yet")
    return "second time"


async def fast() -> str:
    effect()
    return "fast"


async def slow() -> str:
    effect()
    await asyncio.sleep(60)
    return "slow"


@workflow
async def plain(ctx: Context) -> list[Any]:
    found: list[Any] = [await ctx.step(reserve, "book"), await ctx.step(print_label, "book")]
    found += await asyncio.gather(ctx.step("left", reserve, "left"), ctx.step("right", print_label, "right"))
    found.append(await ctx.step(flaky, retry=Retry(attempts=2, wait_initial="1ms", wait_jitter=0)))
    await ctx.sleep("settle", "10ms")
    found.append(await ctx.wait_for_signal("word"))
    found += await ctx.map("each", reserve, ["a", "b", "c"])
    found.append(await ctx.race(ctx.step(fast), ctx.step(slow)))
    await ctx.sleep("rest", "30ms")
    found.append(await ctx.step("last", reserve, "last"))
    return found


WORKFLOWS: Final = [plain]


async def start(runtime: Runtime, ledger: EffectLedger) -> list[Run[Any]]:
    return [await runtime.start(plain, id=RUN)]


async def meanwhile(runtime: Runtime) -> None:
    await wait_for_run(runtime, RUN)
    await runtime.signal(RUN, "word", "the word", dedupe="once")


async def check(runtime: Runtime, ledger: EffectLedger) -> None:
    run = await wait_for_run(runtime, RUN)
    assert await run == [
        "book is reserved", "label of book", "left is reserved", "label of right", "second time", "the word",
        "a is reserved", "b is reserved", "c is reserved", "fast", "last is reserved",
    ]  # fmt: skip
    assert Counter(ledger.effects())["flaky 2"] <= 2
