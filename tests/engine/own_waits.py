"""What a workflow function may wait for by itself: the engine does not know when it is over."""

from __future__ import annotations

import asyncio


async def own_wait(seconds: float) -> None:
    """Return after so many seconds of the event loop. Unlike `asyncio.sleep` in a workflow function, it is not recorded."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(seconds, lambda: None if over.done() else over.set_result(None))
    await over
