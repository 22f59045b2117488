"""How long a test waits for what should have happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# Far longer than anything here takes, on the busiest machine: a test that hangs fails by this, and no test waits for it.
PATIENCE: Final = 60.0


async def until(holds: Callable[[], object]) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - it changes in a thread, or has no event
            await asyncio.sleep(0.002)


async def turns(count: int = 20) -> None:
    """Return when the loop has turned so many times: what is ready by then, and what it makes ready, has run."""
    for _ in range(count):
        await asyncio.sleep(0)
