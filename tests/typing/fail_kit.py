"""Calls of `perdure.testing` that no checker lets pass. Each line marked `error` is one."""

from __future__ import annotations

from perdure import Context, testing, workflow


@workflow
async def greet(ctx: Context, name: str) -> str:
    return ctx.run_id + name


async def plain(name: str) -> str:
    return name


async def wrong(rt: testing.VirtualRuntime) -> None:
    testing.runtime(plain)  # error
    await rt.run(greet, 1)  # error
    await rt.run(greet)  # error
    await rt.start(greet, "ada", retries=3)  # error
    rt.stub("charge", return_value=1)  # error
    await rt.skip([3])  # error
    await rt.assert_history("r", "charge")  # error
    await testing.crash_everywhere("greet")  # error


def wrong_and_blocking(rt: testing.SyncVirtualRuntime) -> None:
    testing.runtime_sync(plain)  # error
    rt.run(greet, 1)  # error
    rt.start(greet)  # error
    rt.skip([3])  # error
    rt.start(greet, "ada").result() + 1  # error
