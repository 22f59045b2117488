"""The processes of the campaign on schedules: two race through a daylight-saving change, and one kills itself at a store call."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from perdure import Context, Runtime, Workflow, current_step
from perdure.store import FullStore
from perdure.testing import ManualClock
from tests.backends.ledger import Ledger
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe

ZONE: Final = "Europe/Berlin"
HOURS: Final = 8
# What is no verb, or sends nothing.
NOT_COUNTED: Final = frozenset({"close", "sibling", "setup", "watch"})


class Night(NamedTuple):
    """A night in which the clocks change: a DSN for it, and the day on which it begins."""

    dsn: str
    day: str
    ledger: Path


class SelfKillingStore:
    """A store whose process kills itself at a call: just before it, or when it has taken effect."""

    def __init__(self, store: FullStore, dies_at: int, *, after: bool) -> None:
        self._store = store
        self._calls_left = dies_at
        self._after = after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method) or name in NOT_COUNTED:
            return method

        def call(*args: Any, **options: Any) -> Any:
            self._calls_left -= 1
            if self._calls_left != -1:
                return method(*args, **options)
            if not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            return _die_after(method(*args, **options))

        return call


async def _die_after(call: Awaitable[Any]) -> None:
    await call
    os.kill(os.getpid(), signal.SIGKILL)


def report_in(ledger: Ledger) -> Workflow[Any, Any]:
    """A workflow whose step is a line in this ledger."""

    def write() -> None:
        ledger.note("-", current_step().run_id, "write")

    async def report(ctx: Context[Any]) -> str:
        await ctx.step(write)
        return f"{ctx.scheduled_at:%Y-%m-%dT%H:%M:%SZ}"

    return Workflow("report", report)


async def pass_nights(parent: ParentPipe, generation: int, dies_at: int | None, after: bool) -> None:
    """Pass the nights that the test names: after each message an hour later, all that is due is swept.

    The one that survives says at the end of a night which runs there are, and how they stand.
    """
    while (night := await parent.receive()) is not None:
        async with store_at(night.dsn) as opened:
            store: Any = opened if dies_at is None else SelfKillingStore(opened, dies_at, after=after)
            start = datetime.fromisoformat(f"{night.day}T21:00:00").replace(tzinfo=ZoneInfo(ZONE))
            clock, report = ManualClock(start.astimezone(UTC)), report_in(Ledger(night.ledger, generation))
            runtime = Runtime(store, [report], clock=clock, concurrency=0)
            if dies_at is None:
                await runtime.schedule(report, cron="30 * * * *", tz=ZONE, id="hourly", overlap="allow")
                await runtime.schedule(report, cron="30 2 * * *", tz=ZONE, id="daily")
            parent.send("ready")
            for _ in range(HOURS):
                await parent.receive()
                clock.advance("1h")
                await runtime.sweep()
                parent.send("swept")
            await parent.receive()
            clock.advance("1m")  # past the lease of the other
            if dies_at is None:
                await runtime.sweep()
                parent.send({info.id: info.status for info in await runtime.list(limit=1000)})
            await runtime.close()
