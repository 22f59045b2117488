"""What an import statement costs a fresh interpreter: time beyond its own start, and resident memory."""

from __future__ import annotations

import asyncio
import statistics
import sys

import msgspec

from benchmarks.program import OwnTime, Program
from benchmarks.work import Work

_FRESH = """
import time
before = time.perf_counter()
{statement}
seconds = time.perf_counter() - before
import os
pages = int(open("/proc/self/statm").read().split()[1])
print([seconds, pages * os.sysconf("SC_PAGE_SIZE")])
"""


class Importing(Program):
    """A process for each import."""

    async def open(self, place: str) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""

    async def run(self, steps: int, size: int) -> None:
        """There is no run here."""
        raise NotImplementedError

    async def prepare(self, work: Work) -> None:
        """Once before, so that compiled files and the disk's cache are there."""
        await _imported(work.statement)

    async def perform(self, work: Work) -> OwnTime | None:
        """The median of a few."""
        times = [await _imported(work.statement) for _ in range(work.runs)]
        return OwnTime(statistics.median(seconds for seconds, _ in times), statistics.median_low(size for _, size in times))


async def _imported(statement: str) -> tuple[float, int]:
    command = [sys.executable, "-I", "-c", _FRESH.format(statement=statement)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{statement!r} does not work here")
    return msgspec.json.decode(printed, type=tuple[float, int])


PROGRAM = Importing()
