"""A process of the tests of approvals: it decides when the others do."""

from __future__ import annotations

import asyncio
from multiprocessing.synchronize import Barrier
from typing import Any, Final

from perdure import ApprovalDecided, Approved, Context, Runtime, Workflow
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe

SECRET: Final = "a secret of more than thirty-two bytes"


async def _ask(ctx: Context[Any]) -> str:
    decision = await ctx.approve("it", {"n": 1}, expires_in="1h")
    return f"{decision.by} approved" if isinstance(decision, Approved) else f"{getattr(decision, 'by', 'nobody')} rejected"


ask: Final = Workflow("ask", _ask)


async def decide_together(parent: ParentPipe, dsn: str, barrier: Barrier, me: str, tokens: dict[str, str]) -> None:
    """Decide each of these runs when all processes are ready: some approve, some reject, half of them by a token.

    For each run, the answer is who was first, as far as this process was told.
    """
    async with store_at(dsn) as store:
        runtime = Runtime(store, concurrency=0, secret=SECRET)
        for run_id, token in tokens.items():
            await asyncio.to_thread(barrier.wait)
            try:
                if me == "token":
                    await runtime.decide_by_token(token, "approve")
                elif me < "m":
                    await runtime.approve(run_id, "it", by=me)
                else:
                    await runtime.reject(run_id, "it", by=me)
            except ApprovalDecided as decided:
                parent.send((False, f"{decided.by} {decided.decision}"))
            else:
                parent.send((True, f"{me} {'approved' if me == 'token' or me < 'm' else 'rejected'}"))
        await runtime.close()
