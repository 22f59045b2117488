"""Takes all samples: round after round, and within a round every side of every workload in turn."""

from __future__ import annotations

import asyncio
import datetime as dt
import fnmatch
import re
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from benchmarks import machine
from benchmarks.contenders import CONTENDERS
from benchmarks.places import Places
from benchmarks.processes import Processes
from benchmarks.results import Results
from benchmarks.work import Failure, Order, Work
from benchmarks.workloads import WORKLOADS, Side, Workload


class Plan(msgspec.Struct, frozen=True):
    """What of the workloads is measured, and how often."""

    rounds: int = 5
    # Patterns as for file names, of workloads.
    only: tuple[str, ...] = ("*",)
    quick: bool = False
    peers: bool = True

    def workloads(self) -> list[Workload]:
        """The workloads that are measured, with the sides that take part."""
        return [
            msgspec.structs.replace(workload, sides=self._sides(workload))
            for workload in WORKLOADS
            if any(fnmatch.fnmatch(workload.name, pattern) for pattern in self.only)
        ]

    def _sides(self, workload: Workload) -> dict[str, Side]:
        return {
            label: Side(side.contender, side.work.small() if self.quick else side.work)
            for label, side in workload.sides.items()
            if self.peers or not _is_of_peers(side)
        }


def _is_of_peers(side: Side) -> bool:
    """Also an import: of something else than perdure and what it stands on."""
    is_import = bool(side.work.statement)
    return CONTENDERS[side.contender].is_peer or (is_import and not re.search("perdure|msgspec", side.work.statement))


async def measure(plan: Plan, keep: Callable[[Results], None]) -> Results:
    """Do it, and keep the results after each round. What fails is in them, and the rest goes on.

    SIGTERM ends it without leaving a server behind.
    """
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    results = Results(
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        commit=machine.commit(),
        rounds=0,
        quick=plan.quick,
        machine=machine.machine(),
        versions=machine.versions(),
        settings=machine.settings(),
        workloads={},
    )
    processes = Processes()

    async def prepare(contender: str, place: str) -> None:
        answer = await processes.ask(contender, Order(Work(shape="prepare"), place))
        if isinstance(answer, Failure):
            _say(f"  {contender} could not prepare: {answer.reason}")

    try:
        async with Places(prepare) as places:
            for number in range(plan.rounds):
                began = time.monotonic()
                await _round(plan, number, places, processes, results)
                results.rounds += 1
                keep(results)
                _say(f"round {number + 1} of {plan.rounds} took {time.monotonic() - began:.0f} s")
    finally:
        await processes.end()
    return results


async def _round(plan: Plan, number: int, places: Places, processes: Processes, results: Results) -> None:
    await places.checkpoint()
    for workload in plan.workloads():
        counted = workload.measured == "counts"
        if counted and number:
            continue
        _say(f"round {number + 1}: {workload.name}")
        for label, side in workload.sides.items():
            place = await places.fresh(side.contender, side.work.stored)
            answer = await processes.ask(side.contender, Order(side.work, place, counted))
            await places.forget(place)
            results.add(workload, label, side, answer)
            if isinstance(answer, Failure):
                _say(f"  {workload.name}: {label} failed: {answer.reason}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
