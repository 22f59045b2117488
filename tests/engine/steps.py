"""What tests of many steps at once share: step functions that note what became of them."""

from __future__ import annotations

import asyncio
from typing import Any


class Steps:
    """Step functions that note what ran, what was cancelled, and how many ran at once."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.ended: list[Any] = []
        self.cancelled: list[Any] = []
        self.most = 0
        self.has_started = asyncio.Event()

    async def work(self, item: Any, seconds: float = 0) -> Any:
        self.started.append(item)
        self.most = max(self.most, len(self.started) - len(self.ended) - len(self.cancelled))
        self.has_started.set()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        self.ended.append(item)
        return item

    async def hang(self, item: Any) -> Any:
        return await self.work(item, 3600)

    async def fail(self, item: Any) -> Any:
        self.started.append(item)
        self.ended.append(item)
        raise ValueError(item)
