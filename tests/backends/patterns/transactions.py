"""Transactions: deposits and transfers in the store's own database, beside ordinary steps; one of them fails and is undone.

The tables are shared by all run-throughs, so each row says to which it belongs.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from perdure import Context, Run, Runtime, StepTransaction, workflow
from tests.backends.patterns import EffectLedger, effect, wait_for_run

RUN: Final = "money"


async def prepare(transaction: StepTransaction) -> None:
    effect()
    await transaction.execute("CREATE TABLE IF NOT EXISTS pattern_money (place TEXT, account TEXT, cents INTEGER)")


async def book(transaction: StepTransaction, place: str, account: str, cents: int) -> int:
    effect()
    await transaction.execute(f"INSERT INTO pattern_money (place, account, cents) VALUES ('{place}', '{account}', {cents})")
    return cents


async def fail(transaction: StepTransaction, place: str) -> None:
    await book(transaction, place, "lost", 1_000)
    raise ValueError("not enough")


async def transfer(transaction: StepTransaction, place: str, source: str, target: str, cents: int) -> int:
    await book(transaction, place, source, -cents)
    await transaction.execute(f"INSERT INTO pattern_money (place, account, cents) VALUES ('{place}', '{target}', {cents})")
    return cents


async def read(transaction: StepTransaction, place: str) -> list[list[Any]]:
    effect()
    rows = await transaction.execute(f"SELECT account, cents FROM pattern_money WHERE place = '{place}' ORDER BY account, cents")
    return [[account, int(cents)] for account, cents in rows]


async def notify(number: int) -> int:
    effect()
    return number


@workflow
async def money(ctx: Context, place: str) -> list[list[Any]]:
    await ctx.transaction(prepare)
    await ctx.transaction("deposit", book, place, "a", 100)
    await asyncio.gather(
        ctx.transaction("to b", transfer, place, "a", "b", 30),
        *(ctx.step(notify, number, key=f"notify-{number}") for number in range(3)),
        ctx.transaction("to c", transfer, place, "a", "c", 20),
    )
    try:
        await ctx.transaction(fail, place)
    except ValueError:
        await ctx.step("notify", notify, 3)
    return await ctx.transaction(read, place)


WORKFLOWS: Final = [money]


async def start(runtime: Runtime, ledger: EffectLedger) -> list[Run[Any]]:
    return [await runtime.start(money, runtime.store.key[-1], id=RUN)]


async def check(runtime: Runtime, ledger: EffectLedger) -> None:
    run = await wait_for_run(runtime, RUN)
    assert await run == [["a", -30], ["a", -20], ["a", 100], ["b", 30], ["c", 20]]
