"""The README tells the truth: its program prints what it says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_pasted_into_a_file_runs_as_printed(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    session = re.findall(r"```console\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "shop.py").write_text(program)
    for command, expected in re.findall(r"^\$ python (.*)\n((?:[^$].*\n)*)", session, re.MULTILINE):
        printed = subprocess.run(
            [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
        )
        assert printed.stdout == expected
        assert printed.stderr == ""
