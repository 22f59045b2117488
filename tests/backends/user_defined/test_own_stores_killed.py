"""Processes that share a user's own store are killed again and again, and what was saved counts for those that come after."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from tests.campaign import times

WORKER = Path(__file__).parent / "own_worker.py"
ROOT = Path(__file__).parents[3]
RUNS = 6
LAST = 5


class Worker:
    def __init__(self, directory: Path) -> None:
        command = [sys.executable, str(WORKER), str(directory / "own.db"), str(directory / "ledger"), str(RUNS)]
        environment = {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", line + self.process.communicate()[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def finish(self) -> None:
        out, err = self.process.communicate(timeout=90)
        assert out.endswith("done\n"), f"exit code {self.process.returncode}: {err}"


@pytest.mark.parametrize("at_once", [1, 2])
def test_no_kill_loses_or_repeats_what_was_saved(tmp_path: Path, at_once: int) -> None:
    kills = times(100)
    rng = random.Random(kills + at_once)
    killed = batch = repeated = 0
    while killed < kills:
        directory = tmp_path / str(batch)
        directory.mkdir()
        for _ in range(min(5, kills - killed)):
            workers = [Worker(directory) for _ in range(at_once)]
            for worker in workers:
                worker.wait_until_ready()
            time.sleep(rng.random() * 0.15)
            for worker in workers:
                worker.kill()
            killed += 1
        last = [Worker(directory) for _ in range(at_once)]
        for worker in last:
            worker.finish()
        repeated += check(directory)
        batch += 1
    assert repeated <= killed * at_once * RUNS, "more than what was in flight ran again"


def check(directory: Path) -> int:
    with closing(sqlite3.connect(directory / "own.db")) as database:
        stood = dict(database.execute("SELECT id, status FROM runs"))
        assert stood == {f"run{number}": "completed" for number in range(RUNS)}
    # Once a step has run, the one before it was saved, and must never run again.
    furthest: dict[str, int] = defaultdict(lambda: -1)
    repeated = 0
    for run, step in (line.split(" ") for line in (directory / "ledger").read_text().splitlines()):
        assert furthest[run] <= int(step) <= furthest[run] + 1, f"{run} ran step {step} after {furthest[run]}"
        repeated += int(step) == furthest[run]
        furthest[run] = int(step)
    assert set(furthest.values()) == {LAST}
    return repeated
