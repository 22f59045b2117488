"""What happens to a run from outside while processes come and go: signals, decisions, a request to cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from perdure import Runtime
from perdure.errors import ApprovalDecided, ApprovalExpired, ApprovalNotFound, PersistenceError, RunFinished, RunNotFound
from tests.fuzz.process import MAIN
from tests.fuzz.programs import Program

_GONE: Final = (RunFinished, RunNotFound)
# Decided, expired, cancelled, or the run has started over since.
_TOO_LATE: Final = (*_GONE, ApprovalDecided, ApprovalExpired, ApprovalNotFound, PersistenceError)


class Outside:
    """Senders, deciders, and an operator, for the runs of a world."""

    def __init__(
        self,
        client: Runtime,
        program: Program,
        rng: random.Random,
        unfinished: Callable[[], Awaitable[list[str]]],
        longest_pause: float = 0.006,
    ) -> None:
        self._client = client
        self._program = program
        self._rng = rng
        self._unfinished = unfinished
        self._longest_pause = longest_pause

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Do all that until the block is left. Raises what any of them raised."""
        works = [self._send("s"), self._send("t"), self._decide()]
        if self._program.cancel_after is not None:
            works.append(self._cancel(self._program.cancel_after))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(end, Exception):
                    raise end

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.random() * self._longest_pause)

    async def _send(self, sender: str) -> None:
        number = 0
        while True:
            await self._pause()
            for run_id in await self._unfinished():
                number += 1
                with contextlib.suppress(*_GONE):
                    await self._client.signal(run_id, self._rng.choice("abc"), f"{sender}{number}")

    async def _decide(self) -> None:
        while True:
            await self._pause()
            for pending in await self._client.approvals():
                with contextlib.suppress(*_TOO_LATE):
                    if self._rng.random() < 0.5:
                        await self._client.approve(pending.run_id, pending.name, by="ada", key=pending.key)
                    else:
                        await self._client.reject(pending.run_id, pending.name, by="bob", reason="no", key=pending.key)

    async def _cancel(self, after: float) -> None:
        await asyncio.sleep(after)
        while True:
            with contextlib.suppress(RunFinished):
                try:
                    await self._client.cancel(MAIN)
                except RunNotFound:
                    await self._pause()
                    continue
            return
