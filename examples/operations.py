"""What an operator's script does with `perdure --json`: find the runs that failed, look at why, and let them go on.

    python examples/operations.py

The commands need no code of the program, only its store. It prints:

    order-2 failed: ConnectionError: the bank is closed
    exit code of a run that is not there: 1
    retried order-2
    order-2 completed
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from perdure import Context, Runtime, workflow


def charge(order: int, flag: str) -> str:
    if order == 2 and not Path(flag).exists():
        raise ConnectionError("the bank is closed")
    return "paid"


@workflow
async def checkout(ctx: Context, order: int, flag: str) -> str:
    return await ctx.step(charge, order, flag)


def perdure(*arguments: str) -> list[dict[str, str]]:
    """The documents that a command prints. Raises if its exit code is not 0."""
    command = [sys.executable, "-m", "perdure", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - our own command
    return [json.loads(line) for line in done.stdout.splitlines()]


async def drive(store: str, flag: Path) -> None:
    async with Runtime(store, [checkout], concurrency=0) as runtime:
        for order in (1, 2, 3):
            await runtime.start(checkout, order, str(flag), id=f"order-{order}")
        await runtime.sweep()  # what a worker does


def main(folder: Path) -> None:
    store, flag = f"sqlite:///{folder / 'shop.db'}", folder / "open"
    os.environ["PERDURE_STORE"] = store
    asyncio.run(drive(store, flag))
    for run in perdure("runs", "--status", "failed"):
        error = perdure("show", run["id"])[0]["error"]
        print(f"{run['id']} failed: {error['type']}: {error['message']}")
    missing = subprocess.run([sys.executable, "-m", "perdure", "show", "order-9"], stderr=subprocess.DEVNULL, check=False)
    print("exit code of a run that is not there:", missing.returncode)
    flag.touch()  # the bank opens
    print("retried", perdure("retry", "order-2")[0]["id"])
    asyncio.run(drive(store, flag))
    print("order-2", perdure("show", "order-2")[0]["status"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
