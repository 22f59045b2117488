"""The page about writing a store says what the suite asks, word for word."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from perdure.store import Store
from perdure.testing import contract
from perdure.testing.contract import PARTS, all_cases
from perdure.testing.contract.pages import BEGIN, END, promises, with_promises, write_promises

MY_STORE = """
from perdure.backends.sqlite import SQLiteStore


class MyStore(SQLiteStore):
    capabilities = frozenset({"shared", "durable"})

    def __init__(self, path, *, prefix):
        super().__init__(f"{path}/runs.db", prefix=prefix)
"""
PAGE = Path(__file__).parent.parent.parent / "docs" / "writing-a-store.md"


def test_the_page_is_what_the_suite_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_promises(text) == text, "run: python -m perdure.testing.contract docs/writing-a-store.md"


def test_every_promise_is_on_the_page_once_with_its_sentence() -> None:
    lines = promises().splitlines()
    for case in all_cases():
        found = [line for line in lines if line.endswith(f"(`{case.name}`)")]
        assert len(found) == 1
        assert found[0].startswith(f"- {case.sentence}")
    assert sum(line.startswith("### ") for line in lines) == len(PARTS)


def test_the_example_of_the_suite_runs(tmp_path: Path) -> None:
    """With a store in an SQLite file that announces what the example declares."""
    example = textwrap.dedent("\n".join(re.findall(r"^(?: {4}.*)?$", str(contract.__doc__), re.MULTILINE)))
    (tmp_path / "test_my_store.py").write_text(example)
    (tmp_path / "my_store.py").write_text(MY_STORE)
    ask = "get_gives_the_row_or_none or a_closed_store_refuses_every_verb or a_store_declares_what_its_factory_declares"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", ask, "test_my_store.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_a_stale_page_is_brought_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nsomething old\n{END}\nafter\n")
    write_promises(page)
    assert page.read_text() == f"before\n{BEGIN}\n\n{promises()}\n{END}\nafter\n"


def test_a_page_without_a_place_for_them_is_refused() -> None:
    with pytest.raises(ValueError, match="has no place for the promises"):
        with_promises("# Something else")


def test_one_command_prints_them() -> None:
    done = subprocess.run([sys.executable, "-m", "perdure.testing.contract"], capture_output=True, text=True, check=True)
    assert done.stdout == promises()


def test_the_page_lists_every_member_of_the_core() -> None:
    core = PAGE.read_text(encoding="utf-8").partition("## A store with leases: the core")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| \d\. [^|]+ \| ([^|]+) \|", core, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(name for name in vars(Store) if not name.startswith("_"))
