"""A store in a temporary directory."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from perdure.backends.files import FilesStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def dsn(path: Path) -> str:
    return f"files:{quote(str(path))}"


@pytest.fixture
def store(path: Path) -> FilesStore:
    """Not closed: dropping it gives everything back."""
    return FilesStore(path)
