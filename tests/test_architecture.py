"""docs/architecture.md tells the truth: every file it names is there, and holds what is named with it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import grimp
import pytest

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ROOT / "src" / "perdure"
PAGE: Final = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING: Final = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

# `ctx_calls/step_calls.py` `run_step`: a file below src/perdure (or a path from the root), and a function, class or method in it.
NAMED: Final = re.compile(r"`([\w/]+\.py)` `([\w.]+)`")
FILE: Final = re.compile(r"`([\w/]+(?:/|\.py|\.sql|\.lua|\.md|\.toml))`")
QUESTION: Final = re.compile(r"^\| *(\d+) *\| *(Where [^|]+\?) *\| *`([\w/]+\.py)` `([\w.]+)` *\|$", re.MULTILINE)
NOUN: Final = re.compile(r"^\| \*\*([^*]+)\*\* \|", re.MULTILINE)


@cache
def _names_in(path: Path) -> frozenset[str]:
    """The functions, classes and methods that a module defines, methods as `Class.method`."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If):
                visit([*node.body, *node.orelse], prefix)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(names)


def _path_of(name: str) -> Path:
    return SOURCE / name if (SOURCE / name).exists() else ROOT / name


def test_every_function_that_the_map_names_is_where_it_says() -> None:
    named = NAMED.findall(PAGE)
    missing = [(file, name) for file, name in named if not _path_of(file).is_file() or name not in _names_in(_path_of(file))]
    assert len(named) >= 60
    assert missing == []


def test_every_file_that_the_map_names_is_there() -> None:
    assert [name for name in FILE.findall(PAGE) if not _path_of(name).exists()] == []


def test_the_map_answers_the_newcomers_questions() -> None:
    questions = QUESTION.findall(PAGE)
    assert [int(number) for number, *_ in questions] == list(range(1, 33))


@pytest.mark.parametrize("room", sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")))
def test_every_room_is_on_the_map(room: str) -> None:
    assert f"`{room}/`" in PAGE


def test_no_class_name_is_used_twice() -> None:
    classes = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in classes.items() if number > 1] == []


def test_no_room_is_a_crowd_and_no_module_a_scrap() -> None:
    """The contract suite may have more modules than another package: a module for each verb."""
    modules = [path for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    rooms = Counter(path.parent for path in modules)
    crowded = {str(room.relative_to(ROOT)): count for room, count in rooms.items() if count > 16 and room.name != "contract"}
    assert crowded == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers and inside functions count. The package itself only names its modules, and is left out."""
    graph = grimp.build_graph("perdure", exclude_type_checking_imports=False, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules if module != "perdure"}
    TopologicalSorter(imported).prepare()  # raises CycleError


def test_contributing_lists_at_most_25_nouns_once_each() -> None:
    nouns = NOUN.findall(CONTRIBUTING)
    assert 15 <= len(nouns) <= 25
    assert len(set(nouns)) == len(nouns)
