"""An endless run: a poller that lives under one id, and starts over with a new input after every round.

    python examples/endless.py

Orders come in as signals, also while a round is under way, and none is lost. The journal has one round, however many there were.
The program ends the poller in the middle and goes on with another runtime. It prints:

    round 1 ships tea (orders/ship)
    round 2 ships rice (orders;generation=1/ship)
    stop in generation 2: the journal has ['order']
    round 3 ships salt (orders;generation=2/ship)
    shipped: tea, rice, salt
"""

import asyncio
import tempfile
from pathlib import Path

from perdure import Context, Runtime, workflow

LAST = "salt"


async def ship(round_number: int, what: str, key: str) -> str:
    print(f"round {round_number} ships {what} ({key})")
    return what


@workflow
async def orders(ctx: Context, shipped: list[str]) -> str:
    """Ships what is ordered, one order in each round."""
    what = await ctx.wait_for_signal("order", returns=str)
    shipped = [*shipped, await ctx.step(ship, len(shipped) + 1, what, ctx.idempotency_key("ship"))]
    if what != LAST:
        await ctx.continue_as(shipped)
    return ", ".join(shipped)


async def main(store: str) -> None:
    async with Runtime(store, [orders]) as runtime:
        run = await runtime.start(orders, [], id="orders")
        for what in ("tea", "rice"):
            await run.signal("order", what)
        while (described := await runtime.describe("orders")).status != "suspended" or described.generation < 2:
            await runtime.store.watch(1.0)
        print(f"stop in generation {described.generation}: the journal has {[step.key for step in described.steps]}")
    async with Runtime(store, [orders]) as runtime:
        run = await runtime.start(orders, [], id="orders")  # the first input: the same run
        await run.signal("order", LAST)
        print("shipped:", await run)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(f"sqlite:///{Path(directory) / 'orders.db'}"))
