"""Real workers on one directory, killed with SIGKILL at random moments of their work."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from perdure.stores.files_store import FilesStore
from tests.campaign import times
from tests.chaos.test_killing_workers import check_ledger, interrupted, ledger_of

WORKER = Path(__file__).parent / "worker.py"


def worker(directory: Path, generation: int, runs: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), "runs", "ledger", str(generation), str(runs)]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", line + process.communicate()[1]


def test_no_kill_loses_repeats_or_strands_anything(tmp_path: Path) -> None:
    kills, generation, hits = times(100), 0, 0
    rng = random.Random(kills)
    while generation < kills:
        directory = tmp_path / str(generation)
        directory.mkdir()
        for _ in range(min(5, kills - generation)):
            generation += 1
            process = worker(directory, generation, runs=12)
            if rng.random() < 0.8:
                wait_until_ready(process)
            time.sleep(rng.random() * 0.12)
            process.kill()
            process.communicate()
        said, complaints = worker(directory, generation + 1, runs=12).communicate(timeout=50)
        assert said.endswith("done\n"), complaints
        check(FilesStore(directory / "runs"), 12)
        check_ledger(ledger_of(directory))
        hits += interrupted(directory)
    assert hits > 0, "the kills missed the work, so nothing was shown"


def test_workers_side_by_side_run_each_step_once(tmp_path: Path) -> None:
    processes = [worker(tmp_path, generation, runs=10) for generation in range(3)]
    for process in processes:
        said, complaints = process.communicate(timeout=50)
        assert said.endswith("done\n"), complaints
    check(FilesStore(tmp_path / "runs"), 10)
    assert set(Counter((run, step) for _, run, step in ledger_of(tmp_path)).values()) == {1}


def check(store: FilesStore, runs: int) -> None:
    async def look() -> None:
        assert await store.count(status="completed") == await store.count() == runs
        for line in await store.list():
            keys = [entry.key for entry in await store.journal(line.id) if entry.phase == "close"]
            assert len(set(keys)) == len(keys), "recorded twice"

    asyncio.run(look())
