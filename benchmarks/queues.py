"""Runs that are queued by one process and worked on by others: how many a second, and how soon the first step begins.

A contender's process is the client here, and starts worker processes of its own (`benchmarks.queue_worker`). They have connected
before they are told to begin. Linux has one monotonic clock for all processes, so what they report can be compared.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from abc import abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from benchmarks.program import OwnTime, Program
from benchmarks.work import Work

_ROOT: Final = Path(__file__).parent.parent
_READY_SECONDS: Final = 60
# Lets a queue come to rest between two runs whose first step is waited for.
_PAUSE_SECONDS: Final = 0.05


class Progress(msgspec.Struct, frozen=True):
    """What one worker, or all of them, have done: how many runs; when the first began; when a step last began and a run ended."""

    count: int = 0
    first_at: float = float("inf")
    begun_at: float = 0.0
    ended_at: float = 0.0


class Stopwatch:
    """Counts the runs of a worker process: what it works on calls these."""

    def __init__(self) -> None:
        self.progress = Progress()

    def begin_step(self) -> None:
        """A step has begun."""
        now = time.monotonic()
        first_at = min(self.progress.first_at, now)
        self.progress = msgspec.structs.replace(self.progress, first_at=first_at, begun_at=now)

    def end_run(self) -> None:
        """The body of a run is at its end."""
        self.progress = msgspec.structs.replace(self.progress, count=self.progress.count + 1, ended_at=time.monotonic())


stopwatch: Final = Stopwatch()


class QueueProgram(Program):
    """One library as a queue: `open` and `enqueue` are for the client, `open_worker` and `work` for the worker processes."""

    _place = ""

    @abstractmethod
    async def enqueue(self, runs: int) -> None:
        """Put so many one-step runs into the queue."""

    @abstractmethod
    async def open_worker(self, place: str) -> None:
        """Be ready to work on what is queued there, but do not begin."""

    @abstractmethod
    async def work(self) -> None:
        """Work until the process ends."""

    async def run(self, steps: int, size: int) -> None:
        """A queue has no run that its client drives."""
        raise NotImplementedError

    async def prepare(self, work: Work) -> None:
        """Fill the queue before the time begins."""
        if work.shape == "queued":
            await self.enqueue(work.runs)

    async def perform(self, work: Work) -> OwnTime | None:
        """The work, timed by the workers: the start of their processes is not in it."""
        match work.shape:
            case "queued":
                return await self._work_off(work)
            case "first step":
                return await self._wait_for_first_steps(work.runs)
            case _:
                return None

    async def _work_off(self, work: Work) -> OwnTime:
        """From the beginning of the first run to the end of the last."""
        async with Fleet(self, self._place, work.workers) as fleet:
            fleet.begin()
            done = await fleet.wait_for(work.runs)
        return OwnTime(done.ended_at - done.first_at)

    async def _wait_for_first_steps(self, runs: int) -> OwnTime:
        """The times from the call that queues a run until its step begins, added up. The worker has nothing else to do."""
        total = 0.0
        async with Fleet(self, self._place, 1) as fleet:
            fleet.begin()
            await self.enqueue(1)
            await fleet.wait_for(1)
            for n in range(runs):
                await asyncio.sleep(_PAUSE_SECONDS)
                queued_at = time.monotonic()
                await self.enqueue(1)
                total += (await fleet.wait_for(n + 2)).begun_at - queued_at
        return OwnTime(total)


class Fleet:
    """Worker processes of a program. They end with the context, or with this process."""

    def __init__(self, program: QueueProgram, place: str, workers: int) -> None:
        self._module = type(program).__module__
        self._place = place
        self._progress = [Progress()] * workers
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.queue_worker", self._module, self._place]
        for _ in self._progress:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=_ROOT, env={**os.environ, "PYTHONPATH": "."},
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            self._processes.append(process)
        async with asyncio.timeout(_READY_SECONDS):
            for process in self._processes:
                await _line(process)
        self._readers = [asyncio.create_task(self._read(nth)) for nth in range(len(self._processes))]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def begin(self) -> None:
        """Let all of them work."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write(b"begin\n")

    async def wait_for(self, runs: int) -> Progress:
        """What they have done, as soon as that is so many runs. Raises the error of a worker that has ended."""
        while (done := self._sum()).count < runs:
            self._changed.clear()
            await self._changed.wait()
            for reader in self._readers:
                if reader.done():
                    reader.result()
        return done

    def _sum(self) -> Progress:
        return Progress(
            sum(each.count for each in self._progress),
            min(each.first_at for each in self._progress),
            max(each.begun_at for each in self._progress),
            max(each.ended_at for each in self._progress),
        )

    async def _read(self, nth: int) -> None:
        try:
            while True:
                self._progress[nth] = msgspec.json.decode(await _line(self._processes[nth]), type=Progress)
                self._changed.set()
        finally:
            self._changed.set()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    line = b"" if process.stdout is None else await process.stdout.readline()
    if not line:
        raise RuntimeError("a worker process has ended; its last words are in the log")
    return line
