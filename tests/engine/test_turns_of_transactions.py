"""The turns that the transactions of one run take, with all that the run writes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from perdure import stores
from perdure.engine.recorder import Recorder
from perdure.model.records import Lease
from perdure.testing import ManualClock


async def test_a_turn_that_is_cancelled_at_the_moment_it_comes_goes_to_the_next_one() -> None:
    drive: Any = SimpleNamespace(clock=ManualClock())
    recorder = Recorder(drive, stores.memory(), Lease(run_id="run", epoch=1, token="token", until=2), [])
    async with asyncio.timeout(5):
        await recorder.hold()
        cancelled, next_one = asyncio.ensure_future(recorder.hold()), asyncio.ensure_future(recorder.hold())
        await asyncio.sleep(0)
        cancelled.cancel()
        recorder.let_go_on()  # before the one that is cancelled has run again
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await next_one
        recorder.let_go_on()
        await recorder.hold()
