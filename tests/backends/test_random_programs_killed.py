"""The random programs of `tests/fuzz` in worker processes that are killed: every attempt goes the same way on real stores too."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from tests.backends.registry import POSTGRES, SQLITE, Backend, on
from tests.campaign import IS_FULL
from tests.fuzz.killed import TOGETHER

# Tests of tests/fuzz have smaller seeds.
FIRST: Final = 1_000_000
PROGRAMS: Final = 1_000 if IS_FULL else TOGETHER
# The programs of one test.
PART: Final = 10 * TOGETHER


@on(SQLITE, POSTGRES)
@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, PART))
def test_every_attempt_goes_the_same_way_however_often_workers_are_killed(
    backend: Backend, dsn: str, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    last = min(first + PART, FIRST + PROGRAMS)
    options = ["--kills", "--dsn", dsn]
    command = [sys.executable, "-m", "tests.fuzz", str(first), str(last), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with capsys.disabled():
        print(f"\n{backend}: {done.stdout.splitlines()[-1:]}")
    assert done.returncode == 0, done.stdout + done.stderr
