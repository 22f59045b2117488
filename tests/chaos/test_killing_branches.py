"""The concurrency proof with real processes: killed while branches depend on each other's timing."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import times
from tests.engine.bodies import BODIES, chains, mixed_waits

ROOT = Path(__file__).parent.parent.parent
EXPECTED_CHAINS = ["<" * 3 + f"{number}:0>{number}:1>{number}:2>" for number in range(10)]


def one_life(directory: Path, body: str, seed: int, generation: int, rng: random.Random) -> None:
    """A process that is killed a moment after it began to work, unless it was done before."""
    command = [sys.executable, "-m", "tests.chaos.branches_worker", str(directory), body, str(seed), str(generation)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, errors = process.communicate(timeout=rng.random() * 0.06)
            assert process.returncode == 0, errors
        process.kill()


def recorded(directory: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(directory / "work.db")) as database:
        rows = database.execute("SELECT key FROM perdure_steps WHERE phase = '' ORDER BY seq").fetchall()
    return [key for (key,) in rows]


def seen_by(directory: Path, generation: int) -> list[tuple[str, Any]]:
    path = directory / "seen"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(key, value) for number, key, value in lines if number == generation]


@pytest.mark.parametrize("body", [body for body in BODIES if body is not mixed_waits], ids=lambda body: body.__name__)
def test_killed_processes_see_what_those_before_them_saw(body: Any, tmp_path: Path) -> None:
    lives = 0
    for seed in range(times(20)):
        directory = tmp_path / str(seed)
        directory.mkdir()
        rng, generation = random.Random(seed), 0
        before: list[tuple[str, Any]] = []
        while not (directory / "result").exists():
            generation += 1
            assert generation < 200, "it makes no progress"
            one_life(directory, body.__name__, seed, generation, rng)
            seen = seen_by(directory, generation)
            known = min(len(seen), len(before))
            assert seen[:known] == before[:known], f"seed {seed}: another order or another value than before the kill"
            kept = set(recorded(directory))
            before = max((one for one in (before, [each for each in seen if each[0] in kept])), key=len)
        if body is chains:
            assert json.loads((directory / "result").read_text()) == EXPECTED_CHAINS
        lives += generation
        keys = recorded(directory)
        assert len(keys) == len(set(keys)), "recorded twice"
    assert lives > times(20), "no kill came in time, so nothing was shown"
