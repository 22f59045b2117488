from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.backends import conftest
from tests.backends.exercised import VARIABLE
from tests.backends.registry import BACKENDS

ROOT: Final = Path(__file__).parent.parent.parent
CONFTEST: Final = """
from tests.backends.exercised import Exercised
def pytest_configure(config):
    config.pluginmanager.register(Exercised({"one": "test_one.py", "two": "test_two.py"}))
"""
CONTRACT: Final = """
import pytest
@pytest.mark.parametrize("case", [1, 2])
def test_contract(case):
    pass
"""
PROCESSES: Final = """
import pytest
@pytest.mark.parametrize("backend", ["one", "two"])
def test_processes(backend):
    {}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "pytest.ini": "[pytest]\ntestpaths = checks\naddopts = --import-mode=importlib -p no:cacheprovider\n",
        "checks/conftest.py": CONFTEST,
        "checks/contract/test_one.py": CONTRACT,
        "checks/contract/test_two.py": CONTRACT,
        "checks/backends/test_processes.py": PROCESSES.format("pass"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project: Path, *arguments: str, requires: str = "all") -> tuple[int, list[str]]:
    """The exit status, and what was said of backends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", VARIABLE: requires}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr).splitlines()
    return done.returncode, [line for line in said if "backends exercised" in line or VARIABLE in line]


def test_what_ran_is_said(project: Path) -> None:
    assert run(project) == (0, ["backends exercised: one, two"])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("backends/test_processes.py", PROCESSES.format("if backend == 'two': pytest.skip('no server')")),
        ("backends/test_processes.py", PROCESSES.replace(', "two"', "").format("pass")),
        ("contract/test_two.py", CONTRACT.replace("    pass", "    if case == 2: pytest.skip()")),
        ("contract/test_two.py", ""),
    ],
    ids=["processes skipped", "no processes", "a case skipped", "no contract"],
)
def test_a_backend_that_was_left_out_fails_the_run_that_requires_it(project: Path, file: str, text: str) -> None:
    (project / "checks" / file).write_text(text)
    status, said = run(project)
    assert status == 1
    assert said[0] == "backends exercised: one"
    assert f"{VARIABLE} requires two too" in said[1]


@pytest.mark.parametrize("requires", ["", "one", " one,"])
def test_a_backend_that_was_left_out_is_only_not_named_where_nobody_requires_it(project: Path, requires: str) -> None:
    (project / "checks" / "contract" / "test_two.py").unlink()
    assert run(project, requires=requires) == (0, ["backends exercised: one"])


@pytest.mark.parametrize("selection", [["checks/contract"], ["-k", "one"], ["--collect-only"], ["--deselect", "checks/contract"]])
def test_a_part_of_the_tests_requires_nothing(project: Path, selection: list[str]) -> None:
    assert run(project, *selection) == (0, [])


def test_a_marker_leaves_the_run_whole(project: Path) -> None:
    assert run(project, "-m", "not chaos") == (0, ["backends exercised: one, two"])


def test_an_unknown_backend_cannot_be_required(project: Path) -> None:
    status, said = run(project, requires="one,tow")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert said == [f"ERROR: {VARIABLE} names tow; there are one, two, or write all"]


def test_every_backend_has_a_contract_suite() -> None:
    folder = Path(conftest.__file__).parent.parent / "contract"
    assert [backend.name for backend in BACKENDS.values() if not (folder / backend.contract).is_file()] == []


def test_what_ran_in_several_processes_counts(project: Path) -> None:
    assert run(project, "-p", "xdist.plugin", "-n", "2") == (0, ["backends exercised: one, two"])
    (project / "checks/contract/test_two.py").unlink()
    status, said = run(project, "-p", "xdist.plugin", "-n", "2")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert said[0] == "backends exercised: one"
