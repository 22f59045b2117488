"""What the host has, and the bodies of a campaign share: an echo server, a database, a lock, a queue."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Hosting:
    """Objects of the host's loop."""

    port: int
    database: Any
    # A context of the host: a task that is made in it is no task of a body.
    context: contextvars.Context
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    queue: asyncio.Queue[tuple[asyncio.Future[str], str]] = field(default_factory=lambda: asyncio.Queue(2))

    async def through_queue(self, text: str) -> str:
        """Return the text when the host's consumer has had it."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self.queue.put((answer, text))
        return await answer

    async def _consume(self) -> None:
        while True:
            answer, text = await self.queue.get()
            await asyncio.sleep(0.0005)
            if not answer.done():
                answer.set_result(text)

    async def _hold_lock(self) -> None:
        while True:
            async with self.lock:
                await asyncio.sleep(0.0005)
            await asyncio.sleep(0.001)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(await reader.readline())
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def hosting() -> AsyncIterator[Hosting]:
    """Serve bodies, until the block is left."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    database: Any = None
    try:
        import aiosqlite

        database = await aiosqlite.connect(":memory:")
    except ImportError:
        pass
    host = Hosting(server.sockets[0].getsockname()[1], database, contextvars.copy_context())
    tasks = [asyncio.create_task(host._consume()), asyncio.create_task(host._hold_lock())]
    try:
        yield host
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if database is not None:
            await database.close()
        server.close()
