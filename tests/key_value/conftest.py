"""Places that processes can share, and processes that end with their test."""

from __future__ import annotations

import functools
import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from perdure.testing.servers.s3 import shared_server

ROOT = Path(__file__).parent.parent.parent
BUCKET = "perdure-processes"

Child: TypeAlias = "subprocess.Popen[str]"
Start: TypeAlias = Callable[..., Child]


@functools.cache
def s3_options() -> dict[str, Any]:
    server = shared_server()
    server.make_bucket(BUCKET)
    return server.options()


@pytest.fixture
def s3_place() -> str:
    """An empty place in an S3 server that runs beside the tests."""
    return json.dumps({"bucket": BUCKET, "folder": secrets.token_hex(8), "options": s3_options()})


@pytest.fixture
def local_place(tmp_path: Path) -> str:
    """An empty directory."""
    return str(tmp_path / "runs")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `tests.key_value.child` with these words; what still runs at the end is killed."""
    started: list[Child] = []

    def one(*words: str) -> Child:
        command = [sys.executable, "-m", "tests.key_value.child", *words]
        started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield one
    for child in started:
        child.kill()
        child.communicate()
