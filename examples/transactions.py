"""Exactly once: money is transferred in the store's own database, and a run is started inside a program's transaction.

    python examples/transactions.py

The first attempt at the transfer fails after it has written; nothing of it stays. A run that was started in a transaction exists
only if that was committed. It prints:

    attempt 1
    attempt 2
    transferred: ada has 70, bob has 30
    rolled back: no run
    committed: the letter to ada was sent
"""

import asyncio
import sqlite3
import tempfile
from pathlib import Path

from perdure import Context, Retry, Runtime, StepTransaction, current_step, workflow


def transfer(transaction: StepTransaction, source: str, target: str, amount: int) -> dict[str, int]:
    # A plain function, so it is called in the thread of the SQLite connection. On PostgreSQL and MySQL it is async.
    print(f"attempt {current_step().attempt}")
    update = "UPDATE accounts SET balance = balance + ? WHERE name = ?"
    transaction.connection.execute(update, (-amount, source))
    if current_step().attempt == 1:
        raise ConnectionError("the cable fell out")
    transaction.connection.execute(update, (amount, target))
    return dict(transaction.connection.execute("SELECT name, balance FROM accounts"))


@workflow
async def pay(ctx: Context, source: str, target: str, amount: int) -> dict[str, int]:
    return await ctx.transaction(transfer, source, target, amount, retry=Retry(attempts=2, wait_initial="1ms", wait_jitter=0))


async def send_letter(name: str) -> str:
    return f"the letter to {name} was sent"


@workflow
async def welcome(ctx: Context, name: str) -> str:
    return await ctx.step(send_letter, name)


def sign_up(path: Path, runtime: Runtime, name: str, *, commits: bool) -> None:
    """Insert a user and start a run, both or neither."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO accounts VALUES (?, 0)", (f"{name} {commits}",))
    runtime.sync.start(welcome, name, id=f"welcome-{name}", connection=connection)
    connection.execute("COMMIT" if commits else "ROLLBACK")
    connection.close()


async def main(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, balance INTEGER)")
        connection.execute("INSERT INTO accounts VALUES ('ada', 100), ('bob', 0)")
    connection.close()
    async with Runtime(f"sqlite:///{path}", [pay, welcome]) as runtime:
        balances = await (await runtime.start(pay, "ada", "bob", 30, id="payment-1"))
        print("transferred:", ", ".join(f"{name} has {balance}" for name, balance in balances.items()))
        await asyncio.to_thread(sign_up, path, runtime, "ada", commits=False)
        print("rolled back:", "a run" if await runtime.get("welcome-ada") else "no run")
        await asyncio.to_thread(sign_up, path, runtime, "ada", commits=True)
        run = await runtime.get("welcome-ada")
        if run is not None:
            print("committed:", await run)


with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory) / "app.db"))
