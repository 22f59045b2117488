"""absurd as a queue on PostgreSQL. A client has one connection, so a worker process has ten of them, each with up to ten runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import psycopg
from absurd_sdk import AsyncAbsurd
from absurdctl import BUNDLED_SCHEMA_SQL

from benchmarks.program import result
from benchmarks.queues import QueueProgram, stopwatch
from benchmarks.work import RESULT_BYTES

_CLIENTS: Final = 10
_QUEUE: Final = "benchmark"


class AbsurdQueue(QueueProgram):
    """Tasks of one step."""

    def __init__(self) -> None:
        self._clients: list[AsyncAbsurd] = []

    async def open(self, place: str) -> None:
        """Install the schema unless it is there, and connect."""
        self._place = place
        async with await psycopg.AsyncConnection.connect(place, autocommit=True) as connection:
            with suppress(psycopg.errors.DuplicateFunction):
                await connection.execute(BUNDLED_SCHEMA_SQL)
        self._clients = [_client(place) for _ in range(_CLIENTS)]
        await self._clients[0].create_queue()

    async def close(self) -> None:
        """Disconnect."""
        for client in self._clients:
            await client.close()
        self._clients = []

    async def enqueue(self, runs: int) -> None:
        """Spawn tasks through all clients."""

        async def spawn(nth: int) -> None:
            for _ in range(nth, runs, _CLIENTS):
                await self._clients[nth].spawn("one_step", {})

        await asyncio.gather(*map(spawn, range(_CLIENTS)))

    async def open_worker(self, place: str) -> None:
        """Connect."""
        await self.open(place)

    async def work(self) -> None:
        """Each client claims up to ten tasks at a time."""
        await asyncio.gather(*(client.start_worker(concurrency=_CLIENTS) for client in self._clients))


def _client(place: str) -> AsyncAbsurd:
    client = AsyncAbsurd(place, queue_name=_QUEUE)
    client.register_task("one_step")(_one_step)
    return client


async def _one_step(_: Any, ctx: Any) -> str:
    async def format_result() -> str:
        stopwatch.begin_step()
        return result(1, RESULT_BYTES)

    done: str = await ctx.step("format_result", format_result)
    stopwatch.end_run()
    return done


PROGRAM = AbsurdQueue()
