"""What `perdure.testing` infers: a runtime for tests is typed like every other."""

from __future__ import annotations

from datetime import datetime
from typing import Any, assert_type

from perdure import Context, Err, Ok, Outcome, Run, SyncRun, Workflow, testing, workflow
from perdure.testing import CrashReport, HistoryItem, Stub, SyncVirtualRuntime, VirtualRuntime


@workflow
async def greet(ctx: Context, name: str, times: int = 1) -> str:
    return ctx.run_id + name * times


@workflow
async def review(ctx: Context, number: int) -> Ok[int] | Err[str]:
    return Ok(number) if ctx.run_id else Err("no")


async def charge(cents: int) -> int:
    return cents


async def runs() -> None:
    async with testing.runtime(greet, review, auto_skip=False, hang_after="50ms") as rt:
        assert_type(rt, VirtualRuntime)
        assert_type(await rt.run(greet, "ada"), Outcome[str])
        assert_type(await rt.run(review, 1, id="r"), Outcome[int])
        run = await rt.start(greet, "ada", 2)
        assert_type(run, Run[str])
        assert_type(await run, str)
        assert_type(rt.stub(charge, returns=3, times=2), Stub)
        assert_type(await rt.history(run), list[HistoryItem])
        await rt.skip("3d")
        await rt.assert_history("r", ["charge"])


def blocking() -> None:
    with testing.runtime_sync(greet, review, auto_skip=False) as rt:
        assert_type(rt, SyncVirtualRuntime)
        assert_type(rt.run(greet, "ada"), Outcome[str])
        run = rt.start(greet, "ada", 2)
        assert_type(run, SyncRun[str])
        assert_type(run.result(), str)
        assert_type(run.signal("word", 1), None)
        assert_type(rt.get("r"), SyncRun[Any] | None)
        assert_type(rt.stub(charge, returns=3), Stub)
        assert_type(rt.history(run), list[HistoryItem])
        assert_type(rt.now(), datetime)
        rt.skip("3d")
        rt.assert_history("r", ["charge"])


async def crashes() -> None:
    assert_type(await testing.crash_everywhere(greet, "ada", effects=[], signals={"word": 1}), CrashReport)
    assert_type(await testing.crash_everywhere(lambda restarts: Workflow(f"greet {restarts}", greet.fn), "ada"), CrashReport)
