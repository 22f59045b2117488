"""What tests of approvals share: a workflow that publishes a draft if a person approves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from perdure import Approved, Context, Expired, Rejected, Workflow
from tests.engine.worlds import World, world

SECRET = "a secret of more than thirty-two bytes"


@dataclass
class Draft:
    title: str
    words: int = 0


class Press:
    """What was published, and the workflow that publishes."""

    def __init__(self, **asking: Any) -> None:
        self.published: list[Draft] = []
        self._asking = {"expires_in": "1h", **asking}
        self.workflow: Workflow[Any, Any] = Workflow("press", self._body)

    async def _body(self, ctx: Context[Any], title: str) -> str:
        match await ctx.approve("publish", Draft(title, 3), **self._asking):
            case Approved(draft, by, at):
                await ctx.step("print", self._print, draft)
                return f"{by} approved {draft.title} at {at:%H:%M}"
            case Rejected(reason, by, at):
                return f"{by} rejected it at {at:%H:%M}: {reason}"
            case Expired(at):
                return f"expired at {at:%H:%M}"
        raise AssertionError

    async def _print(self, draft: Draft) -> None:
        self.published.append(draft)


class Desk(World):
    """A world with a press in it."""

    press: Press

    async def ask(self, *run_ids: str) -> None:
        """Start these runs, which then wait for approval."""
        for run_id in run_ids:
            await self.runtime.run(self.press.workflow, f"news of {run_id}", id=run_id)


@asynccontextmanager
async def desk(*, store: Any = None, **asking: Any) -> AsyncIterator[Desk]:
    """A world in which runs of a press can be asked for."""
    press = Press(**asking)
    async with world(press.workflow, store=store, secret=SECRET) as here:
        there = Desk(here.runtime, here.clock)
        there.press = press
        yield there
