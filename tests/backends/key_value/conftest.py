"""A place for processes, and processes that end with their test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[3]

Child: TypeAlias = "subprocess.Popen[str]"
Start: TypeAlias = Callable[..., Child]


@pytest.fixture
def place(tmp_path: Path) -> str:
    """An empty directory."""
    return str(tmp_path / "runs")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `tests.backends.key_value.child` with these words; what still runs at the end is killed."""
    started: list[Child] = []

    def one(*words: str) -> Child:
        command = [sys.executable, "-m", "tests.backends.key_value.child", *words]
        started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield one
    for child in started:
        child.kill()
        child.communicate()
