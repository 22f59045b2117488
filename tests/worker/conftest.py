"""The stores that the runtime's tests run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure import stores
from perdure.store import Store


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """A fresh store of each kind."""
    opened: Store
    if request.param == "memory":
        opened = stores.memory()
    else:
        opened = await asyncio.to_thread(stores.sqlite, tmp_path / "app.db")  # finding the file's real path looks at the disk
    yield opened
    await opened.close()


@pytest.fixture
def _no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever would look again only after a while does not within a test: it has to know when."""
    for module in ("aio.store_watch", "worker.worker"):
        monkeypatch.setattr(f"perdure.{module}.POLL_SECONDS", 3600.0)
