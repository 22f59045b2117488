"""The docs tell the truth: every program in them runs, and prints what stands below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PROGRAM = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
PROGRAMS = [
    pytest.param(program, printed, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.rglob("*.md"))
    for number, (program, printed) in enumerate(PROGRAM.findall(page.read_text()), 1)
]


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_the_program_prints_what_stands_below_it(program: str, printed: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == (printed, "")
