"""A process that gets no more threads: python few_threads.py DIRECTORY STORE.

It starts what is started once, takes all threads away by RLIMIT_NPROC, and has 30 runs of one plain step. Prints as JSON how
often a step was called, how many runs ended, and what was logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import sys
import threading
import time

from perdure import Context, Runtime, workflow

RUNS = 30
PATIENCE = 40.0
NOBODY = 65534

calls: list[int] = []
logged: list[str] = []


class Logged(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logged.append(record.getMessage())


def work(number: int) -> int:
    calls.append(number)
    time.sleep(0.01)
    return number


@workflow
async def one_step(ctx: Context, number: int) -> int:
    return await ctx.step("work", work, number)


def take_threads_away() -> None:
    if os.getuid() == 0:  # whom no limit holds
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return
    raise AssertionError("the limit does not hold")


async def main(dsn: str) -> None:
    logging.getLogger("perdure").addHandler(Logged())
    async with Runtime(dsn, [one_step]) as runtime:
        await (await runtime.start(one_step, -1))
        calls.clear()
        take_threads_away()
        runs = [await runtime.start(one_step, number) for number in range(RUNS)]
        waiting = {asyncio.ensure_future(_wait(run)) for run in runs}
        ended, _ = await asyncio.wait(waiting, timeout=PATIENCE)
        print(json.dumps({"calls": len(calls), "ended": len(ended), "logged": logged}), flush=True)
        os._exit(0)  # what is left is not waited for


async def _wait(run: object) -> None:
    await run  # type: ignore[misc]


if __name__ == "__main__":
    os.umask(0)
    asyncio.run(main({"memory": "memory:", "sqlite": f"sqlite:///{sys.argv[1]}/app.db"}[sys.argv[2]]))
