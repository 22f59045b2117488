"""A listener whose connection breaks: another is opened at once after a long time, and after a pause when it broke soon."""

from __future__ import annotations

import asyncio

import pytest

from perdure.backends.base import change_listener
from perdure.backends.base.change_listener import ChangeListener
from perdure.backends.base.lifecycle import Lifecycle


class BreakingListener(ChangeListener):
    """A listener whose connections can be opened and then break after this many seconds."""

    def __init__(self, lasts: float) -> None:
        super().__init__(Lifecycle("a store"))
        self.lasts = lasts
        self.opened = 0

    async def _open(self) -> None:
        self.opened += 1

    async def _listen(self) -> None:
        await asyncio.sleep(self.lasts)
        raise ConnectionResetError


async def test_a_connection_that_breaks_at_once_is_not_opened_again_and_again() -> None:
    listener = BreakingListener(lasts=0)
    async with asyncio.timeout(60):
        for _ in range(1000):  # watchers, each of which is woken at once
            await listener.start()
            await asyncio.sleep(0.001)
    assert 1 < listener.opened < 6
    await listener.close()


async def test_a_connection_that_lasted_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_listener, "_LASTING", 0.01)
    listener = BreakingListener(lasts=0.02)
    for expected in range(1, 4):
        await listener.start()
        assert listener.opened == expected
        assert listener._listening is not None
        await listener._listening
    await listener.close()
