"""Worker processes: what reaches them from other processes, and how they end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from perdure import Runtime
from perdure.errors import RunCancelled
from tests.backends.fleet_worker import busy, slow
from tests.backends.registry import FILES, MYSQL, POSTGRES, REDIS, SQLITE, Backend, on
from tests.campaign import times

WORKER: Final = Path(__file__).with_name("fleet_worker.py")
ROOT: Final = WORKER.parents[2]
PATIENCE: Final = 60.0


@asynccontextmanager
async def worker_on(dsn: str, *arguments: str) -> AsyncIterator[Process]:
    """A worker process in which every warning is an error, and asyncio is in debug mode."""
    env = {**os.environ, "PYTHONASYNCIODEBUG": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(WORKER), dsn, *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


@on(SQLITE, POSTGRES)
async def test_a_cancel_reaches_a_step_in_another_process_soon(backend: Backend, shared_dsn: str) -> None:
    async with asyncio.timeout(PATIENCE), Runtime(shared_dsn, concurrency=0) as client, worker_on(shared_dsn) as worker:
        for lead in (0.0, 1.0):  # a lease that is young, and one that is not
            run = await client.start(slow)
            assert await line_of(worker) == "running"
            await asyncio.sleep(lead)
            cancelled_at = time.monotonic()
            await run.cancel()
            assert await line_of(worker) == "stopped"
            assert time.monotonic() - cancelled_at < 2
            with pytest.raises(RunCancelled):
                await run


@on(SQLITE, POSTGRES, REDIS, MYSQL, FILES)
@pytest.mark.parametrize("arguments", [(), ("inside",)], ids=["work", "inside"])
async def test_a_worker_under_load_ends_cleanly_on_a_signal(
    backend: Backend, shared_dsn: str, arguments: tuple[str, ...]
) -> None:
    random_numbers = random.Random(f"{backend} {arguments}")
    async with Runtime(shared_dsn, concurrency=0) as client:
        for _ in range(times(25)):
            await asyncio.gather(*(client.start(busy) for _ in range(60)))
            async with asyncio.timeout(PATIENCE), worker_on(shared_dsn, *arguments) as worker:
                for _ in range(random_numbers.randrange(1, 30)):
                    assert await line_of(worker) == "noted"
                worker.send_signal(random_numbers.choice([signal.SIGTERM, signal.SIGINT]))
                said, complained = await worker.communicate()
            assert [line for line in complained.decode().splitlines() if not line.startswith("LOG INFO ")] == []
            assert worker.returncode == 0
            assert said.decode().splitlines()[-1] == "left"
            assert [info.id for info in await client.list(status="running")] == []
