"""Child processes that run `disk_child.py` on a store on the disk, under strace if a test wants system calls to fail.

Unlike those of `processes` they are children of the test itself: one that was killed stays a zombie until the test reaps it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

PROGRAM: Final = Path(__file__).parent / "disk_child.py"
STRACE: Final = ("strace", "-f", "-qq", "-o", os.devnull, "-e")

Process: TypeAlias = subprocess.Popen[str]
StartChild: TypeAlias = Callable[..., Process]


def start(*arguments: object, under: tuple[str, ...] = ()) -> Process:
    """A process that does a job of `disk_child.py`, started by the command `under` if there is one."""
    quiet = ("-W", "default", "-W", "ignore:This process:DeprecationWarning")
    command = [*under, sys.executable, *quiet, str(PROGRAM), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def wait_until_ready(process: Process) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


def go(process: Process) -> None:
    """Let the process go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def run_to_end(process: Process) -> str:
    """What the process says until its end, which it must reach without an error or a warning."""
    said, complaints = process.communicate("\n", timeout=60)
    assert (process.returncode, complaints) == (0, "")
    return said


async def kill_unreaped(process: Process) -> None:
    """Kill the process and leave it a zombie."""
    process.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def integrity(path: Path) -> str:
    """What SQLite says of a database file: "ok" if it is sound."""
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA integrity_check").fetchall()[0][0])
    finally:
        connection.close()
