"""A process that forks after it has used perdure in every way: python forking.py HOW DSN.

A child that hangs is ended by SIGALRM, and its parent says how it ended.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading

from perdure import Context, Ok, Runtime, workflow
from tests.backends.opening import store_at

PATIENCE = 30


def in_thread() -> str:
    return threading.current_thread().name


async def on_loop() -> str:
    return threading.current_thread().name


@workflow
async def both(ctx: Context) -> bool:
    return await ctx.step(in_thread) != await ctx.step(on_loop)


def use_everything(dsn: str, side: str) -> None:
    """Run plain and async steps in memory, on a store, in a runtime, and from a program without a loop."""
    signal.alarm(PATIENCE)
    asyncio.run(_use_everything(dsn, side))
    assert both.run_sync() == Ok(True)
    signal.alarm(0)


async def _use_everything(dsn: str, side: str) -> None:
    assert await both()
    async with store_at(dsn) as store, Runtime(store, [both]) as runtime:
        assert await both.run(id=f"{side}-alone", store=store) == Ok(True)
        assert await runtime.run(both, id=f"{side}-run") == Ok(True)
        assert await (await runtime.start(both, id=f"{side}-started"))


def fork(dsn: str) -> int | None:
    """Fork where no event loop runs, as a server does that was given an application it has loaded."""
    use_everything(dsn, "before")
    child = os.fork()
    if child == 0:
        _exit_after(dsn)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    use_everything(dsn, "after")
    return status


def fork_by_multiprocessing(dsn: str) -> int | None:
    """Have multiprocessing fork while an event loop runs here, with a worker on it."""
    use_everything(dsn, "before")
    return asyncio.run(_fork_on_loop(dsn))


async def _fork_on_loop(dsn: str) -> int | None:
    async with store_at(dsn) as store, Runtime(store, [both]) as runtime:
        assert await runtime.run(both, id="before-fork") == Ok(True)
        child = multiprocessing.get_context("fork").Process(target=use_everything, args=(dsn, "child"))
        child.start()
        assert await runtime.run(both, id="beside") == Ok(True)
        await asyncio.to_thread(child.join)
        assert await runtime.run(both, id="after") == Ok(True)
    return child.exitcode


def share_runtime(dsn: str) -> int | None:
    """Fork with a runtime that was made and used before, and use it on both sides."""
    runtime = Runtime(dsn, [both]).sync
    assert runtime.run(both, id="before") == Ok(True)
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        with runtime:
            assert runtime.run(both, id="child") == Ok(True)
            assert runtime.start(both, id="child-started").result()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with runtime:
        assert runtime.run(both, id="after") == Ok(True)
    return status


def _exit_after(dsn: str) -> None:
    code = 1
    try:
        use_everything(dsn, "child")
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    jobs = {job.__name__: job for job in (fork, fork_by_multiprocessing, share_runtime)}
    print("child ended with", jobs[sys.argv[1]](sys.argv[2]), flush=True)
