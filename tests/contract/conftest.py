"""What the contract suites run under, beyond what every test does."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without notifications polls, here more often than every second: cases wait for it."""
    monkeypatch.setattr("perdure.backends.sql.store.POLL_EVERY", 0.1)
    monkeypatch.setattr("perdure.backends.key_value.store._POLL_EVERY", 0.1)
