"""What figures were made on and with."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.contenders import DISTRIBUTIONS
from benchmarks.places import SETTINGS


def machine() -> dict[str, str]:
    """The computer, and how busy it was when this was asked."""
    return {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def versions() -> dict[str, str]:
    """The libraries that take part, those that are installed."""
    found = {"SQLite": sqlite3.sqlite_version}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def settings() -> dict[str, str]:
    """How durable everybody is."""
    return {"SQLite": "journal_mode=WAL synchronous=FULL", "PostgreSQL": " ".join(("fsync=on", *SETTINGS))}


def commit() -> str:
    """The commit that was measured, with a word when files differ from it."""
    command = ["git", "-c", "safe.directory=*", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603 - constants
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    """Its name, which only Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
