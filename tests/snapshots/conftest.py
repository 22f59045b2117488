"""Two worlds that share one clock."""

from __future__ import annotations

import pytest

from perdure.options import EngineSettings
from perdure.testing import ManualClock
from tests.snapshots.elsewhere import There


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The time that `wf.run` and `wf.start` go by, which they otherwise take from the system."""
    clock = ManualClock()
    monkeypatch.setattr("perdure.worker.single_run._settings", lambda: EngineSettings(clock=clock, unload_grace=0))
    return clock


@pytest.fixture
def here(clock: ManualClock) -> There:
    return There(clock)


@pytest.fixture
def there(clock: ManualClock) -> There:
    return There(clock)
