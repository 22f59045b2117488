"""The ten-thousandth step costs what the hundredth did."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "growing_run.py"


def cost(directory: Path, steps: int) -> dict[str, float]:
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, SCRIPT, "work.db", str(steps)], cwd=directory, capture_output=True, text=True, check=True, timeout=300
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def test_bytes_and_processor_time_per_step_do_not_grow_with_the_run(tmp_path: Path) -> None:
    short, long = ([cost(tmp_path / f"{steps}-{n}", steps) for n in range(3)] for steps in (100, 10_000))
    assert _median(long, "bytes") <= 1.3 * _median(short, "bytes")
    assert _median(long, "seconds") <= 1.5 * _median(short, "seconds")


def _median(costs: list[dict[str, float]], what: str) -> float:
    return statistics.median(each[what] for each in costs)
