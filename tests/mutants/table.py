"""The tables of mutants: guards of perdure that are broken on purpose, one at a time, each with the tests that must notice.

A row has the text of one guard as it stands once in a file below src/perdure, what replaces it, the promise that this breaks, and
arguments of pytest. One with `equivalent` says why no test can notice. A `[[gone]]` row is a guard whose code is gone.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src"
TABLES: Final = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A guard, and how it is broken."""

    id: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    def path(self, source: Path) -> Path:
        """Return the file in this copy of the source."""
        return source / "perdure" / self.file

    def places(self) -> int:
        """Return how often the text of the guard stands in its file. A mutant applies if that is once."""
        path = self.path(SOURCE)
        return path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A guard whose code is gone, and why its promise needs no other test."""

    id: str
    promise: str
    reason: str


def mutants() -> list[Mutant]:
    """Return the rows of all tables."""
    return [Mutant(**{**row, "tests": tuple(row.get("tests", ()))}) for row in _rows("mutant")]


def gone() -> list[Gone]:
    """Return the guards whose code is gone."""
    return [Gone(**row) for row in _rows("gone")]


def _rows(kind: str) -> list[dict[str, Any]]:
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(TABLES.glob("*.toml"))]
    return [row for table in tables for row in table.get(kind, [])]
