"""The workflow of the fleet campaign, a bit of everything that a run can do, and the process that drives it.

Each call of a step is a line in a ledger, written before the step does anything: `generation drive run step`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from perdure import Context, Retry, Runtime, Workflow, current_step
from tests.backends.ledger import Ledger, Line
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe

# How many shapes a run can have; its number says which.
SHAPES: Final = 6


class Errand:
    """The steps of one drive of a run."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._drive = secrets.token_hex(4)

    def _note(self, suffix: object = "") -> None:
        info = current_step()
        self._ledger.note(self._drive, info.run_id, f"{info.key}{suffix}")

    async def fetch(self, value: int) -> int:
        self._note()
        await asyncio.sleep(0.005)
        return value

    def compute(self, value: int) -> int:
        self._note()
        time.sleep(0.005)
        return 2 * value

    async def flaky(self) -> str:
        """Fails twice."""
        self._note(f"#{current_step().attempt}")
        if current_step().attempt < 3:
            raise OSError("not yet")
        return "third time"

    async def stuck(self) -> str:
        """Hangs at first."""
        self._note(f"#{current_step().attempt}")
        if current_step().attempt == 1:
            await asyncio.sleep(60)
        return "in time"

    async def never(self) -> str:
        await asyncio.sleep(60)
        return "too late"


def errand_in(ledger: Ledger) -> Workflow[Any, Any]:
    """The workflow, whose steps write to this ledger."""

    async def errand(ctx: Context[Any], number: int) -> list[Any]:
        steps, shape = Errand(ledger), number % SHAPES
        found: list[Any] = [await ctx.step("fetch", steps.fetch, number)]
        if shape == 0:
            found.append(await ctx.step("flaky", steps.flaky, retry=Retry(attempts=3, wait_initial="5ms", wait_jitter=0)))
        elif shape == 1:
            await ctx.sleep("nap", "30ms")
        elif shape == 2:
            found.append(await ctx.wait_for_signal("word"))
        elif shape == 3:
            found += await ctx.map("each", steps.fetch, [number, number + 1, number + 2])
        elif shape == 4:
            found.append(await ctx.race(ctx.step("quick", steps.fetch, 1), ctx.step("never", steps.never)))
        else:
            retry = Retry(attempts=2, wait_initial="5ms", wait_jitter=0)
            found.append(await ctx.step("stuck", steps.stuck, timeout="50ms", retry=retry))
        found.append(await ctx.step("compute", steps.compute, number))
        return found

    return Workflow("errand", errand)


def stranded_in(ledger: Ledger, *, hangs: bool) -> Workflow[Any, Any]:
    """A workflow with one step, which may take a minute in this process."""

    async def visit() -> str:
        ledger.note("-", current_step().run_id, "visit")
        await asyncio.sleep(60 if hangs else 0)
        return "went on"

    async def stranded(ctx: Context[Any]) -> str:
        return await ctx.step(visit)

    return Workflow("stranded", stranded)


def value_of(number: int) -> list[Any]:
    """The result of a run."""
    middle: tuple[Any, ...] = (
        ("third time",), (), (f"word for {number}",), (number, number + 1, number + 2), (1,), ("in time",),
    )[number % SHAPES]  # fmt: skip
    return [number, *middle, 2 * number]


async def drive_errands(parent: ParentPipe, dsn: str, path: Path, generation: int, lease_ttl: float) -> None:
    """Drive the runs that are due until a message of the test, or until killed."""
    async with store_at(dsn) as store:
        ledger = Ledger(path, generation)
        workflows = [errand_in(ledger), stranded_in(ledger, hangs=generation == 1)]
        async with Runtime(store, workflows, concurrency=20, unload_grace="10ms", max_attempts=1000, lease_ttl=lease_ttl):
            parent.send("ready")
            await parent.receive()
    parent.send("done")


def check_errands(lines: list[Line], killed: Collection[int]) -> None:
    """A step ran once in a drive, and again only where the process that had run it was killed."""
    called: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        called[line.run, line.step].append(line)
    for (run, step), calls in called.items():
        assert len({line.drive for line in calls}) == len(calls), f"{step} of {run} ran twice in one drive: {calls}"
        unexplained = [line for line in calls[:-1] if int(line.generation) not in killed]
        assert not unexplained, f"{step} of {run} ran again although its process lived: {calls}"
