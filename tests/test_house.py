"""What holds for the repository as a whole: its imports, its public names, its README, and what no file may mention."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Final

import pytest
from blockbuster import BlockingError

import perdure

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ROOT / "src" / "perdure"
# annotationlib belongs to the standard library from 3.14 on, which an older interpreter does not know.
ALLOWED: Final = sys.stdlib_module_names | {"annotationlib", "msgspec", "perdure"}
# Comes with every type checker, so that it may be named where only they look.
FOR_CHECKERS: Final = frozenset({"typing_extensions"})
# Where optional drivers live. Everything else is core.
DRIVERS: Final = frozenset({"cli", "dashboard", "integrations", "backends", "kv", "testing"})
# Extras of the core, imported by the one module that needs them when they are used.
EXTRAS: Final = frozenset({("src/perdure/model/recurrence.py", "cronsim")})

PROMISE: Final = """
A step's function runs at least once. Once its result is saved, it never runs again: every replay returns the saved result, and
the workflow sees a result only after it is saved. Only the worker that holds the run's lease can save results; a worker that
lost its lease may finish a side effect, but cannot change the run. A saved result survives the death of the process and, with
the settings stated for each store, a power failure. A signal that the store accepted is delivered exactly once. If new code
cannot replay an old run, perdure stops the run before it repeats an effect, and resumes it once the code fits. For effects
outside the store use the step's idempotency key (`current_step().idempotency_key`), `at_most_once=True`, or a transactional
step.
"""

# Package registries, and directories that exist on one machine only.
NOT_OURS: Final = re.compile(
    r"pypi\.org|pythonhosted\.org|registry\.npmjs\.org|registry\.yarnpkg\.com|deb\.debian\.org"
    r"|(?<![\w.~$}-])/(?:work|root|home/\w+|Users/\w+)/"
)


def test_import_pulls_in_only_the_standard_library_and_msgspec() -> None:
    program = "import sys; before = set(sys.modules); import perdure; print(*set(sys.modules) - before)"
    shown = subprocess.run([sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True).stdout
    assert {name.partition(".")[0] for name in shown.split()} <= ALLOWED


def test_core_names_no_third_party_import_but_msgspec() -> None:
    core = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] not in DRIVERS]
    foreign = {
        (str(path.relative_to(ROOT)), name) for path in core for name in _imports(path) if name not in ALLOWED | FOR_CHECKERS
    }
    assert core
    assert foreign == EXTRAS


def _imports(path: Path) -> set[str]:
    """The top-level names that a file imports, wherever in the file it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert len(set(perdure.__all__)) == len(perdure.__all__)
    assert [name for name in perdure.__all__ if not hasattr(perdure, name)] == []


def test_every_error_and_every_event_can_be_imported_from_the_package() -> None:
    classes = {
        name: found
        for module in (perdure.errors, perdure.events)
        for name, found in vars(module).items()
        if isinstance(found, type) and found.__module__ == module.__name__ and not name.startswith("_")
    }
    assert {"RunCancelled", "RunCancelledEvent", "ResumeStateCollector"} <= classes.keys()
    assert {name for name, found in classes.items() if getattr(perdure, name, None) is not found} == set()


@pytest.mark.parametrize("name", ["Lease", "RunInfo", "Store"])
def test_what_the_signatures_of_a_store_name_can_be_imported_from_the_package(name: str) -> None:
    assert isinstance(getattr(perdure, name), type)


def test_the_package_carries_its_type_marker() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_no_file_names_a_registry_or_a_directory_of_one_machine() -> None:
    found = {
        (str(path.relative_to(ROOT)), line.strip())
        for path in _files_of_the_repository()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if NOT_OURS.search(line)
    }
    assert not found


def _files_of_the_repository() -> list[Path]:
    """Tracked files and those about to be. safe.directory, because CI's checkout may belong to somebody else."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize(
    "line",
    ["see /work" + "/x.txt", "--index-url https://" + "pypi" + ".org/simple", "'/home" + "/ada/app.db'", "(/root" + "/.pyenv)"],
)
def test_a_line_that_names_one_is_found(line: str) -> None:
    assert NOT_OURS.search(line)


@pytest.mark.parametrize("line", ["docs/work/a", ".github/workflows/ci.yml", "https://host.example/home/ada/x", "$HOME/root/x"])
def test_a_line_that_only_looks_like_one_is_not(line: str) -> None:
    assert not NOT_OURS.search(line)


def test_readme_makes_the_promise_word_for_word() -> None:
    assert _words(PROMISE) in _words((ROOT / "README.md").read_text(encoding="utf-8"))


def _words(text: str) -> str:
    """One line, without the marks of a quotation."""
    return " ".join(re.sub(r"^> ?", "", text, flags=re.MULTILINE).split())


def test_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.search(r"`pip install '\.\[([\w,]+)\]'`\. There are ([^.]+)\.", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named is not None
    assert set(re.findall(r"\w+", named[2])) - {"and"} == extras.keys() >= set(named[1].split(","))


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


async def test_a_blocking_call_in_the_loop_is_refused_and_remembered(blocking_calls: list[str]) -> None:
    with pytest.raises(BlockingError):
        time.sleep(0)  # noqa: ASYNC251 - the very thing the guard is for
    assert [call.rpartition(":")[0] for call in blocking_calls] == ["time.sleep at tests/test_house.py"]
    blocking_calls.clear()
