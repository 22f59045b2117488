"""A forked child runs plain steps, on each store: it has none of its parent's threads, and starts its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

from tests.backends.registry import BACKENDS, Backend

# Not S3: obstore has threads of its own, on which a forked child waits for ever. And not the slow server of MongoDB, whose store
# has no other threads than that of MySQL, and is forked in `test_handles`.
FORKED: Final = [backend for backend in BACKENDS.values() if backend.pace < 4]
# Those whose connections are opened by the store, not borrowed: a program may make its runtime before it forks.
WITH_DSN: Final = [backend for backend in FORKED if not backend.name.startswith("sql_client")]


def child_of(job: str, dsn: str) -> str:
    """How the child of `forking.py` ended, and what both processes complained of."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.backends.forking", job, dsn]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    return done.stdout + done.stderr


@pytest.mark.parametrize("backend", FORKED, ids=str, scope="session")
@pytest.mark.parametrize("job", ["fork", "fork_by_multiprocessing"])
def test_plain_steps_of_a_forked_child_run(backend: Backend, shared_dsn: str, job: str) -> None:
    assert child_of(job, shared_dsn) == "child ended with 0\n"


@pytest.mark.parametrize("backend", WITH_DSN, ids=str, scope="session")
def test_a_runtime_can_be_used_on_both_sides_of_a_fork(backend: Backend, shared_dsn: str) -> None:
    assert child_of("share_runtime", shared_dsn) == "child ended with 0\n"
