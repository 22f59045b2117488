"""What is on the disk when the power goes, at every moment of everything a store can do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Final

from perdure.backends.files import FilesStore
from tests.backends.files.test_killing import check

HERE: Final = Path(__file__).parent


def test_what_was_said_survives_a_loss_of_power_at_any_moment(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.backends.files.power", str(tmp_path)]
    run = subprocess.run(command, cwd=HERE.parents[2], input="\n", capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stderr
    copies = int(run.stdout)
    assert copies > 30
    for n in range(copies):
        said = (tmp_path / str(n) / "said").read_text().splitlines()
        asyncio.run(asyncio.wait_for(check(FilesStore(tmp_path / str(n) / "runs"), said), 40))
    assert said[-1] == "deleted"
