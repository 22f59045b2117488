"""Approvals: the decision knows the type of its payload, and a `match` over it is complete."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_never, assert_type

from perdure import Approved, Context, Expired, PendingApproval, Rejected, Runtime
from perdure.operations.approval_app import ApprovalApp


@dataclass
class Draft:
    title: str


async def asking(ctx: Context) -> None:
    draft = Draft("a")
    assert_type(await ctx.approve("publish", draft), Approved[Draft] | Rejected | Expired)
    assert_type(
        await ctx.approve("publish", draft, key="2", expires_in="2d", assignees=["ada"]), Approved[Draft] | Rejected | Expired
    )
    assert_type(await ctx.approve("publish", {"a": 1}, returns=Draft), Approved[Draft] | Rejected | Expired)
    assert_type(await ctx.approve("publish", [draft], returns=list[Draft]), Approved[list[Draft]] | Rejected | Expired)
    assert_type(await ctx.approve("publish", 1, returns=int | str), Approved[Any] | Rejected | Expired)
    assert_type(await ctx.approve("publish"), Approved[Any] | Rejected | Expired)


async def deciding(ctx: Context) -> str:
    decision = await ctx.approve("publish", Draft("a"))
    match decision:
        case Approved(payload, by, at):
            assert_type(payload, Draft)
            assert_type(at, datetime)
            return payload.title + by
        case Rejected(reason, by):
            return (reason or "no") + by
        case Expired(at):
            return f"{at}"
        case _:
            assert_never(decision)


async def runtimes(runtime: Runtime) -> None:
    assert_type(await runtime.approve("run", "publish", by="ada", payload=Draft("b"), key="2"), None)
    assert_type(await runtime.reject("run", "publish", by="ada", reason="no"), None)
    assert_type(await runtime.approvals(assignee="ada", workflow="press", limit=10), list[PendingApproval])
    assert_type(await runtime.approval_token("run", "publish", by="ada", action="reject", expires_in="1h"), str)
    assert_type(await runtime.decide_by_token("token", "approve", reason=None), None)
    assert_type(runtime.approval_app(), ApprovalApp)
    assert_type(runtime.sync.approvals(), list[PendingApproval])
    assert_type(runtime.sync.approve("run", "publish", by="ada"), None)
    assert_type(runtime.sync.approval_token("run", "publish", by="ada"), str)


def secrets() -> None:
    Runtime(secret=b"x" * 32)
    Runtime(secret="x" * 32)
    Runtime(secret=[b"x" * 32, "y" * 32])
