"""A store on a temporary file, and processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from perdure.backends.sqlite import SQLiteStore

CHILD: Final = Path(__file__).parent / "child.py"

Process: TypeAlias = subprocess.Popen[str]
Start: TypeAlias = Callable[..., Process]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def store(path: Path) -> SQLiteStore:
    """Not closed: dropping it gives everything back."""
    return SQLiteStore(path)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `child.py` with a job, up to its "ready"; what still runs at the end is killed."""
    started: list[Process] = []

    def start(*arguments: object, ready: bool = True, under: tuple[str, ...] = ()) -> Process:
        command = [
            *under,
            sys.executable,
            "-W",
            "default",
            "-W",
            "ignore:This process:DeprecationWarning",
            str(CHILD),
            *map(str, arguments),
        ]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        if ready:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def go(process: Process) -> None:
    """Let the process go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def end_of(process: Process) -> str:
    """Let the process go on to its end, which must be a good one, and give what it said."""
    said, complaints = process.communicate("\n", timeout=60)
    assert (process.returncode, complaints) == (0, "")
    return said
