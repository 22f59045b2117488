"""Worker processes: what reaches them from other processes, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import gethostname
from typing import Final

import pytest

from perdure import Runtime
from perdure.errors import RunCancelled
from perdure.model.durations import MICROSECOND
from perdure.store import require
from tests.backends.fleet_worker import answer, busy, slow
from tests.backends.registry import LIBSQL, MONGO, MYSQL, POSTGRES, REDIS, SQLITE, Backend, by_default, on
from tests.campaign import IS_FULL

WORKER: Final = Path(__file__).with_name("fleet_worker.py")
ROOT: Final = WORKER.parents[2]
PATIENCE: Final = 60.0
# How long a worker may take to end while its store is down: it tries to give its runs back.
ENDS_WITHIN: Final = 30.0
# What may be logged when all is well. An emulated server is slow, and Ctrl-C says which steps it waits for.
HARMLESS: Final = ("LOG INFO ", "LOG WARNING the store answers slowly", "LOG WARNING worker ")
# Those whose DSN any process can open.
STORES: Final = (SQLITE, POSTGRES, MYSQL, MONGO, REDIS, LIBSQL)


@asynccontextmanager
async def worker_on(dsn: str, *arguments: str) -> AsyncIterator[Process]:
    """A worker process in Python's development mode, asyncio's debug mode included, in which every warning is an error."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-X", "dev", "-W", "error", str(WORKER), dsn, *arguments]
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


async def end_of(process: Process) -> tuple[list[str], list[str]]:
    """What a process that was told to stop says after that, and what it says on stderr. Its exit code has to be 0."""
    said, complained = await process.communicate()
    assert process.returncode == 0, complained.decode()
    return said.decode().splitlines(), complained.decode().splitlines()


async def drive_to_the_end(dsn: str) -> None:
    """Run a worker here until every run has completed."""
    async with Runtime(dsn, [busy], concurrency=50) as runtime:
        for info in await runtime.list(limit=10_000):
            run = await runtime.get(info.id)
            assert run is not None
            assert await run == 8


@on(*by_default(STORES, ["same_everywhere"]))
async def test_a_cancel_and_a_signal_reach_another_process(backend: Backend, shared_dsn: str) -> None:
    async with asyncio.timeout(PATIENCE), Runtime(shared_dsn, concurrency=0) as client, worker_on(shared_dsn) as worker:
        for lead in (0.0, 0.1, 0.7):  # a lease that is young, and one that is not
            run = await client.start(slow)
            assert await line_of(worker) == "running"
            await asyncio.sleep(lead)
            await run.cancel()
            assert await line_of(worker) == "stopped"
            with pytest.raises(RunCancelled):
                await run
        run = await client.start(answer)
        for word in ("one", "two", "three"):
            while await run.status() != "suspended":  # noqa: ASYNC110 - another process suspends it
                await asyncio.sleep(0.01)
            await run.signal("word", word)
            assert await line_of(worker) == word  # how soon is a figure of `make bench`
        await run


@on(*by_default(STORES, ["same_everywhere"]))
async def test_a_run_whose_worker_is_silent_but_renews_its_lease_is_stuck(backend: Backend, shared_dsn: str) -> None:
    """This process holds the lease, and its worker's sign of life is old. A second worker of the process is alive at first."""
    said = {"name": f"{gethostname()}/{os.getpid()}", "host": gethostname(), "pid": os.getpid(), "started_at": 1, "pause": 30.0}
    worker = json.dumps({**said, "concurrency": 1, "driven": 1}).encode()
    async with Runtime(shared_dsn, [slow], concurrency=0) as client:
        store, operators = client.store, require(client.store, "operators")
        for run_id in ("held", "free"):
            await client.start(slow, id=run_id)
        row = await store.get("held")
        assert row is not None
        leased_at = row.created_at - 100 * MICROSECOND
        claim = await store.acquire("held", 3600, due_only=False, now=leased_at)
        assert claim is not None
        await operators.put_worker("blocked", worker, now=leased_at - 30 * MICROSECOND)
        assert await client.stuck_runs() == [], "the worker may have died before it had to renew its lease"
        await store.renew([claim.lease], 3600)
        await operators.put_worker("other", worker)
        assert await client.stuck_runs() == []
        await operators.drop_worker("other")
        (stuck,) = await client.stuck_runs()
        assert stuck.id == "held"
        assert stuck.problem is not None
        assert re.fullmatch(
            r"its worker .+ gave no sign of life for \d+ s, but renews its lease: its event loop is blocked", stuck.problem
        )
        assert await client.stuck_runs(prefix="f") == []
        await store.release(claim.lease)
        assert await client.stuck_runs() == []


@on(*by_default(STORES, ["same_everywhere"]))
@pytest.mark.parametrize("arguments", [(), ("inside",)], ids=["work", "inside"])
async def test_a_worker_under_load_ends_cleanly_on_a_signal(
    backend: Backend, shared_dsn: str, arguments: tuple[str, ...]
) -> None:
    random_numbers = random.Random(f"{backend} {arguments}")
    async with Runtime(shared_dsn, concurrency=0) as client:
        for _ in range(backend.times(25)):
            await asyncio.gather(*(client.start(busy) for _ in range(60)))
            async with asyncio.timeout(PATIENCE), worker_on(shared_dsn, *arguments) as worker:
                for _ in range(random_numbers.randrange(1, 30)):
                    assert await line_of(worker) == "noted"
                worker.send_signal(random_numbers.choice([signal.SIGTERM, signal.SIGINT]))
                said, complained = await end_of(worker)
            assert [line for line in complained if not line.startswith(HARMLESS)] == []
            assert said[-1] == "left []"
            assert [info.id for info in await client.list(status="running")] == []
    await drive_to_the_end(shared_dsn)


@on(
    *(backend for backend in STORES if backend.own_server is not None and (IS_FULL or backend is REDIS))
)  # others take half a minute
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT] if IS_FULL else [signal.SIGTERM])
async def test_a_worker_whose_store_is_down_ends_cleanly_on_a_signal(backend: Backend, number: signal.Signals) -> None:
    assert backend.own_server is not None
    server = await asyncio.to_thread(backend.own_server)
    await asyncio.to_thread(server.start)
    try:
        async with Runtime(server.dsn, concurrency=0) as client:
            await asyncio.gather(*(client.start(busy) for _ in range(60)))
        async with asyncio.timeout(PATIENCE), worker_on(server.dsn) as worker:
            assert await line_of(worker) == "noted"
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(0.5)
            worker.send_signal(number)
            told_at = time.monotonic()
            said, complained = await end_of(worker)
            assert time.monotonic() - told_at < ENDS_WITHIN
        assert [line for line in complained if not line.startswith("LOG ")] == []
        assert said[-1] == "left []"
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(PATIENCE):
            await drive_to_the_end(server.dsn)
    finally:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.remove)
