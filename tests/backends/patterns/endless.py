"""A counter that starts over three times and gets signals meanwhile: each reaches one generation, where each step runs once."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from perdure import Context, Run, Runtime, workflow
from tests.backends.patterns import EffectLedger, effect, wait_for_run

RUN: Final = "counter"
STARTS: Final = 3
NUMBERS: Final = [10, 20, 30, 40, 50]


async def open_round(number: int) -> str:
    effect(f"open {number}")
    return f"round {number}"


async def add(number: int, seen: list[int]) -> list[int]:
    effect(f"add in {number}")
    return seen


async def close_round(number: int) -> None:
    effect(f"close {number}")


@workflow
async def counter(ctx: Context, number: int, rounds: list[str], seen: list[int]) -> list[Any]:
    """The rounds and the numbers so far. The last round waits for what is left of the numbers."""
    rounds = [*rounds, await ctx.step(open_round, number)]
    try:
        awaited = 1 if number < STARTS else len(NUMBERS) - len(seen)
        for nth in range(awaited):
            seen = [*seen, await ctx.wait_for_signal("number", key=f"number {nth}", returns=int)]
        await ctx.step(add, number, seen)
        await ctx.sleep("pause", "5ms")
        if number < STARTS:
            await ctx.continue_as(number + 1, rounds, seen)
        return [rounds, seen]
    finally:
        await ctx.step(close_round, number)


WORKFLOWS: Final = [counter]


async def start(runtime: Runtime, ledger: EffectLedger) -> list[Run[Any]]:
    return [await runtime.start(counter, 0, [], [], id=RUN)]


async def meanwhile(runtime: Runtime) -> None:
    await wait_for_run(runtime, RUN)
    for number in NUMBERS:
        await runtime.signal(RUN, "number", number, dedupe=f"number {number}")


async def check(runtime: Runtime, ledger: EffectLedger) -> None:
    run = await wait_for_run(runtime, RUN)
    assert await run == [[f"round {number}" for number in range(STARTS + 1)], NUMBERS]
    info = await runtime.describe(RUN)
    assert info.generation == STARTS
    assert all(count <= 2 for count in Counter(ledger.effects()).values())
    keys = {line.idempotency_key for line in ledger.lines() if line.kind == "effect"}
    assert len(keys) == 3 * (STARTS + 1)
    journal = await runtime.store.journal(RUN)
    assert len([entry for entry in journal if entry.kind == "step" and entry.phase == "close"]) == 3
    assert await runtime.store.inbox(RUN) == []
