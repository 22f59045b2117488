"""Queues with limits: a mail provider that takes two connections, one for each customer, and twenty letters a second.

    python examples/queues.py

The limits are kept in the store, so they hold for all workers of all processes together; here two Runtimes stand for two. Each
step says how many letters are under way, in all and to its customer.
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from perdure import Context, Queue, Runtime, workflow

MAIL = Queue("mail", concurrency=2, per_key=1, rate="20/s")
under_way: Counter[str] = Counter()
most = Counter[str]()


async def send(customer: str, letter: int) -> str:
    under_way.update({customer: 1, "in all": 1})
    most["in all"] = max(most["in all"], under_way["in all"])
    most["to one customer"] = max(most["to one customer"], under_way[customer])
    await asyncio.sleep(0.06)  # the provider takes its time
    under_way.subtract({customer: 1, "in all": 1})
    return f"letter {letter} to {customer}"


@workflow
async def deliver(ctx: Context, customer: str, letter: int) -> str:
    return await ctx.step(send, customer, letter)


async def main(store: str) -> None:
    async with Runtime(store, [deliver], queues=[MAIL]) as runtime, Runtime(store, [deliver], only_queues=["mail"]):
        started_at = time.monotonic()
        runs = []
        for letter in range(12):
            customer = ("ada", "bob", "eve")[letter % 3]
            runs.append(await runtime.start(deliver, customer, letter, queue="mail", limit_key=customer))
        urgent = await runtime.start(deliver, "ada", 99, queue="mail", limit_key="ada", priority=9)  # before those that wait
        print(await urgent)
        for run in runs:
            print(await run)
        print(f"at most {most['in all']} at once, {most['to one customer']} to one customer")
        print("no faster than 20 a second:", time.monotonic() - started_at >= 12 / 20)
        await runtime.set_queue(Queue("mail", concurrency=10))  # takes effect at once, in all processes
        print(*await runtime.queues())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'mail.db'}"))
