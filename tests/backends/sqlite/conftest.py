"""A store on a temporary file."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from perdure.backends.sqlite import SQLiteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def dsn(path: Path) -> str:
    return f"sqlite:///{quote(str(path))}"


@pytest.fixture
def store(path: Path) -> SQLiteStore:
    """Not closed: dropping it gives everything back."""
    return SQLiteStore(path)
