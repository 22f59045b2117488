"""An order is processed, the process is killed half-way, and another one goes on: `make demo`.

The script starts itself twice. The first process is killed with SIGKILL while it reserves the second item; the second finds what
was recorded and does the rest. Each step writes a line to a ledger whenever its function really runs, which is how the end of
the demo knows that nothing ran twice but the step that was cut off.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from perdure import Context, Ok, current_step, workflow

IS_TERMINAL = sys.stdout.isatty() or os.environ.get("PERDURE_DEMO_COLOUR") == "1"


def paint(text: str, colour: int) -> str:
    return f"\033[{colour}m{text}\033[0m" if IS_TERMINAL else text


def say(mark: str, colour: int, text: str) -> None:
    print(f"  {paint(f'{mark:<9}', colour)} {text}", flush=True)


@dataclass
class Order:
    """What a customer wants."""

    id: str
    cents: int
    items: list[str]


@dataclass
class Payment:
    """What a customer paid."""

    id: str
    cents: int


class Shop:
    """The outside world: a ledger of everything that was really done."""

    def __init__(self, ledger: Path, dies_at: str | None) -> None:
        self.ledger = ledger
        self.dies_at = dies_at

    def did(self, what: str) -> None:
        with self.ledger.open("a") as ledger:
            ledger.write(what + "\n")
        say("ran", 32, what)

    async def charge(self, order: Order) -> Payment:
        self.did(f"charge {order.cents / 100:.2f} EUR (idempotency key {current_step().idempotency_key})")
        await asyncio.sleep(0.2)
        return Payment("pay_1", order.cents)

    async def reserve(self, item: str) -> str:
        self.did(f"reserve {item}")
        await asyncio.sleep(0.2)
        if item == self.dies_at:
            say("killed", 31, f"SIGKILL, while reserving {item}")
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{item} in bay {len(item)}"

    async def ship(self, bays: list[str]) -> str:
        self.did(f"ship {', '.join(bays)}")
        await asyncio.sleep(0.2)
        return "parcel-7"


@workflow
async def process_order(ctx: Context[Shop], order: Order) -> str:
    shop = ctx.deps

    was_recorded = ctx.is_replaying
    payment = await ctx.step("charge", shop.charge, order)
    if was_recorded:
        say("replayed", 36, f"charge -> {payment.id}")

    bays = []
    for item in order.items:
        was_recorded = ctx.is_replaying
        bays.append(await ctx.step("reserve", shop.reserve, item, key=f"reserve:{item}"))
        if was_recorded:
            say("replayed", 36, f"reserve:{item} -> {bays[-1]}")

    return await ctx.step("ship", shop.ship, bays)


async def work(directory: Path, dies_at: str | None) -> None:
    order = Order("order-1", 4250, ["teapot", "cup", "saucer"])
    shop = Shop(directory / "ledger", dies_at)
    outcome = await process_order.run(order, id=order.id, store=f"sqlite:///{directory}/shop.db", deps=shop)
    match outcome:
        case Ok(parcel):
            say("done", 32, f"order-1 completed: {parcel}")
        case other:
            sys.exit(f"unexpected: {other}")


def show(directory: Path) -> int:
    """Run the two processes, then compare the ledger with what should have happened."""
    for title, dies_at in (("First process", "cup"), ("Second process, same order, same store", "")):
        print(f"\n{paint(title, 1)}", flush=True)
        process = subprocess.run([sys.executable, __file__, str(directory), dies_at], check=False)  # noqa: S603 - this file
        if process.returncode not in (0, -signal.SIGKILL):
            return 1
    counts = Counter((directory / "ledger").read_text().splitlines())
    again = [what for what, times in counts.items() if times > 1]
    print(f"\n{paint('What really ran', 1)}")
    for what, times in counts.items():
        say(f"{times} x", 33 if times > 1 else 32, what + (" (was cut off by the kill, so it ran again)" if times > 1 else ""))
    if again != ["reserve cup"]:
        print("something else than the interrupted step ran twice")
        return 1
    print(f"\n{paint('Nothing recorded ran twice.', 32)} The charge was made once, and its result survived SIGKILL.\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(work(Path(sys.argv[1]), sys.argv[2] or None))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            sys.exit(show(Path(temporary)))
