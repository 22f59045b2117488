"""The contenders' processes, from the side that gives the orders."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Final

import msgspec

from benchmarks.contenders import CONTENDERS
from benchmarks.work import Answer, Failure, Order

# Nothing here takes longer than some seconds. A contender that hangs is ended, and its failure is in the table.
LIMIT_SECONDS: Final = 180
_ANSWERS: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)
_ROOT: Final = Path(__file__).parent.parent


class Processes:
    """A process for each contender, started with its first order and kept until the end."""

    def __init__(self) -> None:
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._logs: dict[str, IO[bytes]] = {}

    async def ask(self, name: str, order: Order) -> Answer:
        """The contender's answer. Its last words when it has none."""
        if name not in self._processes:
            self._processes[name] = await self._started(name)
        process = self._processes[name]
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a contender's process has no pipes")
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), LIMIT_SECONDS)
        except TimeoutError:
            await self._end(name)
            return Failure(f"gave no answer in {LIMIT_SECONDS} seconds")
        if not line:
            return Failure(f"ended without an answer: {await self._end(name)}")
        return _ANSWERS.decode(line)

    async def end(self) -> None:
        """End them all."""
        for name in list(self._processes):
            await self._end(name)

    async def _started(self, name: str) -> asyncio.subprocess.Process:
        self._logs[name] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.worker", CONTENDERS[name].module, cwd=_ROOT, env={**os.environ, "PYTHONPATH": "."},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=self._logs[name],
        )  # fmt: skip

    async def _end(self, name: str) -> str:
        """End one and give its last words."""
        process, log = self._processes.pop(name), self._logs.pop(name)
        if process.returncode is None:
            process.kill()
        await process.wait()
        return await asyncio.to_thread(_last_words, log)


def _last_words(log: IO[bytes]) -> str:
    with log:
        log.seek(0)
        return log.read().decode(errors="replace").strip()[-500:]
