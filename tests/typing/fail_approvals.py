"""Calls about approvals that no checker lets pass. Each line marked `error` is one."""

from __future__ import annotations

from perdure import Approved, Context, Runtime


async def asking(ctx: Context) -> None:
    await ctx.approve()  # error
    await ctx.approve("publish", 1, expires="2d")  # error
    await ctx.approve("publish", 1, assignees=7)  # error
    decision = await ctx.approve("publish", 1)
    print(decision.payload)  # error
    if isinstance(decision, Approved):
        print(decision.payload.title)  # error


async def deciding(runtime: Runtime) -> None:
    await runtime.approve("run", "publish")  # error
    await runtime.approve("run", "publish", "ada")  # error
    await runtime.reject("run", "publish", by="ada", payload=1)  # error
    await runtime.approval_token("run", "publish", by="ada", action="delete")  # error
    await runtime.decide_by_token("token", "both")  # error
    Runtime(secret=7)  # error
