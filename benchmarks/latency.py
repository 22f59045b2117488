"""How long a signal and a cancel take to reach another process: `python -m benchmarks.latency [--quick] [store ...]`.

A worker process drives runs. This process signals one that is suspended, and cancels one whose step runs, and takes the time
from the call until the worker says that the step after the signal runs, or that the cancelled one was stopped. Both wait a
random while before the call, so that a store which is polled is asked at any moment between two polls.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from perdure import Runtime
from tests.backends import fleet_worker
from tests.backends.registry import LIBSQL, MONGO, MYSQL, POSTGRES, REDIS, SQLITE, Backend
from tests.servers.process import ServerMissing

ROOT: Final = Path(__file__).parent.parent
STORES: Final = {backend.name: backend for backend in (SQLITE, POSTGRES, REDIS, MONGO, MYSQL, LIBSQL)}
# Seconds. SQLite has no notifications, but a worker looks every 50 ms whether the file has changed.
GOALS: Final = {"postgres": 0.05, "redis": 0.05, "mongo": 0.05}
GOAL_ELSEWHERE: Final = 1.0
# MongoDB's server is emulated here: its figures are reported, and compared with no goal.
EMULATED: Final = "mongo"
LONGEST_LEAD: Final = 1.2
LIMIT_SECONDS: Final = 120.0


class Latencies(NamedTuple):
    """Seconds, one for each time."""

    signals: list[float]
    cancels: list[float]


async def measure(dsn: str, times: int) -> Latencies:
    """Signal and cancel so many times, in turn."""
    found, leads = Latencies([], []), random.Random(times)  # noqa: S311 - to spread out, not to hide
    async with Runtime(dsn, concurrency=0) as client, _worker_on(dsn) as worker:
        for _ in range(times):
            run = await client.start(fleet_worker.answer)
            while await run.status() != "suspended":  # noqa: ASYNC110 - another process suspends it
                await asyncio.sleep(0.01)
            await asyncio.sleep(leads.uniform(0, LONGEST_LEAD))
            began = time.perf_counter()
            await run.signal("word", "heard")
            await _expect(worker, "heard")
            found.signals.append(time.perf_counter() - began)
            await run.cancel()

            run = await client.start(fleet_worker.slow)
            await _expect(worker, "running")
            await asyncio.sleep(leads.uniform(0, LONGEST_LEAD))
            began = time.perf_counter()
            await run.cancel()
            await _expect(worker, "stopped")
            found.cancels.append(time.perf_counter() - began)
    return found


@asynccontextmanager
async def _worker_on(dsn: str) -> AsyncIterator[Process]:
    command = [sys.executable, str(fleet_worker.__file__), dsn]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL, env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _expect(worker: Process, word: str) -> None:
    if worker.stdout is None:
        raise RuntimeError("the worker has no pipe")
    said = (await worker.stdout.readline()).decode().strip()
    if said != word:
        raise RuntimeError(f"the worker said {said!r} instead of {word!r}")


async def _measure_in_time(dsn: str, times: int) -> Latencies:
    async with asyncio.timeout(LIMIT_SECONDS):
        return await measure(dsn, times)


def rows_of(backend: Backend, times: int) -> list[list[str]]:
    """The lines of a store in the table."""
    goal = GOALS.get(backend.name, GOAL_ELSEWHERE)
    try:
        with backend.place() as dsn:
            found = asyncio.run(_measure_in_time(dsn, times))
    except (ImportError, ServerMissing) as missing:
        return [[backend.name, "signal and cancel", "not measured", str(missing).partition("\n")[0], "", ""]]
    return [_row(backend.name, what, goal, seconds) for what, seconds in zip(("signal", "cancel"), found, strict=True)]


def _row(store: str, what: str, goal: float, seconds: list[float]) -> list[str]:
    median, least, most = (1000 * figure for figure in (statistics.median(seconds), min(seconds), max(seconds)))
    verdict = "emulated server" if store == EMULATED else "met" if median <= 1000 * goal else "**not met**"
    return [store, what, f"{median:,.0f}", f"{least:,.0f} to {most:,.0f}", f"{1000 * goal:,.0f}", verdict]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("store", nargs="*", choices=[*STORES, []], help="all by default")
    parser.add_argument("--quick", action="store_true", help="three times each: shows that it works, and nothing else")
    asked = parser.parse_args()
    print("### Signal and cancel to another process\n")
    _print_row(["store", "what", "median ms", "least to most", "goal", ""])
    _print_row(["---"] * 6)
    for name in asked.store or STORES:
        for row in rows_of(STORES[name], 3 if asked.quick else 11):
            _print_row(row)


def _print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
