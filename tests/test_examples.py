"""Every example runs, and prints what its first lines say."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

EXAMPLES: Final = Path(__file__).parent.parent / "examples"
# These have tests of their own.
ELSEWHERE: Final = frozenset({"cpu_steps.py", "demo.py", "push_store.py", "json_logging.py", "queues.py"})


def run(name: str, directory: Path) -> str:
    """What the example prints."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=60)
    # Python prints warnings of loggers that have no handler, and the attempts that fail in an example are logged as such.
    told = [line for line in done.stderr.splitlines() if ", and is tried again in " not in line]
    assert (done.returncode, told) == (0, [])
    return done.stdout


def announced(name: str) -> str:
    """What its first lines say that it prints."""
    gc.collect()  # and not while the source is parsed: what earlier tests left behind may parse, too (gh-106905)
    text = inspect.cleandoc(ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))) or "")
    return inspect.cleandoc(text.rpartition(":\n\n    ")[2]).replace("\n    ", "\n") + "\n"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ELSEWHERE))
def test_the_example_prints_what_it_announces(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path) == announced(name)


def test_the_limits_of_queues_hold(tmp_path: Path) -> None:
    *letters, most, rate, queue = run("queues.py", tmp_path).splitlines()
    assert len(letters) == 13
    assert (most, rate) == ("at most 2 at once, 1 to one customer", "no faster than 20 a second: True")
    assert queue == "Queue(name='mail', concurrency=10, per_key=None, rate=None)"


def test_log_records_are_json_with_the_fields_of_the_run(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run("json_logging.py", tmp_path).splitlines()]
    shown = [f"{line['level']} {line['run_id']} {line['workflow']}: {line['message']}" for line in lines if "run_id" in line]
    assert shown == announced("json_logging.py").splitlines()
    assert all(line["worker"] for line in lines if "worker" in line)


def test_the_demo_repeats_only_the_step_that_was_killed(tmp_path: Path) -> None:
    ran = [
        line.split(maxsplit=2) for line in run("demo.py", tmp_path).partition("What really ran")[2].splitlines() if " x " in line
    ]
    assert [(count, text.split(" (")[0]) for count, _, text in ran if count != "1"] == [("2", "reserve cup")]
    assert len(ran) == 5


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_an_example_that_is_left_out_here_is_named_by_another_test(name: str) -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py"))
    assert tests.count(f'"{name}"') > 1
