"""Four runs that ask people: one is approved (with a double click), one with an edited payload, one rejected, one expires."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from perdure import (
    ApprovalDecided,
    ApprovalNotFound,
    Approved,
    Context,
    Expired,
    Rejected,
    Run,
    RunNotFound,
    Runtime,
    workflow,
)
from tests.backends.patterns import EffectLedger, effect, wait_for_run, wait_until

RUNS: Final = ("approved", "edited", "rejected", "expired")


async def send_link() -> None:
    effect()


async def publish(text: str) -> str:
    effect(f"published {text}")
    return f"{text} is public"


async def file_away(why: str) -> str:
    effect(f"filed because {why}")
    return f"filed: {why}"


@workflow
async def ask(ctx: Context[Any], text: str) -> str:
    expires_in = "30ms" if ctx.run_id == "expired" else "1d"
    asking = ctx.approve("publish", text, expires_in=expires_in, assignees=["ada", "bob"])
    decision, _ = await asyncio.gather(asking, ctx.step(send_link))
    match decision:
        case Approved(payload, by):
            printed = await ctx.step("print", publish, payload)
            return f"{printed}, by {by}"
        case Rejected(reason, by):
            return f"{await ctx.step(file_away, str(reason))}, by {by}"
        case Expired():
            return await ctx.step(file_away, "nobody decided")
    raise AssertionError


WORKFLOWS: Final = [ask]


async def start(runtime: Runtime, ledger: EffectLedger) -> list[Run[Any]]:
    return [await runtime.start(ask, "news", id=run_id) for run_id in RUNS]


async def meanwhile(runtime: Runtime) -> None:
    await asyncio.gather(
        _decide(runtime, lambda: runtime.approve("approved", "publish", by="ada")),
        _decide(runtime, lambda: runtime.approve("approved", "publish", by="ada")),
        _decide(runtime, lambda: runtime.approve("edited", "publish", by="bob", payload="better news")),
        _decide(runtime, lambda: runtime.reject("rejected", "publish", by="bob", reason="too short")),
    )


async def _decide(runtime: Runtime, verb: Callable[[], Awaitable[None]]) -> None:
    """Decide as soon as the run asks."""

    async def attempt() -> bool:
        try:
            await verb()
        except (RunNotFound, ApprovalNotFound):
            return False
        except ApprovalDecided as decided:
            assert decided.by == "ada"  # noqa: PT017 - no test function
        return True

    await wait_until(runtime, attempt)


async def check(runtime: Runtime, ledger: EffectLedger) -> None:
    values = [await (await wait_for_run(runtime, run_id)) for run_id in RUNS]
    assert values == [
        "news is public, by ada",
        "better news is public, by bob",
        "filed: too short, by bob",
        "filed: nobody decided",
    ]
    assert await runtime.approvals() == []
    published = {(line.run, line.what) for line in ledger.lines() if line.kind == "effect" and line.what.startswith("published")}
    assert published == {("approved", "published news"), ("edited", "published better news")}
