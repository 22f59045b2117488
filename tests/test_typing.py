"""The API as type checkers see it: mypy and pyright, both strict, report the marked lines of `tests/typing/` and no other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from os.path import relpath
from pathlib import Path
from typing import Final, TypeAlias

import pytest

import perdure.kv
import perdure.testing

ROOT: Final = Path(__file__).parent.parent
SPECIFICATION: Final = ROOT / "tests" / "typing"
MARK: Final = re.compile(r"# error$")

# Where an error is, and its sentence.
Errors: TypeAlias = dict[tuple[str, int], str]


def mypy(scratch: Path) -> Errors:
    shown = _run("mypy", "--no-pretty", "--no-color-output", *map(str, [*_files(), _write_lazy_names(scratch)]))
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", shown, re.MULTILINE)
    return {(Path(file).name, int(line)): text for file, line, text in found}


def pyright(scratch: Path) -> Errors:
    # The project's settings, but for the files that must fail: those are excluded there.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    include = [relpath(SPECIFICATION, scratch), _write_lazy_names(scratch).name]
    paths = {"include": include, "exclude": [], "extraPaths": [relpath(ROOT / "src", scratch)]}
    (scratch / "pyrightconfig.json").write_text(json.dumps(settings | paths), encoding="utf-8")
    shown = json.loads(_run("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(scratch)))
    errors = [found for found in shown["generalDiagnostics"] if found["severity"] == "error"]
    return {(Path(error["file"]).name, error["range"]["start"]["line"] + 1): error["message"] for error in errors}


def _run(checker: str, *arguments: str) -> str:
    command = [sys.executable, "-m", checker, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout


def _write_lazy_names(scratch: Path) -> Path:
    """Write a program that imports each name that is imported when it is first used."""
    names = {
        "perdure": [*perdure._MODULES, *perdure._MODULE_OF],
        "perdure.kv": [*perdure.kv._MODULE_OF],
        "perdure.testing": [*perdure.testing._HOMES],
    }
    lines = [f"from {module} import {name} as {name}" for module, found in names.items() for name in found]
    program = scratch / "lazy_names.py"
    program.write_text("\n".join(lines), encoding="utf-8")
    return program


def _files() -> list[Path]:
    return sorted(SPECIFICATION.glob("*.py"))


def _marked() -> Errors:
    return {
        (file.name, number): text.strip()
        for file in _files()
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if MARK.search(text)
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_checker_reports_the_marked_lines_and_no_other(checker: Callable[[Path], Errors], tmp_path: Path) -> None:
    marked, reported = _marked(), checker(tmp_path)
    assert {at: text for at, text in reported.items() if at not in marked} == {}
    assert {at: text for at, text in marked.items() if at not in reported} == {}


def test_lines_are_marked_in_the_files_that_must_fail_and_only_there() -> None:
    assert {name for name, _ in _marked()} == {file.name for file in _files() if file.name.startswith("fail_")}
