"""An order whose items are packed by children: one for each, on any worker. A quote is enough from two of three carriers.

    python examples/children.py

It prints:

    order-1: book packed, pen packed, ink packed; quotes from dove and swift
    order-2: LookupError: there is no glass
    order-2/pack[0]: failed
    order-2/pack[1]: cancelled
"""

import asyncio
import logging
import tempfile
from pathlib import Path

from perdure import Context, Ok, Runtime, workflow


async def take_from_shelf(item: str) -> str:
    if item == "glass":
        raise LookupError("there is no glass")
    return f"{item} packed"


@workflow
async def pack(ctx: Context, item: str) -> str:
    if item == "piano":
        await ctx.wait_for_signal("a second person")
    return await ctx.step(take_from_shelf, item)


@workflow
async def ask_carrier(ctx: Context, carrier: str) -> str:
    if carrier == "snail":
        await ctx.sleep("snail thinks", "1h")
    return carrier


@workflow
async def order(ctx: Context, items: list[str]) -> str:
    packed = await ctx.map(pack, items)  # the first error cancels the others and fails the order
    quotes = await ctx.map(ask_carrier, ["dove", "snail", "swift"], enough=2)
    carriers = [quote.value for quote in quotes if isinstance(quote, Ok)]
    return f"{', '.join(packed)}; quotes from {' and '.join(carriers)}"


async def main(store: str) -> None:
    async with Runtime(store, [order, pack, ask_carrier]) as runtime:
        print("order-1:", await (await runtime.start(order, ["book", "pen", "ink"], id="order-1")))
        broken = await runtime.start(order, ["glass", "piano"], id="order-2")
        try:
            await broken
        except LookupError as error:
            print(f"order-2: LookupError: {error}")
        for info in sorted(await runtime.list(prefix="order-2/"), key=lambda info: info.id):
            print(f"{info.id}: {info.status}")


if __name__ == "__main__":
    logging.getLogger("perdure").setLevel(logging.CRITICAL)  # the order that fails is not worth a traceback here
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(f"sqlite:///{Path(directory) / 'orders.db'}"))
