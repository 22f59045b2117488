"""A process that is killed after a ctx operation returned: the operation is recorded and does not happen again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from perdure import Context, Runtime, Workflow
from tests.backends.conftest import Start
from tests.backends.ledger import Ledger, lines_of
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe
from tests.backends.registry import Backend

# Where the process is killed, and what has returned by then.
MOMENTS: Final = {
    "next line": ["charge"],
    "after blocking work": ["charge"],
    "after an at-most-once step": ["charge", "once"],
    "after a signal": ["charge", "once", "approve"],
    "after a sleep": ["charge", "once", "approve", "settle"],
    "after the last step": ["charge", "once", "approve", "settle", "left", "right", "receipt"],
}
LAST: Final = "after the last step"


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def payment(ledger: Ledger, killed: str | None) -> Workflow[Any, Any]:
    """A workflow whose steps write to the ledger, and whose process is killed at one moment of its body."""

    def reach(moment: str) -> None:
        if moment == killed:
            kill_this_process()

    def effect(step: str) -> str:
        ledger.note("-", "payment", step)
        return step

    async def charge() -> str:
        return effect("charge")

    async def body(ctx: Context[Any]) -> list[Any]:
        done: list[Any] = [await ctx.step(charge)]
        reach("next line")
        if killed == "after blocking work":
            time.sleep(0.3)  # noqa: ASYNC251 - the event loop stands still, so nothing is written in the background
            kill_this_process()
        done.append(await ctx.step("once", effect, "once", at_most_once=True))
        reach("after an at-most-once step")
        done.append(await ctx.wait_for_signal("approve"))
        reach("after a signal")
        await ctx.sleep("settle", "10ms")
        reach("after a sleep")
        done += await asyncio.gather(*(ctx.step(name, effect, name) for name in ("left", "right")))
        done.append(await ctx.step("receipt", effect, "receipt"))
        reach("after the last step")
        return done

    return Workflow("payment", body)


async def pay(pipe: ParentPipe, dsn: str, path: Path, generation: int, ttl: float, killed: str | None) -> None:
    """Start or resume the payment, and say what it came to."""
    async with store_at(dsn) as store:
        flow = payment(Ledger(path, generation), killed)
        async with Runtime(store, [flow], lease_ttl=ttl) as runtime:
            run = await runtime.start(flow, id="payment")
            await runtime.signal("payment", "approve", "yes", dedupe="once")
            pipe.send(await run)


@pytest.mark.same_everywhere
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != LAST])
def test_what_returned_before_a_kill_is_recorded_and_not_repeated(
    backend: Backend, start: Start, tmp_path: Path, moment: str
) -> None:
    check_kill(backend, start, tmp_path / "ledger", moment)


@pytest.mark.slow_stores_too
def test_all_that_returned_is_recorded_in_any_store(backend: Backend, start: Start, tmp_path: Path) -> None:
    check_kill(backend, start, tmp_path / "ledger", LAST)


def check_kill(backend: Backend, start: Start, ledger: Path, moment: str) -> None:
    """Kill a process at this moment: what had returned is in the store, and the next process repeats nothing of it."""
    with backend.place() as dsn:
        killed = start(pay, dsn, ledger, 0, backend.lease_ttl, moment)
        with pytest.raises(AssertionError, match="died"):
            killed.receive()
        recorded = asyncio.run(closed_keys(dsn))
        assert not set(MOMENTS[moment]) - set(recorded), "it returned and is not in the store"
        resumed = start(pay, dsn, ledger, 1, backend.lease_ttl, None)
        assert resumed.receive() == ["charge", "once", "yes", "left", "right", "receipt"]
        resumed.wait_for_exit()
        assert asyncio.run(closed_keys(dsn))[: len(recorded)] == recorded
    ran = Counter(line.step for line in lines_of(ledger))
    assert ran == dict.fromkeys(["charge", "once", "left", "right", "receipt"], 1)


async def closed_keys(dsn: str) -> list[str]:
    async with store_at(dsn) as store:
        return [entry.key for entry in await store.journal("payment") if entry.phase == "close"]
