from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.backends import conftest, exercised
from tests.backends.exercised import VARIABLE
from tests.backends.registry import BACKENDS

pytest_plugins = ["pytester"]

ROOT: Final = Path(__file__).parent.parent.parent
CONFTEST: Final = """
from tests.backends.exercised import Exercised
def pytest_configure(config):
    contracts = {"one": "test_one.py::test_contract", "two": "test_two.py::test_contract"}
    config.pluginmanager.register(Exercised(contracts, left_to_chaos=[], sampled=[]))
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


FILES: Final = {
    "pytest.ini": "[pytest]\ntestpaths = checks\naddopts = --import-mode=importlib -p no:cacheprovider\nmarkers = chaos\n",
    "checks/conftest.py": CONFTEST,
    "checks/contract/test_one.py": CONTRACT,
    "checks/contract/test_two.py": CONTRACT,
    "checks/backends/test_processes.py": PROCESSES.format("pass"),
}


class Project:
    """A small project with two backends. It is run in this process, which is a lot faster, unless it has several of its own."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester, self._monkeypatch = pytester, monkeypatch
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        for file, text in FILES.items():
            self.write(file, text)

    def write(self, file: str, text: str) -> None:
        path = self._pytester.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def remove(self, file: str) -> None:
        (self._pytester.path / file).unlink()

    def run(self, *arguments: str, requires: str = "all", is_full: bool = False) -> tuple[int, list[str]]:
        """The exit status, and what was said of backends."""
        self._monkeypatch.setenv(VARIABLE, requires)
        self._monkeypatch.setattr(exercised, "IS_FULL", is_full)
        run = self._pytester.runpytest_subprocess if "-n" in arguments else self._pytester.runpytest_inprocess
        done = run(*arguments)
        said = [*done.outlines, *done.errlines]
        return int(done.ret), [line for line in said if "backends exercised" in line or VARIABLE in line]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(pytester, monkeypatch)


def test_what_ran_is_said(project: Project) -> None:
    assert project.run() == (0, ["backends exercised: one, two"])


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
def test_a_backend_that_was_left_out_fails_the_run_that_requires_it(project: Project, file: str, text: str) -> None:
    project.write(f"checks/{file}", text)
    status, said = project.run()
    assert status == pytest.ExitCode.USAGE_ERROR
    assert said[0] == "backends exercised: one"
    assert f"{VARIABLE} requires two too" in said[1]


@pytest.mark.parametrize("requires", ["", "one", " one,"])
def test_a_backend_that_was_left_out_is_only_not_named_where_nobody_requires_it(project: Project, requires: str) -> None:
    project.remove("checks/contract/test_two.py")
    assert project.run(requires=requires) == (0, ["backends exercised: one"])


@pytest.mark.parametrize("selection", [["checks/contract"], ["-k", "one"], ["--collect-only"], ["--deselect", "checks/contract"]])
def test_a_part_of_the_tests_requires_nothing(project: Project, selection: list[str]) -> None:
    assert project.run(*selection) == (0, [])


def test_a_marker_leaves_the_run_whole(project: Project) -> None:
    assert project.run("-m", "not chaos") == (0, ["backends exercised: one, two"])


def test_contract_suites_in_one_file_are_told_apart(project: Project) -> None:
    project.write("checks/conftest.py", CONFTEST.replace("two.py::test_contract", "one.py::test_two"))
    project.write("checks/contract/test_one.py", f"{CONTRACT}\ndef test_two():\n    pytest.skip()\n")
    assert project.run(requires="") == (0, ["backends exercised: one"])


@pytest.fixture
def slow(project: Project) -> Project:
    """Where the contract suite of the second backend is left to `make chaos`."""
    project.write("checks/conftest.py", CONFTEST.replace("chaos=[]", 'chaos=["two"]'))
    project.write("checks/contract/test_two.py", f"{CONTRACT}\npytestmark = pytest.mark.chaos\n")
    return project


def test_a_contract_suite_that_is_left_to_chaos_is_named(slow: Project) -> None:
    said = ["backends exercised: one, two (its contract suite in make chaos only)"]
    assert slow.run("-m", "not chaos") == (0, said)
    assert slow.run(is_full=True) == slow.run() == (0, ["backends exercised: one, two"])


def test_a_contract_suite_that_is_left_to_chaos_is_required_there(slow: Project) -> None:
    assert slow.run("-m", "not chaos", is_full=True)[0] == pytest.ExitCode.USAGE_ERROR


def test_whoever_leaves_the_contract_suite_to_chaos_needs_the_processes_all_the_same(slow: Project) -> None:
    slow.write("checks/backends/test_processes.py", PROCESSES.replace(', "two"', "").format("pass"))
    assert slow.run("-m", "not chaos")[0] == pytest.ExitCode.USAGE_ERROR


def test_a_contract_suite_of_which_a_sample_runs_is_named(project: Project) -> None:
    project.write("checks/conftest.py", CONFTEST.replace("sampled=[]", 'sampled=["two"]'))
    said = ["backends exercised: one, two (every fifth case of its contract suite, all of them in make contracts)"]
    assert project.run() == (0, said)
    assert project.run(is_full=True) == (0, ["backends exercised: one, two"])


def test_an_unknown_backend_cannot_be_required(project: Project) -> None:
    status, said = project.run(requires="one,tow")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert said == [f"ERROR: {VARIABLE} names tow; there are one, two, or write all"]


def test_every_backend_has_a_contract_suite() -> None:
    folder = Path(conftest.__file__).parent.parent / "contract"
    for backend in BACKENDS.values():
        file, _, test = backend.contract.partition("::")
        assert re.search(rf"^{test} = .*contract_tests\(", (folder / file).read_text(), re.MULTILINE), backend.name


def test_what_ran_in_several_processes_counts(project: Project) -> None:
    assert project.run("-p", "xdist.plugin", "-n", "2") == (0, ["backends exercised: one, two"])
    project.remove("checks/contract/test_two.py")
    status, said = project.run("-p", "xdist.plugin", "-n", "2")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert said[0] == "backends exercised: one"
