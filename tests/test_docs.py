"""The docs tell the truth: every program in them runs, and prints what stands below it; what they point to is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(DOCS.rglob("*.md"))
PROGRAM: Final = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
FENCED: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK: Final = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)")
# README once denied four features that were there.
MISSING: Final = re.compile(r"not\s+in\s+this\s+version|not\s+there\s+yet|has\s+room\s+for", re.IGNORECASE)
ROWS: Final = Path(__file__).parent / "snapshots" / "test_coming_from.py"
PROGRAMS: Final = [
    pytest.param(program, printed, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (program, printed) in enumerate(PROGRAM.findall(page.read_text()), 1)
]


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_the_program_prints_what_stands_below_it(program: str, printed: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    # Python prints warnings of loggers that have no handler, and the attempts that fail in a program are logged as such.
    told = [line for line in done.stderr.splitlines() if ", and is tried again in " not in line]
    assert (done.stdout, told) == (printed, [])


def test_no_block_of_python_or_output_escapes_the_programs() -> None:
    fences = {page.stem: len(re.findall(r"^ *```(?:python|text)", page.read_text(), re.MULTILINE)) for page in PAGES}
    run = {page.stem: sum(1 + bool(out) for _, out in PROGRAM.findall(page.read_text())) for page in PAGES}
    assert fences == run


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    found = [((page.parent / name).resolve() if name else page, heading) for name, heading in LINK.findall(text)]
    assert [target for target, _ in found if not target.exists()] == []
    assert [(target, heading) for target, heading in found if heading and heading not in _headings(target)] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_no_page_lists_what_is_missing(page: Path) -> None:
    assert MISSING.findall(page.read_text()) == []


def _headings(page: Path) -> set[str]:
    """The headings of a page as they are linked to."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_coming_from_names_every_row_that_is_tested_and_no_other() -> None:
    tested = {
        node.name
        for node in ast.parse(ROWS.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }
    named = re.findall(r"\[`(test_\w+)`\]\(\.\./tests/snapshots/test_coming_from\.py\)", (DOCS / "coming-from.md").read_text())
    assert len(set(named)) == len(named)
    assert set(named) <= tested
    assert {name for name in tested if name.startswith("test_row_")} <= set(named)
